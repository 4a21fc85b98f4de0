"""LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling, every map of its second convolution reading every one of the
first."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, flattened, hidden, initialize, scaled


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
