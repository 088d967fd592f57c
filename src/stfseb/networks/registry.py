"""The built-in networks by name, as saved models know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.errors import unknown
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.mlp import MLP

if TYPE_CHECKING:
    from torch import nn

BUILT_IN: dict[str, type[nn.Module]] = {"SmallCNN": SmallCNN, "DeepCNN": DeepCNN, "MLP": MLP}


def build(spec: dict[str, Any]) -> nn.Module:
    """Rebuild a built-in network from the JSON that `save` wrote."""
    name = str(spec.get("network"))
    if name not in BUILT_IN:
        raise unknown("network", name, BUILT_IN)
    return BUILT_IN[name](**spec["arguments"])
