"""The paper's data sets of pictures in files: ImageNet and Tiny ImageNet, and six fine-grained ones.

ImageNet's official validation images serve as the test set, since the labels of the test images were never given out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zeroforget.data.readers.folders import folders, images, lines, listing, matlab, numbers, pairs
from zeroforget.data.values import DataError, Listing

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


def read_flowers(folder: Path) -> Listing:
    """Oxford 102 Flowers. The official training and validation parts are both for training, as in the paper."""
    (labels,) = matlab(folder / "imagelabels.mat", "labels")
    train, valid, test = matlab(folder / "setid.mat", "trnid", "valid", "tstid")
    rows = []
    for part, final in ((train, False), (valid, False), (test, True)):
        for number in np.atleast_1d(part):
            if not 1 <= number <= len(labels):
                raise DataError(f"{folder / 'setid.mat'} is damaged: no image {number} in imagelabels.mat")
            rows.append((f"jpg/image_{number:05d}.jpg", int(labels[number - 1]) - 1, final))
    return listing(folder, rows, [f"flower {number}" for number in range(1, int(labels.max()) + 1)])


def read_birds(folder: Path) -> Listing:
    """CUB-200-2011, each image with the box around its bird."""
    classes = [name for _, name in pairs(folder / "classes.txt")]
    label = numbers(folder / "image_class_labels.txt", 1)
    train = numbers(folder / "train_test_split.txt", 1)
    corner = numbers(folder / "bounding_boxes.txt", 4)
    rows, boxes = [], []
    for image, name in pairs(folder / "images.txt"):
        for table, where in ((label, "image_class_labels"), (train, "train_test_split"), (corner, "bounding_boxes")):
            if image not in table:
                raise DataError(f"{folder / where}.txt is damaged: it says nothing of image {image} ({name})")
        x, y, width, height = corner[image]
        rows.append((f"images/{name}", int(label[image][0]) - 1, train[image][0] == 0))
        boxes.append((x, y, x + width, y + height))
    return listing(folder, rows, classes, boxes=boxes)


def read_actions(folder: Path) -> Listing:
    """Stanford 40 Actions: the class is the file's name without its number."""
    table = [line.split()[0] for line in lines(folder / "ImageSplits" / "actions.txt")]
    classes = table[1:] if table[0] == "action_name" else table
    number = {name: index for index, name in enumerate(classes)}
    rows = []
    for part in ("train", "test"):
        for name in lines(folder / "ImageSplits" / f"{part}.txt"):
            action = name.rpartition("_")[0]
            if action not in number:
                raise DataError(
                    f"{folder / 'ImageSplits' / part}.txt: '{name}' shows none of the actions of actions.txt"
                )
            rows.append((f"JPEGImages/{name}", number[action], part == "test"))
    return listing(folder, rows, classes)


def read_scenes(folder: Path) -> Listing:
    """MIT Indoor Scenes 67, in the 80 and 20 images a class of its authors' lists."""
    parts = {part: lines(folder / f"{part}Images.txt") for part in ("Train", "Test")}
    classes = sorted({name.partition("/")[0] for names in parts.values() for name in names})
    number = {name: index for index, name in enumerate(classes)}
    rows = [
        (f"Images/{name}", number[name.partition("/")[0]], part == "Test")
        for part, names in parts.items()
        for name in names
    ]
    return listing(folder, rows, classes)


def read_cars(folder: Path) -> Listing:
    """Stanford Cars: `devkit` for the names and the training labels, the test labels in a file of their own."""
    (classes,) = matlab(folder / "devkit" / "cars_meta.mat", "class_names")
    withheld = "cars_test_annos_withlabels.mat"
    inside = folder / "devkit" / withheld
    tests = inside if inside.is_file() else folder / withheld
    rows = []
    for path, part in ((folder / "devkit" / "cars_train_annos.mat", "cars_train"), (tests, "cars_test")):
        (table,) = matlab(path, "annotations")
        try:
            rows += [
                (f"{part}/{row['fname']}", int(row["class"]) - 1, part == "cars_test") for row in np.atleast_1d(table)
            ]
        except (ValueError, IndexError, TypeError) as error:
            raise DataError(f"{path} is damaged: its annotations lack 'fname' or 'class'") from error
    return listing(folder, rows, [str(name) for name in np.atleast_1d(classes)])


def read_aircraft(folder: Path) -> Listing:
    """FGVC Aircraft by variant; its training and validation parts are both for training."""
    base = folder / "data"
    classes = lines(base / "variants.txt")
    number = {name: index for index, name in enumerate(classes)}
    rows = []
    for part in ("trainval", "test"):
        path = base / f"images_variant_{part}.txt"
        for image, variant in pairs(path):
            if variant not in number:
                raise DataError(f"{path}: variant '{variant}' of image {image} is not in variants.txt")
            rows.append((f"data/images/{image}.jpg", number[variant], part == "test"))
    return listing(folder, rows, classes)
