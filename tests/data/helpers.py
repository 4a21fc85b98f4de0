"""Small data sets of real files in their official layouts. Each image has a colour of its own, so that a test can tell
which file a decoded image came from."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat


def colour(number: int) -> tuple[int, int, int]:
    return (number * 37 % 256, number * 91 % 256, number * 53 % 256)


def picture(path: Path, number: int, size: tuple[int, int] = (40, 30), **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour(number)).save(path, "JPEG", quality=95, **options)
    return path


def text(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def idx(path: Path, values: np.ndarray, zipped: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    return path


def mnist(folder: Path, zipped: bool = True) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(0)
    ending = ".gz" if zipped else ""
    images, labels = [], []
    for part, count in (("train", 60), ("t10k", 20)):
        images.append(draw.randint(0, 256, (count, 28, 28)).astype(np.uint8))
        labels.append(np.arange(count) % 10)
        idx(folder / f"{part}-images-idx3-ubyte{ending}", images[-1], zipped)
        idx(folder / f"{part}-labels-idx1-ubyte{ending}", labels[-1], zipped)
    return np.concatenate(images), np.concatenate(labels)


def python2_batch(data: np.ndarray, **lists: list[int] | list[str]) -> bytes:
    """The opcodes that Python 2's cPickle wrote the official CIFAR batches with: protocol 2, byte strings, numpy's
    `_reconstruct` and `dtype`."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<I", len(value)) + value

    def integer(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)

    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + string(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\nq\x03" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    shape = integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89" + string(data.tobytes()) + b"tb"
    body = string(b"data") + array
    for key, values in lists.items():
        items = b"".join(integer(v) if isinstance(v, int) else string(v.encode()) for v in values)
        body += string(key.encode()) + b"](" + items + b"e"
    return b"\x80\x02}(" + body + b"u."


def cifar100(folder: Path, classes: int = 100, names: Sequence[str] | None = None) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.RandomState(1)
    everything = []
    for name, count in (("train", 4 * classes), ("test", classes)):
        data = draw.randint(0, 256, (count, 3072)).astype(np.uint8)
        fine = [row % classes for row in range(count)]
        batch = python2_batch(data, fine_labels=fine, coarse_labels=fine, filenames=[f"f{row}.png" for row in fine])
        (folder / name).write_bytes(batch)
        everything.append(data)
    names = list(names or (f"thing {number}" for number in range(classes)))
    (folder / "meta").write_bytes(python2_batch(np.zeros((1, 1), np.uint8), fine_label_names=names))
    return np.concatenate(everything)


def cifar10(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 7):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        data = np.full((10, 3072), number, dtype=np.uint8)
        (folder / name).write_bytes(python2_batch(data, labels=list(range(10))))
    names = python2_batch(np.zeros((1, 1), np.uint8), label_names=[f"class{n}" for n in range(10)])
    (folder / "batches.meta").write_bytes(names)


def tiny_imagenet(folder: Path, codes: tuple[str, ...], train: int = 4, val: int = 2) -> None:
    number = 0
    rows = []
    for code in codes:
        for place in range(train):
            picture(folder / "train" / code / "images" / f"{code}_{place}.JPEG", number, (64, 64))
            number += 1
        for _ in range(val):
            name = f"val_{number}.JPEG"
            picture(folder / "val" / "images" / name, number, (64, 64))
            rows.append(f"{name}\t{code}\t0\t0\t63\t63")
            number += 1
    text(folder / "val" / "val_annotations.txt", *reversed(rows))
    text(folder / "wnids.txt", *reversed(codes))
    text(folder / "words.txt", *(f"{code}\tword of {code}, other word" for code in codes), "n99\tunused")


def imagenet(
    folder: Path, flat: bool, codes: Sequence[str] = ("n01440764", "n02012849", "n03126707"), train: int = 3
) -> None:
    for label, code in enumerate(codes):
        for place in range(train):
            picture(folder / "train" / code / f"{code}_{place}.JPEG", 10 * label + place)
        if not flat:
            picture(folder / "val" / code / f"ILSVRC2012_val_0000000{label}.JPEG", 100 + label)
    if flat:
        for place in range(3):
            picture(folder / "val" / f"ILSVRC2012_val_0000000{place + 1}.JPEG", 100 + place)
    kit = folder / "ILSVRC2012_devkit_t12" / "data"
    text(kit / "ILSVRC2012_validation_ground_truth.txt", "3", "1", "2")
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [
        (1, codes[0], "tench, Tinca tinca", "a fish", 0),
        (2, codes[1], "crane", "a bird", 0),
        (3, codes[2], "crane", "a machine", 0),
        *((number, code, f"thing {number}", "", 0) for number, code in enumerate(codes[3:], 4)),
        (len(codes) + 1, "n00001740", "entity", "not a class", 2),
    ]
    savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype=kind).reshape(-1, 1)})


