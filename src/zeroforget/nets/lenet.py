"""LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling, every map of its second convolution reading every one of the
first."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.nets.layers import hidden, initialize
from zeroforget.nets.shapes import Shape, check, flattened, scaled


class LeNet(nn.Module):
    """Two convolutions and two hidden linear layers: 6, 16, 120 and 84 features."""

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        check(shape, width, dropout)
        first, second, third, last = (scaled(n, width) for n in (6, 16, 120, 84))
        # Published for 32×32; padding lets 28×28 digits fill the same 5×5 maps.
        padding = 2 if min(shape[1:]) < 32 else 0
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], first, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("lenet", self.convolutions, shape), third, last], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features
