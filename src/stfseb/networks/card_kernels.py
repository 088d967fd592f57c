"""Kernels of our own that run on CUDA alone, and what happens on cards that cannot run them."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

log = logging.getLogger("stfseb")

# By name, as Triton may be missing.
_CANNOT = ("OutOfResources", "CompilationError", "PTXASError", "ImportError", "ModuleNotFoundError")
_LOWERING = "PassManager::run failed"  # what Triton says in a RuntimeError where it knows no instruction for a card
_refused: set[tuple[Any, ...]] = set()


def on_card(module: str, name: str, key: tuple[Any, ...], instead: str, *args: Any) -> Any | None:
    """Return what `module.name(*args)` returns, None where this card cannot run it, which the log says once.

    A card with less shared memory than the tiles need refuses at the first launch, before anything is captured.

    Args:
        module: of the kernels, imported here: it needs Triton, which a build of torch for the CPU lacks.
        name: of the function in it.
        key: what decides whether the card can run it (device, precision, sizes of the tiles).
        instead: what is done otherwise, for the log.
        args: of the function.
    """
    asked = module, name, *key
    if asked in _refused:
        return None
    try:
        return getattr(import_module(module), name)(*args)
    except Exception as error:
        if type(error).__name__ not in _CANNOT and _LOWERING not in str(error):
            raise
        _refused.add(asked)
        log.warning("a faster kernel cannot run here (%s): %s instead", type(error).__name__, instead)
        return None