def flowers(folder: Path, classes: int = 4) -> None:
    labels, sets = [], {"trnid": [], "valid": [], "tstid": []}
    for label in range(1, classes + 1):
        for part in ("trnid", "trnid", "valid", "tstid", "tstid", "tstid"):
            labels.append(label)
            sets[part].append(len(labels))
            picture(folder / "jpg" / f"image_{len(labels):05d}.jpg", len(labels))
    savemat(folder / "imagelabels.mat", {"labels": np.array([labels], dtype=np.uint8)})
    savemat(folder / "setid.mat", {name: np.array([ids], dtype=np.uint16) for name, ids in sets.items()})


def birds(folder: Path, classes: int = 4) -> None:
    """White images with the bird, a box of colour, at (10, 5) of size 20x10."""
    images, labels, split, boxes = [], [], [], []
    for label in range(1, classes + 1):
        for place in range(5):
            number = len(images) + 1
            name = f"{label:03d}.Bird_{label}/Bird_{place}.jpg"
            canvas = Image.new("RGB", (60, 40), (255, 255, 255))
            canvas.paste(colour(number), (10, 5, 30, 15))
            (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            canvas.save(folder / "images" / name, "JPEG", quality=100, subsampling=0)
            images.append(f"{number} {name}")
            labels.append(f"{number} {label}")
            split.append(f"{number} {int(place < 3)}")
            boxes.append(f"{number} 10.0 5.0 20.0 10.0")
    text(folder / "classes.txt", *(f"{label} {label:03d}.Bird_{label}" for label in range(1, classes + 1)))
    for name, rows in (
        ("images", images),
        ("image_class_labels", labels),
        ("train_test_split", split),
        ("bounding_boxes", boxes),
    ):
        text(folder / f"{name}.txt", *rows)


def actions(folder: Path, classes: int = 4) -> None:
    names = ("applauding", "blowing_bubbles", "riding_a_bike", "waving_hands")
    names += tuple(f"action_{number}" for number in range(5, classes + 1))
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for label, name in enumerate(names):
        for place in range(6):
            file = f"{name}_{place + 1:03d}.jpg"
            picture(folder / "JPEGImages" / file, 10 * label + place)
            parts["train" if place < 4 else "test"].append(file)
    text(folder / "ImageSplits" / "actions.txt", "action_name\tnumber_of_images", *(f"{name}\t\t6" for name in names))
    for part, files in parts.items():
        text(folder / "ImageSplits" / f"{part}.txt", *files)


def scenes(folder: Path) -> None:
    parts: dict[str, list[str]] = {"Train": [], "Test": []}
    for label, name in enumerate(("airport_inside", "bakery", "kitchen", "tv_studio")):
        for place in range(4):
            picture(folder / "Images" / name / f"a {place}.jpg", 10 * label + place)
            parts["Train" if place < 3 else "Test"].append(f"{name}/a {place}.jpg")
    for part, names in parts.items():
        text(folder / f"{part}Images.txt", *names)


def cars(folder: Path) -> None:
    kind = [(name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
    devkit = folder / "devkit"
    devkit.mkdir(parents=True)
    for part, path, count in (
        ("train", devkit / "cars_train_annos.mat", 3),
        ("test", folder / "cars_test_annos_withlabels.mat", 2),
    ):
        rows = []
        for label in range(1, 5):
            for place in range(count):
                name = f"{len(rows) + 1:05d}.jpg"
                picture(folder / f"cars_{part}" / name, 10 * label + place + (100 if part == "test" else 0))
                rows.append((1, 1, 20, 20, label, name))
        savemat(path, {"annotations": np.array(rows, dtype=kind)})
    names = np.array([f"Maker Model {label} 2012" for label in range(1, 5)], dtype=object)
    savemat(devkit / "cars_meta.mat", {"class_names": names})


def aircraft(folder: Path) -> None:
    """Images of one colour with a black banner of 20 rows at the foot."""
    names = ("707-320", "A340-600", "BAE 146-200", "Cessna 172")
    parts: dict[str, list[str]] = {"trainval": [], "test": []}
    (folder / "data" / "images").mkdir(parents=True)
    for label, name in enumerate(names):
        for place in range(4):
            number = 10 * label + place
            canvas = Image.new("RGB", (60, 60), colour(number))
            canvas.paste((0, 0, 0), (0, 40, 60, 60))
            canvas.save(folder / "data" / "images" / f"{number:07d}.jpg", "JPEG", quality=100, subsampling=0)
            parts["trainval" if place < 3 else "test"].append(f"{number:07d} {name}")
    text(folder / "data" / "variants.txt", *names)
    for part, rows in parts.items():
        text(folder / "data" / f"images_variant_{part}.txt", *rows)
