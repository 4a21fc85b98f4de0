"""ImageNet ILSVRC2012 and Tiny ImageNet: folders of classes named by WordNet numbers. Their official validation images
serve as the test set, since the labels of the test images were never given out."""

from __future__ import annotations

from pathlib import Path

from zeroforget.data.collection import DataError, Listing
from zeroforget.data.readers.files import folders, images, lines, listing, matlab

DEVKIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def read_tiny_imagenet(folder: Path) -> Listing:
    """`train/<class>/images`, `val/images` with `val_annotations.txt` (or sorted into class folders), `words.txt`."""
    codes = sorted(lines(folder / "wnids.txt"))
    number = {code: index for index, code in enumerate(codes)}
    rows = [
        (f"train/{code}/images/{name}", number[code], False)
        for code in codes
        for name in images(folder / "train" / code / "images")
    ]
    annotations = folder / "val" / "val_annotations.txt"
    if annotations.exists() or not (folder / "val" / codes[0]).is_dir():
        for place, line in enumerate(lines(annotations), 1):
            name, _, rest = line.partition("\t")
            code = rest.partition("\t")[0]
            if code not in number:
                raise DataError(f"{annotations}, line {place}: no class '{code}' in wnids.txt")
            rows.append((f"val/images/{name}", number[code], True))
    else:
        rows += _by_class(folder, "val", number)
    return listing(folder, rows, _first_words(folder / "words.txt", codes), codes)


def _by_class(folder: Path, part: str, number: dict[str, int]) -> list[tuple[str, int, bool]]:
    rows = []
    for code, label in number.items():
        inner = f"{part}/{code}/images" if (folder / part / code / "images").is_dir() else f"{part}/{code}"
        rows += [(f"{inner}/{name}", label, part != "train") for name in images(folder / inner)]
    return rows


def _first_words(path: Path, codes: list[str]) -> list[str]:
    words = dict(line.split("\t", 1) for line in lines(path) if "\t" in line)
    return _distinct([words.get(code, code).split(",")[0].strip() for code in codes], codes)


def _distinct(names: list[str], codes: list[str]) -> list[str]:
    """ImageNet has two classes 'crane' and two 'maillot': such names get their number added."""
    return [f"{name} ({code})" if names.count(name) > 1 else name for name, code in zip(names, codes, strict=True)]


def read_imagenet(folder: Path) -> Listing:
    """`train/<class>`; validation images sorted into `val/<class>`, or flat in `val` beside the development kit."""
    codes = folders(folder / "train")
    number = {code: index for index, code in enumerate(codes)}
    rows = [(f"train/{code}/{name}", number[code], False) for code in codes for name in images(folder / "train" / code)]
    if folders(folder / "val"):
        missing = sorted(set(codes) - set(folders(folder / "val")))
        if missing:
            raise DataError(f"{folder / 'val' / missing[0]} is missing ({len(missing)} classes have no test images)")
        rows += _by_class(folder, "val", number)
    else:
        rows += _from_ground_truth(folder, number)
    return listing(folder, rows, _words(folder, codes), codes)


def _from_ground_truth(folder: Path, number: dict[str, int]) -> list[tuple[str, int, bool]]:
    truth = [int(line) for line in lines(folder / DEVKIT / GROUND_TRUTH)]
    names = images(folder / "val")
    if len(names) != len(truth):
        raise DataError(
            f"{folder / 'val'} holds {len(names)} images, but {GROUND_TRUTH} speaks of {len(truth)}; unpack "
            "ILSVRC2012_img_val.tar again"
        )
    code = {place: code for code, (place, _) in _synsets(folder).items()}
    return [
        (f"val/{name}", number[code[place]], True)
        for name, place in zip(names, truth, strict=True)
        if code.get(place) in number
    ]


def _synsets(folder: Path) -> dict[str, tuple[int, str]]:
    """Class code to its place in the ground truth and its words, from the kit's `meta.mat` (leaves only)."""
    (synsets,) = matlab(folder / DEVKIT / "meta.mat", "synsets")
    return {
        str(row["WNID"]): (int(row["ILSVRC2012_ID"]), str(row["words"]))
        for row in synsets
        if int(row["num_children"]) == 0
    }


def _words(folder: Path, codes: list[str]) -> list[str]:
    if not (folder / DEVKIT / "meta.mat").is_file():
        return codes
    known = _synsets(folder)
    return _distinct([known[code][1].split(",")[0].strip() if code in known else code for code in codes], codes)
