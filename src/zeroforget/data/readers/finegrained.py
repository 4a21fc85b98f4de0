"""The fine-grained data sets of the paper: Flowers, Birds, Actions, Scenes, Cars and Aircraft."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zeroforget.data.collection import DataError, Listing
from zeroforget.data.readers.files import lines, listing, matlab, numbers, pairs


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
    for path, images in ((folder / "devkit" / "cars_train_annos.mat", "cars_train"), (tests, "cars_test")):
        (table,) = matlab(path, "annotations")
        try:
            rows += [
                (f"{images}/{row['fname']}", int(row["class"]) - 1, images == "cars_test")
                for row in np.atleast_1d(table)
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
