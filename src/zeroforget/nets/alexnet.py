"""AlexNet (Krizhevsky et al., 2012) as one column: 64, 192, 384, 256 and 256 maps, then 4096 and 4096 features.

These widths, of the one-column version of 2014, are the paper's: they sum to its 9,344 features and, by its rule for
counting, give its 54,547,712 weights. Those of the two-column original (96, 256, 384, 384, 256) would sum to 9,568.
"""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, flattened, hidden, initialize, scaled


class AlexNet(nn.Module):
    """Five convolutions and two hidden linear layers, for images of 224×224."""

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        check(shape, width, dropout)
        a, b, c, d, e, f, g = (scaled(n, width) for n in (64, 192, 384, 256, 256, 4096, 4096))
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], a, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("alexnet", self.convolutions, shape), f, g], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features
