"""The built-in networks by name, as saved models know them."""

from __future__ import annotations

import shlex
from typing import Any

from torch import nn

from stfseb.errors import StfsebError, unknown
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.mlp import MLP

BUILT_IN: dict[str, type[nn.Module]] = {"SmallCNN": SmallCNN, "DeepCNN": DeepCNN, "MLP": MLP}

OWN = "stfseb_network"  # the attribute of a network from a user's file that says how it was made


def spec_of(net: nn.Module) -> dict[str, Any] | None:
    """Return how a network was made, as JSON knows it: a built-in one, one from a user's file, or a list of these."""
    spec = getattr(net, OWN, None) or getattr(net, "spec", None)
    return spec if isinstance(spec, dict) else None


def own_file(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a spec that names a user's file, of an ensemble that of the first member with one."""
    if spec.get("network") != "list":
        return spec if {"file", "make", "sha256"} <= spec.keys() else None
    members = spec.get("members")
    found = (own_file(one) for one in members if isinstance(one, dict)) if isinstance(members, list) else iter(())
    return next(filter(None, found), None)


def build(spec: dict[str, Any]) -> nn.Module:
    """Rebuild a built-in network, or the list of an ensemble's, from the JSON that `save` wrote."""
    name = str(spec.get("network"))
    if own := own_file(spec):
        raise StfsebError(
            f"the model's network is {own.get('make')} of the file {own['file']}, which a model does not hold: give "
            f"--network {shlex.quote(str(own['file']))} (its path), or in Python a fresh instance, load(path, net=...)"
        )
    if name == "list":
        return nn.ModuleList(build(member) for member in spec["members"])
    if name not in BUILT_IN:
        raise unknown("network", name, BUILT_IN)
    return BUILT_IN[name](**spec["arguments"])
