"""Pictures that are not eight bits a channel, or not opaque: scaled, or put on white; all others keep their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import helpers
from zeroforget.data import decode as decode_module
from zeroforget.data import load_folder
from zeroforget.data.cache import fingerprint
from zeroforget.data.decode import decode
from zeroforget.data.readers.folders import read_folder
from zeroforget.data.values import Treatment

RAMP = np.array([0, 1000, 8191, 33333, 65535])
GREYS = [0, 4, 32, 130, 255]


def saved(path: Path, values: np.ndarray) -> Path:
    """The values as rows of pixels, five by five."""
    Image.fromarray(np.tile(values, (5, 1))).save(path)
    return path


def greys(path: Path, size: int = 5) -> list[int]:
    image = decode(str(path), size)
    assert (image == image[:1]).all()
    return image[0, 0].tolist()


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled(ending: str, tmp_path: Path) -> None:
    assert greys(saved(tmp_path / f"a.{ending}", RAMP.astype(np.uint16))) == GREYS


def test_a_dark_sixteen_bit_pgm_stays_dark(tmp_path: Path) -> None:
    path = tmp_path / "a.ppm"
    path.write_bytes(b"P5 5 1 65535\n" + np.array([0, 60, 120, 200, 255], dtype=">u2").tobytes())
    assert decode(str(path), 5).max() <= 1


@pytest.mark.parametrize("most", [1, 255, 65535])
def test_floating_values_are_scaled_by_what_they_can_be(most: int, tmp_path: Path) -> None:
    assert greys(saved(tmp_path / "a.tif", (RAMP / 65535 * most).astype(np.float32))) == GREYS


@pytest.mark.parametrize("most", [1.5, 255 * 1.5])
def test_values_up_to_half_above_white_are_white(most: float, tmp_path: Path) -> None:
    white = most / 1.5
    assert greys(saved(tmp_path / "a.tif", (np.array([0, 0.5, 1, 1.2, 1.5]) * white).astype(np.float32))) == [
        0, 128, 255, 255, 255
    ]  # fmt: skip


def test_a_picture_of_no_numbers_is_damaged(tmp_path: Path) -> None:
    path = str(saved(tmp_path / "a.tif", np.full(5, np.nan, np.float32)))
    target = np.zeros((1, 3, 5, 5), np.uint8)
    told = decode_module.decode_chunk(target, 0, [(path, None)], (5, 0, False))
    assert told == [(path, "cannot be decoded: none of its pixels is a finite number")]


@pytest.mark.parametrize(("odd", "grey"), [(np.nan, 0), (np.inf, 255), (-1, 0)])
def test_what_is_no_number_leaves_the_others_as_they_are(odd: float, grey: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tif", np.array([0, odd, 0.5, 0.25, 1], dtype=np.float32))
    assert greys(path) == [0, grey, 128, 64, 255]


def test_a_picture_wider_than_a_band_is_scaled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.png", RAMP.astype(np.uint16))
    monkeypatch.setattr(decode_module, "BAND", 2)
    assert greys(path) == GREYS


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_is_white(mode: str, tmp_path: Path) -> None:
    image = Image.new(mode, (4, 4))
    image.save(tmp_path / "a.png", **({"transparency": 0} if mode in "PL" else {}))
    assert (decode(str(tmp_path / "a.png"), 4) == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"])
def test_opaque_pictures_of_eight_bits_keep_their_bytes(mode: str, tmp_path: Path) -> None:
    noise = np.random.RandomState(0).randint(0, 256, (9, 7, 3)).astype(np.uint8)
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.fromarray(noise).convert(mode).save(path)
    with Image.open(path) as opened:
        assert opened.mode == mode
        before = opened.convert("RGBA").convert("RGB") if mode == "P" else opened.convert("RGB")
    resized = before.resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(decode(str(path), 8), np.asarray(resized).transpose(2, 0, 1))


def test_only_what_may_have_been_decoded_otherwise_is_decoded_anew(tmp_path: Path) -> None:
    """The name that earlier versions gave to an entry, of official photographs alone, is still its name."""
    helpers.picture(tmp_path / "photos" / "a" / "0.JPEG", 1)
    listing = read_folder(tmp_path / "photos")
    assert fingerprint(listing, Treatment(8)) == _before(listing.base, listing.files)
    saved(tmp_path / "photos" / "a" / "1.png", RAMP.astype(np.uint16))
    listing = read_folder(tmp_path / "photos")
    for version in (1, 2):
        assert fingerprint(listing, Treatment(8)) != _before(listing.base, listing.files, version)
    assert load_folder(tmp_path / "photos", 8).images.shape == (2, 3, 8, 8)


def _before(base: Path, files: tuple[str, ...], version: int = 1) -> str:
    digest = hashlib.sha256(f"({version}, Treatment(size=8, boxes=False, trim=0, upright=False))".encode())
    for name in files:
        state = (base / name).stat()
        digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:20]
