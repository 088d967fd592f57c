"""Where data sets lie: the folder that STFSEB_DATA names, else one in the user's cache.

Files keep their publishers' names and formats. Reading never writes, so that the folder may be shared and
read-only; what is made from the data (generated corruptions) goes to `cache_folder` instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stfseb.errors import StfsebError


def user_cache() -> Path:
    """Return the platform's cache folder for this user, with `stfseb` appended."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "stfseb"


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the data folder: the one given, else STFSEB_DATA, else the user's cache.

    The folder need not exist. One that somebody named and that is a file is an error.
    """
    named = str(folder) if folder is not None else os.environ.get("STFSEB_DATA", "")
    path = Path(named).expanduser() if named else user_cache()
    if path.exists() and not path.is_dir():
        raise StfsebError(f"data folder '{path}' is a file: name a folder in STFSEB_DATA")
    return path


def writable(folder: Path) -> bool:
    """Say whether files can be put into `folder` (or into the nearest folder above it that exists)."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def cache_folder(folder: str | Path | None = None) -> Path:
    """Return the folder for what is made from the data: beside it where it is writable, else the user's cache."""
    path = data_folder(folder)
    return (path if writable(path) else user_cache()) / "generated"


def require_writable(folder: Path) -> Path:
    """Return `folder`, made if need be, or say that nothing can be put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StfsebError(
            f"data folder '{folder}' cannot be made ({error.strerror}): set STFSEB_DATA to a folder of yours"
        ) from None
    if not writable(folder):
        raise StfsebError(f"data folder '{folder}' is read-only: set STFSEB_DATA to a folder of yours")
    return folder
