"""A multilayer perceptron with dropout, for rows of features."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MLP(nn.Sequential):
    """Hidden layers of `hidden` units with ReLU, each followed by dropout, and a linear output layer.

    Inputs of more dimensions (small images) are flattened.
    """

    def __init__(
        self, in_features: int, outputs: int = 1, hidden: Sequence[int] = (64, 64), dropout: float = 0.1
    ) -> None:
        for name, value in (("in_features", in_features), ("outputs", outputs), *(("hidden", h) for h in hidden)):
            if value < 1:
                raise StfsebError(f"{name}={value}: MLP needs at least 1")
        if not hidden:
            raise StfsebError("hidden=(): MLP needs a hidden layer, give for example (64,)")
        if not 0.0 <= dropout < 1.0:
            raise StfsebError(f"dropout={dropout}: the rate must be in [0, 1)")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        width = in_features
        for index, units in enumerate(hidden, 1):
            layers[f"hidden{index}"] = nn.Linear(width, units)
            layers[f"relu{index}"] = nn.ReLU()
            layers[f"dropout{index}"] = nn.Dropout(dropout)
            width = units
        layers["output"] = nn.Linear(width, outputs)
        super().__init__(layers)
        self.spec: dict[str, Any] = {
            "network": "MLP",
            "arguments": {
                "in_features": in_features,
                "outputs": outputs,
                "hidden": list(hidden),
                "dropout": dropout,
            },
        }
