"""The built-in networks by name, as saved models know them."""

from __future__ import annotations

from typing import Any

from torch import nn

from stfseb.errors import unknown
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.mlp import MLP

BUILT_IN: dict[str, type[nn.Module]] = {"SmallCNN": SmallCNN, "DeepCNN": DeepCNN, "MLP": MLP}


def build(spec: dict[str, Any]) -> nn.Module:
    """Rebuild a built-in network, or the list of an ensemble's, from the JSON that `save` wrote."""
    name = str(spec.get("network"))
    if name == "list":
        return nn.ModuleList(build(member) for member in spec["members"])
    if name not in BUILT_IN:
        raise unknown("network", name, BUILT_IN)
    return BUILT_IN[name](**spec["arguments"])
