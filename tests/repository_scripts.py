"""The scripts of this repository as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def script(name, folder="scripts"):
    """Return scripts/NAME.py, or that of another folder, imported anew."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_{folder}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
