"""Pictures as people have them: any size, mode and format, and many ways to be broken."""

from __future__ import annotations

import os
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from zeroforget.data.decode import MOST_FRAMES
from zeroforget.store.errors import Unreadable
from zeroforget.store.pictures import decode, decode_all

SHAPE = (3, 16, 16)


def gradient(width: int = 40, height: int = 40) -> Image.Image:
    """Red grows to the right, green downwards."""
    y, x = np.mgrid[0:height, 0:width]
    values = np.stack([255 * x / (width - 1), 255 * y / (height - 1), np.full((height, width), 128)], -1)
    return Image.fromarray(values.astype(np.uint8))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "tif", "gif", "ppm"])
def test_common_formats_look_alike(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    gradient().save(path)
    found, wanted = decode(path, SHAPE).int(), decode(gradient(), SHAPE).int()
    assert (found - wanted).abs().float().mean() < 8


def test_a_wide_picture_is_cut_in_the_middle() -> None:
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste((0, 0, 255), (100, 0, 200, 100))
    found = decode(wide, SHAPE)
    assert int(found[2, :, 1:-1].min()) == 255  # the outermost columns mix in what lies beside them
    assert int(found[0, :, 1:-1].max()) == 0


def test_small_pictures_are_enlarged_and_the_right_size_is_left_alone() -> None:
    assert decode(gradient(3, 5), SHAPE).shape == SHAPE
    exact = gradient(16, 16)
    assert torch.equal(decode(exact, SHAPE), torch.from_numpy(np.array(exact)).movedim(2, 0))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(tmp_path: Path, orientation: int) -> None:
    upright = gradient()
    undo = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for step in undo.get(orientation, []):
        stored = stored.transpose(step)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert torch.equal(decode(tmp_path / "a.png", SHAPE), decode(upright, SHAPE))


def test_sixteen_bits_keep_their_tones(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 16 * 16).reshape(16, 16).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    found = decode(tmp_path / "a.png", (1, 16, 16))[0]
    assert torch.equal(found, torch.from_numpy((ramp / 65535 * 255).round().astype(np.uint8)))


def test_float_pictures_from_zero_to_one_are_not_black(tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 0.5, np.float32)).save(tmp_path / "a.tif")
    assert int(decode(tmp_path / "a.tif", (1, 16, 16)).min()) == 128


