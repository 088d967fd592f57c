"""The methods by their keys, as the command line and saved models name them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stfseb.errors import unknown

if TYPE_CHECKING:
    from stfseb.methods.base import Method

_WHERE = {
    "stfseb": ("st_fs_eb", "STFSEB"),
    "mcdropout": ("mc_dropout", "MCDropout"),
    "map": ("map", "MAP"),
    "mfvi": ("mfvi", "MFVI"),
    "fseb": ("fs_eb", "FSEB"),
    "gfsvi": ("gfsvi", "GFSVI"),
    "ensemble": ("ensemble", "Ensemble"),
    "outlierexposure": ("outlier_exposure", "OutlierExposure"),
}
KEYS = tuple(_WHERE)


def key_of(name: str) -> str:
    """Return the key that `name` means ("ST-FS-EB", "mc_dropout" and "MCDropout" are understood)."""
    key = "".join(character for character in name.lower() if character.isalnum())
    if key not in _WHERE:
        raise unknown("method", name, KEYS)
    return key


def method_class(name: str) -> type[Method]:
    """Return the class of a method by its key."""
    module, attribute = _WHERE[key_of(name)]
    found: type[Method] = getattr(importlib.import_module(f"stfseb.methods.{module}"), attribute)
    return found
