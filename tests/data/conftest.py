"""Real data for these tests: what STFSEB_DATA names, or what `shared/data/prepare` beside the checkout writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = Path(__file__).resolve().parents[3] / "shared" / "data" / "prepare"


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("STFSEB_DATA"):
        return Path(named)
    if not PREPARE.is_file():
        pytest.skip("no real data: STFSEB_DATA is not set and ../shared/data is not beside the checkout")
    folder = tmp_path_factory.getbasetemp().parent / "stfseb-real-data"
    if not folder.is_dir():
        made = tmp_path_factory.mktemp("prepare") / "data"
        subprocess.run([sys.executable, str(PREPARE), str(made)], check=True, capture_output=True)
        try:
            made.rename(folder)  # whole or not at all, also when several workers get here together
        except OSError:
            shutil.rmtree(made)
    return folder
