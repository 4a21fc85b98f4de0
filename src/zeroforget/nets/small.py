"""A small convolutional network that learns 8×8 to 28×28 images in seconds."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.nets.layers import hidden, initialize
from zeroforget.nets.shapes import Shape, check, flattened, scaled


class Small(nn.Module):
    """Two 3×3 convolutions of 16 and 32 maps and a linear layer of 64 features."""

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        check(shape, width, dropout)
        first, second, last = (scaled(n, width) for n in (16, 32, 64))
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("small", self.convolutions, shape), last], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features
