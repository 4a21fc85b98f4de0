"""The table of data sets: where they officially come from, how they are laid out, how their images are prepared.

Checksums are those that public libraries verify the same files with; where none is known the field says so, and the
size, the archive's own check sums and the reader's counts have to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroforget.data.readers.arrays import read_cifar10, read_cifar100, read_digits, read_fashion_mnist, read_mnist
from zeroforget.data.readers.published import (
    read_actions,
    read_aircraft,
    read_birds,
    read_cars,
    read_flowers,
    read_imagenet,
    read_scenes,
    read_tiny_imagenet,
)
from zeroforget.data.values import Listing, Pixels, Preparation, Treatment


@dataclass(frozen=True)
class Archive:
    """One official file: its address (empty where one must ask its owners for it), its checksum as `md5:...`, and what
    is there once it is unpacked `into` a folder. `nested` archives hold one archive for each class. The `mirror` is
    asked where the official address does not answer."""

    file: str
    url: str
    checksum: str | None
    gives: str
    unpack: bool = True
    into: str = "."
    nested: bool = False
    mirror: str = ""


@dataclass(frozen=True)
class Source:
    """A data set: how many classes, training and test images it officially has, and all that is needed to read it.

    `folders` are where under a data root it may lie: our own name first, then the names that archives and other
    libraries give it. `needs` are the files or folders without which it is not there.
    """

    name: str
    title: str
    classes: int
    train: int
    test: int
    read: Callable[[Path], Pixels | Listing]
    prepare: Preparation
    treatment: Treatment | None = None
    folders: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()
    home: str = ""
    terms: str = ""
    by_hand: str = ""


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLIPPED = Preparation(IMAGENET_MEAN, IMAGENET_STD, flip=True)
CROPPED = Preparation(IMAGENET_MEAN, IMAGENET_STD, crop=224, flip=True)
IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx(base: str, sums: tuple[str, ...], mirror: str = "") -> tuple[Archive, ...]:
    return tuple(
        Archive(file, base + file, f"md5:{md5}", file, unpack=False, mirror=mirror and mirror + file)
        for file, md5 in zip((f"{name}.gz" for name in IDX_NAMES), sums, strict=True)
    )


MNIST_SUMS = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
FASHION_SUMS = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
LECUN = "http://yann.lecun.com/exdb/mnist/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TORONTO = "https://www.cs.toronto.edu/~kriz/"
OXFORD = "https://www.robots.ox.ac.uk/~vgg/data/"
STANFORD = "http://vision.stanford.edu/Datasets/"
CARS = "https://ai.stanford.edu/~jkrause/"
SPECIES = "https://data.caltech.edu/records/65de6-vp158/files/"
INDOOR = "http://groups.csail.mit.edu/vision/LabelMe/NewImages/"
TORRALBA = "https://web.mit.edu/torralba/www/"

SMALL = (
    Source(
        "digits",
        "Handwritten digits, 8x8, of scikit-learn",
        *(10, 1442, 355),
        read=read_digits,
        prepare=Preparation(mean=(0.3053,), std=(0.3758,)),
        home="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        terms="CC BY 4.0",
    ),
    Source(
        "mnist",
        "MNIST handwritten digits",
        *(10, 60000, 10000),
        read=read_mnist,
        prepare=Preparation(mean=(0.1307,), std=(0.3081,)),
        folders=("mnist", "MNIST/raw", "MNIST"),
        needs=IDX_NAMES,
        archives=_idx(LECUN, MNIST_SUMS, "https://ossci-datasets.s3.amazonaws.com/mnist/"),
        home=LECUN,
        terms="CC BY-SA 3.0",
    ),
    Source(
        "fashion-mnist",
        "Fashion-MNIST, Zalando's articles",
        *(10, 60000, 10000),
        read=read_fashion_mnist,
        prepare=Preparation(mean=(0.2860,), std=(0.3530,)),
        folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        needs=IDX_NAMES,
        archives=_idx(FASHION, FASHION_SUMS),
        home="https://github.com/zalandoresearch/fashion-mnist",
        terms="MIT",
    ),
    Source(
        "cifar10",
        "CIFAR-10",
        *(10, 50000, 10000),
        read=read_cifar10,
        prepare=Preparation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), pad=4, flip=True),
        folders=("cifar10/cifar-10-batches-py", "cifar10", "cifar-10-batches-py"),
        needs=("data_batch_1", "data_batch_5", "test_batch", "batches.meta"),
        archives=(
            Archive(
                "cifar-10-python.tar.gz",
                f"{TORONTO}cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",
                "cifar-10-batches-py",
            ),
        ),
        home=f"{TORONTO}cifar.html",
        terms="none stated; cite the report",
    ),
    Source(
        "cifar100",
        "CIFAR-100",
        *(100, 50000, 10000),
        read=read_cifar100,
        prepare=Preparation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), pad=4, flip=True),
        folders=("cifar100/cifar-100-python", "cifar100", "cifar-100-python"),
        needs=("train", "test", "meta"),
        archives=(
            Archive(
                "cifar-100-python.tar.gz",
                f"{TORONTO}cifar-100-python.tar.gz",
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                "cifar-100-python",
            ),
        ),
        home=f"{TORONTO}cifar.html",
        terms="none stated; cite the report",
    ),
)
IMAGENETS = (
    Source(
        "tiny-imagenet",
        "Tiny ImageNet, 64x64",
        *(200, 100000, 10000),
        read=read_tiny_imagenet,
        prepare=Preparation((0.4802, 0.4481, 0.3975), (0.2764, 0.2689, 0.2816), flip=True),
        treatment=Treatment(64),
        folders=("tiny-imagenet/tiny-imagenet-200", "tiny-imagenet", "tiny-imagenet-200"),
        needs=("wnids.txt", "words.txt", "train", "val"),
        archives=(
            Archive(
                "tiny-imagenet-200.zip",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
                "tiny-imagenet-200",
            ),
        ),
        home="http://cs231n.stanford.edu",
        terms="ImageNet's terms: non-commercial research",
    ),
    Source(
        "imagenet",
        "ImageNet ILSVRC2012",
        *(1000, 1281167, 50000),
        read=read_imagenet,
        prepare=CROPPED,
        treatment=Treatment(256),
        folders=("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"),
        needs=("train/n01440764", "val"),  # the first class of the thousand; Tiny ImageNet lacks it
        archives=(
            Archive(
                "ILSVRC2012_devkit_t12.tar.gz", "", "md5:fa75699e90414af021442c21a62c3abf", "ILSVRC2012_devkit_t12"
            ),
            Archive("ILSVRC2012_img_val.tar", "", "md5:29b22e2961454d5413ddabcf34fc5622", "val", into="val"),
            Archive(
                *("ILSVRC2012_img_train.tar", "", "md5:1d675b47d978889d74fa0da5fadfb00e", "train"),
                into="train",
                nested=True,
            ),
        ),
        home="https://image-net.org/download.php",
        terms="non-commercial research, after asking for access",
        by_hand="ask for access at https://image-net.org/download.php",
    ),
)
FINE_GRAINED = (
    Source(
        "flowers",
        "Oxford 102 Flowers",
        *(102, 2040, 6149),
        read=read_flowers,
        prepare=CROPPED,
        treatment=Treatment(256),
        folders=("flowers", "flowers-102"),
        needs=("jpg", "imagelabels.mat", "setid.mat"),
        archives=(
            Archive(
                "102flowers.tgz",
                f"{OXFORD}flowers/102/102flowers.tgz",
                "md5:52808999861908f626f3c1f4e79d11fa",
                "jpg",
            ),
            Archive(
                *("imagelabels.mat", f"{OXFORD}flowers/102/imagelabels.mat"),
                *("md5:e0620be6f572b9609742df49c70aed4d", "imagelabels.mat"),
                unpack=False,
            ),
            Archive(
                *("setid.mat", f"{OXFORD}flowers/102/setid.mat"),
                *("md5:a5357ecc9cb78c4bef273ce3793fc85c", "setid.mat"),
                unpack=False,
            ),
        ),
        home=f"{OXFORD}flowers/102/",
        terms="none stated; research",
    ),
    Source(
        "birds",
        "CUB-200-2011 Birds",
        *(200, 5994, 5794),
        read=read_birds,
        prepare=FLIPPED,
        treatment=Treatment(224, boxes=True),
        folders=("birds/CUB_200_2011", "birds", "CUB_200_2011"),
        needs=("images", "images.txt", "train_test_split.txt", "bounding_boxes.txt"),
        archives=(
            Archive(
                "CUB_200_2011.tgz",
                f"{SPECIES}CUB_200_2011.tgz",
                "md5:97eceeb196236b17998738112f37df78",
                "CUB_200_2011",
            ),
        ),
        home="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        terms="non-commercial research and education",
    ),
    Source(
        "actions",
        "Stanford 40 Actions",
        *(40, 4000, 5532),
        read=read_actions,
        prepare=FLIPPED,
        treatment=Treatment(224),
        folders=("actions", "Stanford40", "stanford40"),
        needs=("JPEGImages", "ImageSplits"),
        archives=(
            Archive("Stanford40_JPEGImages.zip", f"{STANFORD}Stanford40_JPEGImages.zip", None, "JPEGImages"),
            Archive("Stanford40_ImageSplits.zip", f"{STANFORD}Stanford40_ImageSplits.zip", None, "ImageSplits"),
        ),
        home=f"{STANFORD}40actions.html",
        terms="none stated; research",
    ),
    Source(
        "scenes",
        "MIT Indoor Scenes 67",
        *(67, 5360, 1340),
        read=read_scenes,
        prepare=CROPPED,
        treatment=Treatment(256),
        folders=("scenes", "indoorCVPR_09"),
        needs=("Images", "TrainImages.txt", "TestImages.txt"),
        archives=(
            Archive(
                "indoorCVPR_09.tar",
                f"{INDOOR}indoorCVPR_09.tar",
                "sha1:0b252516e746ba428b96af408d2e8162d9b08ac5",
                "Images",
            ),
            Archive("TrainImages.txt", f"{TORRALBA}TrainImages.txt", None, "TrainImages.txt", unpack=False),
            Archive("TestImages.txt", f"{TORRALBA}TestImages.txt", None, "TestImages.txt", unpack=False),
        ),
        home=f"{TORRALBA}indoor.html",
        terms="research only",
    ),
    Source(
        "cars",
        "Stanford Cars",
        *(196, 8144, 8041),
        read=read_cars,
        prepare=CROPPED,
        treatment=Treatment(256),
        folders=("cars", "stanford_cars"),
        needs=("devkit", "cars_train", "cars_test"),
        archives=(
            Archive("car_devkit.tgz", f"{CARS}cars/car_devkit.tgz", "md5:c3b158d763b6e2245038c8ad08e45376", "devkit"),
            Archive(
                *("cars_train.tgz", f"{CARS}car196/cars_train.tgz"),
                *("md5:065e5b463ae28d29e77c1b4b166cfe61", "cars_train"),
            ),
            Archive(
                "cars_test.tgz", f"{CARS}car196/cars_test.tgz", "md5:4ce7ebf6a94d07f1952d94dd34c4d501", "cars_test"
            ),
            Archive(
                *("cars_test_annos_withlabels.mat", f"{CARS}car196/cars_test_annos_withlabels.mat"),
                *("md5:b0a2b23655a3edd16d84508592a98d10", "cars_test_annos_withlabels.mat"),
                unpack=False,
            ),
        ),
        home=f"{CARS}cars/car_dataset.html",
        terms="non-commercial research",
        by_hand="its official address no longer answers everywhere; a mirror with the same checksums will do",
    ),
    Source(
        "aircraft",
        "FGVC Aircraft, by variant",
        *(100, 6667, 3333),
        read=read_aircraft,
        prepare=CROPPED,
        treatment=Treatment(256, trim=20),
        folders=("aircraft/fgvc-aircraft-2013b", "aircraft", "fgvc-aircraft-2013b"),
        needs=("data/images", "data/variants.txt", "data/images_variant_trainval.txt", "data/images_variant_test.txt"),
        archives=(
            Archive(
                "fgvc-aircraft-2013b.tar.gz",
                f"{OXFORD}fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
                "md5:d4acdd33327262359767eeaa97a4f732",
                "fgvc-aircraft-2013b",
            ),
        ),
        home=f"{OXFORD}fgvc-aircraft/",
        terms="non-commercial research",
    ),
)
SOURCES = {source.name: source for source in (*SMALL, *IMAGENETS, *FINE_GRAINED)}
