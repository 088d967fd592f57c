"""The two convolutional networks of the paper (appendix B), as plain `nn.Sequential` chains.

Both use 3x3 convolutions with padding 1, ReLU, 2x2 max-pooling, one hidden layer of 128 units, and
element-wise dropout after every convolutional block and after the hidden layer. A chain lets the part
before the first dropout run once for all Monte Carlo samples.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from stfseb.errors import StfsebError


class _BlockCNN(nn.Sequential):
    """Blocks of convolutions and pooling, then one hidden layer and the output layer."""

    blocks: tuple[tuple[int, ...], ...] = ()

    def __init__(self, in_channels: int, classes: int, dropout: float, image_size: int, hidden: int) -> None:
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("classes", classes, 1),
            ("hidden", hidden, 1),
            ("image_size", image_size, 2 ** len(self.blocks)),
        ):
            if value < least:
                raise StfsebError(f"{name}={value}: {type(self).__name__} needs at least {least}")
        if not 0.0 <= dropout < 1.0:
            raise StfsebError(f"dropout={dropout}: the rate must be in [0, 1)")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, side, index = in_channels, image_size, 0
        for number, widths in enumerate(self.blocks, 1):
            for width in widths:
                index += 1
                layers[f"conv{index}"] = nn.Conv2d(channels, width, 3, padding=1)
                layers[f"relu{index}"] = nn.ReLU()
                channels = width
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            layers[f"dropout{number}"] = nn.Dropout(dropout)
            side //= 2
        layers["flatten"] = nn.Flatten()
        layers["hidden"] = nn.Linear(channels * side * side, hidden)
        layers["relu"] = nn.ReLU()
        layers["dropout"] = nn.Dropout(dropout)
        layers["output"] = nn.Linear(hidden, classes)
        super().__init__(layers)
        self.spec: dict[str, Any] = {
            "network": type(self).__name__,
            "arguments": {
                "in_channels": in_channels,
                "classes": classes,
                "dropout": dropout,
                "image_size": image_size,
                "hidden": hidden,
            },
        }

    def __getitem__(self, index: slice | int) -> Any:
        """Return a layer, or a plain chain of some layers: `net[:-1]` is the feature extractor."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)


class SmallCNN(_BlockCNN):
    """Two convolutions (32, 64 filters) and a hidden layer: MNIST, Fashion-MNIST and OrganAMNIST."""

    blocks = ((32,), (64,))

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 10,
        dropout: float = 0.5,
        image_size: int = 28,
        hidden: int = 128,
    ) -> None:
        super().__init__(in_channels, classes, dropout, image_size, hidden)


class DeepCNN(_BlockCNN):
    """Six convolutions (32, 32, 64, 64, 128, 128 filters) and a hidden layer: CIFAR-10 and PathMNIST."""

    blocks = ((32, 32), (64, 64), (128, 128))

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        dropout: float = 0.1,
        image_size: int = 32,
        hidden: int = 128,
    ) -> None:
        super().__init__(in_channels, classes, dropout, image_size, hidden)
