"""A whole data set, ready to be cut into tasks: images of one shape, their classes, and which of them are for testing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeroforget.data.values import Preparation


@dataclass(frozen=True, eq=False)
class Collection:
    """Images `(count, channels, height, width)` of bytes with a class each; `test` is true for the test images."""

    name: str
    classes: tuple[str, ...]
    images: Tensor
    labels: Tensor
    test: Tensor
    prepare: Preparation

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.test):
            raise ValueError(
                f"data set '{self.name}': {len(self.images)} images, {len(self.labels)} labels and {len(self.test)} "
                "test marks; there must be one of each for every image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the network sees: after the crop."""
        channels, height, width = self.images.shape[1:]
        crop = self.prepare.crop
        return (channels, height, width) if crop is None else (channels, crop, crop)