@pytest.mark.parametrize("white", [1, 255])
@pytest.mark.parametrize("brightest", [1.0001, 1.5])
def test_a_pixel_that_is_brighter_than_white_leaves_the_others(white: float, brightest: float) -> None:
    ramp = np.linspace(0, white, 16 * 16, dtype=np.float32).reshape(16, 16)
    wanted = decode(Image.fromarray(ramp), (1, 16, 16))
    ramp[-1, -1] *= brightest
    assert torch.equal(decode(Image.fromarray(ramp), (1, 16, 16)), wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_picture_without_a_number_is_not_black(value: float) -> None:
    with pytest.raises(Unreadable, match="cannot be decoded: none of its pixels is a finite number"):
        decode(Image.fromarray(np.full((16, 16), value, np.float32)), SHAPE)


@pytest.mark.parametrize("largest", [200, 300, 65535])
def test_sixteen_bits_of_a_pgm_do_not_depend_on_the_largest(tmp_path: Path, largest: int) -> None:
    values = np.full((16, 16), 200, ">u2")
    values[0, 0] = largest
    (tmp_path / "a.pgm").write_bytes(b"P5 16 16 65535\n" + values.tobytes())
    assert decode(tmp_path / "a.pgm", (1, 16, 16))[0, 5, 5] == 1
    assert decode(tmp_path / "a.pgm", (1, 16, 16))[0, 0, 0] == round(largest / 257)


def test_a_large_picture_of_sixteen_bits_needs_little_more_than_its_pixels() -> None:
    large = Image.fromarray(np.arange(2**22, dtype=np.uint16).reshape(2048, 2048))
    tracemalloc.start()
    found = decode(large, (1, 2048, 2048))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**22 * 12
    wanted = (np.asarray(large, np.float64) / 65535 * 255).round().astype(np.uint8)
    assert torch.equal(found[0], torch.from_numpy(wanted))


def test_whatever_a_decoder_raises_means_that_the_picture_is_unreadable() -> None:
    class Broken(Image.Image):
        def getexif(self) -> Image.Exif:
            raise RuntimeError("Failed to decode frame 0")

    with pytest.raises(Unreadable, match="cannot be decoded: Failed to decode frame 0"):
        decode(Broken(), SHAPE)


def test_a_broken_avif_is_unreadable(tmp_path: Path) -> None:
    if not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    gradient(64, 64).save(tmp_path / "a.avif")
    content = bytearray((tmp_path / "a.avif").read_bytes())
    pixels = content.index(b"mdat") + 4
    content[pixels:] = bytes(len(content) - pixels)
    with pytest.raises(Unreadable, match="cannot be decoded"):
        decode(bytes(content), SHAPE)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(Unreadable, match="no regular file"):
        decode(tmp_path / "a.png", SHAPE)


def test_transparency_is_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    clear.save(tmp_path / "a.png")
    palette = Image.new("P", (20, 20), 0)
    palette.putpalette([255, 0, 0] + [0, 0, 0] * 255)
    palette.save(tmp_path / "b.png", transparency=0)
    for name in ("a.png", "b.png"):
        assert int(decode(tmp_path / name, SHAPE).min()) == 255, name


def test_cmyk_gray_one_bit_and_animated_pictures(tmp_path: Path) -> None:
    Image.new("CMYK", (20, 20), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    red = decode(tmp_path / "cmyk.jpg", SHAPE).float().mean((1, 2))
    assert red[0] > 200 > 60 > red[1]
    Image.new("1", (20, 20), 1).save(tmp_path / "bit.png")
    assert int(decode(tmp_path / "bit.png", SHAPE).min()) == 255
    frames = [Image.new("RGB", (20, 20), color) for color in ("blue", "red")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert decode(tmp_path / "moving.gif", SHAPE)[2].float().mean() > 200


def test_a_wrong_ending_does_not_matter(tmp_path: Path) -> None:
    gradient().save(tmp_path / "a.jpg", format="PNG")
    assert torch.equal(decode(tmp_path / "a.jpg", SHAPE), decode(gradient(), SHAPE))


def png(width: int, height: int) -> bytes:
    """A tiny file that claims these dimensions."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def bad_pictures(folder: Path) -> dict[str, str]:
    """Broken files and a word of what is said about each."""
    folder.mkdir(exist_ok=True)
    gradient(200, 200).save(folder / "whole.jpg")
    gradient(200, 200).save(folder / "whole.png")
    contents = {
        "zero.jpg": (b"", "empty"),
        "text.png": (b"this is a poem", "no picture"),
        "half.jpg": ((folder / "whole.jpg").read_bytes()[:900], "decoded"),
        "half.png": ((folder / "whole.png").read_bytes()[:300], "decoded"),
        "bomb.png": (png(60_000, 60_000), "pixels"),
        "large.png": (png(9_000, 9_000), "pixels"),
        "none.png": (png(0, 10), ""),
        "script.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", "no picture"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    for whole in ("whole.jpg", "whole.png"):
        (folder / whole).unlink()
    return {name: word for name, (_, word) in contents.items()}


def test_bad_pictures_are_named_one_by_one(tmp_path: Path) -> None:
    words = bad_pictures(tmp_path / "bad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, word in words.items():
            with pytest.raises(Unreadable, match=word):
                decode(tmp_path / "bad" / name, SHAPE)
        with pytest.raises(Unreadable, match="missing"):
            decode(tmp_path / "nothing.png", SHAPE)
        with pytest.raises(Unreadable, match="is a folder; pass the pictures in it"):
            decode(tmp_path / "bad", SHAPE)
        with pytest.raises(Unreadable, match="no picture"):
            decode(b"some bytes", SHAPE)


def test_among_many_the_bad_are_listed_and_the_rest_decoded(tmp_path: Path) -> None:
    bad_pictures(tmp_path / "bad")
    for number in range(20):
        gradient(20 + number, 30).save(tmp_path / "bad" / f"good{number:02d}.png")
    files = sorted((tmp_path / "bad").iterdir())
    seen: list[int] = []
    images, wrong = decode_all(files, SHAPE, lambda done, total: seen.append(done))
    assert images.shape == (len(files), *SHAPE)
    assert {files[row].name[:4] for row in wrong}.isdisjoint({"good"})
    assert len(wrong) == 8
    assert seen == list(range(1, len(files) + 1))
    good = files.index(tmp_path / "bad" / "good07.png")
    assert torch.equal(images[good], decode(files[good], SHAPE))


def test_many_pixels_lie_in_a_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroforget.store.pictures.IN_MEMORY", 100)
    gradient().save(tmp_path / "a.png")
    images, _ = decode_all([tmp_path / "a.png"] * 3, SHAPE)
    assert torch.equal(images[2], decode(tmp_path / "a.png", SHAPE))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_notes_that_cannot_be_read_do_not_spoil_the_picture(tmp_path: Path, ending: str) -> None:
    for number, exif in enumerate([b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0"]):
        broken, whole = tmp_path / f"{number}.{ending}", tmp_path / f"whole.{ending}"
        gradient().save(broken, exif=exif)
        gradient().save(whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(decode(broken, SHAPE), decode(whole, SHAPE))


def test_a_picture_is_turned_though_its_other_notes_cannot_be_written_again(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient().save(tmp_path / "plain.png", exif=exif)
    entries = struct.pack("<HHII", 0x0100, 1, 1, 0) + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    odd = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + struct.pack("<I", 0)
    gradient().save(tmp_path / "odd.png", exif=odd)
    assert torch.equal(decode(tmp_path / "odd.png", SHAPE), decode(tmp_path / "plain.png", SHAPE))


def test_scans_and_frames_are_bounded(tmp_path: Path) -> None:
    """A file of a few kilobytes could cost minutes: here, too, where no process is killed over it."""
    gradient().save(tmp_path / "a.jpg", progressive=True)
    content = (tmp_path / "a.jpg").read_bytes()
    last = content.rindex(b"\xff\xda")
    (tmp_path / "b.jpg").write_bytes(content[:last] + content[last:-2] * 200 + b"\xff\xd9")
    assert decode(tmp_path / "a.jpg", SHAPE).shape == SHAPE
    with pytest.raises(Unreadable, match="scans; at most 100 are decoded"):
        decode(tmp_path / "b.jpg", SHAPE)
    images = [Image.new("L", (1, 1), place % 256) for place in range(MOST_FRAMES + 1)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:])
    with pytest.raises(Unreadable, match=r"frames; at most 1,000 are read"):
        decode(tmp_path / "a.gif", SHAPE)


def test_an_icon_is_left_out(tmp_path: Path) -> None:
    """What it holds is measured only by decoding it, and may be enormous."""
    gradient().save(tmp_path / "a.ico")
    with pytest.raises(Unreadable, match="is no picture of a format that is read here"):
        decode(tmp_path / "a.ico", SHAPE)
