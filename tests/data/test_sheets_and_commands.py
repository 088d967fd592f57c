"""Contact sheets pixel by pixel, and `stfseb data` as a person types it."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from published_files import write_mat, write_medical
from typer.testing import CliRunner

from stfseb.data import sets
from stfseb.data.commands import app
from stfseb.data.sheet import GAP, MARGIN, contact_sheet
from stfseb.data.tasks import task_names
from stfseb.errors import StfsebError


def run(*words: str):
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def test_every_pixel_is_in_its_place():
    images = torch.randint(0, 256, (6, 3, 5, 4), dtype=torch.uint8)
    sheet = np.asarray(Image.open(io.BytesIO(contact_sheet(images, 2, 3, scale=2))).convert("RGB"))
    assert sheet.shape == (2 * MARGIN + 2 * (10 + GAP), 2 * MARGIN + 3 * (8 + GAP), 3)
    for index in range(6):
        top, left = MARGIN + index // 3 * (10 + GAP), MARGIN + index % 3 * (8 + GAP)
        tile = sheet[top : top + 10, left : left + 8]
        expected = images[index].permute(1, 2, 0).numpy().repeat(2, 0).repeat(2, 1)
        assert np.array_equal(tile, expected)
    assert (sheet[:MARGIN] == 255).all()


def test_titles_make_room_and_leave_ink():
    images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    plain = Image.open(io.BytesIO(contact_sheet(images, 2, 1)))
    named = Image.open(io.BytesIO(contact_sheet(images, 2, 1, ["first", "second"], ["one"], "Heading", "note")))
    assert named.width > plain.width
    assert named.height > plain.height
    left = np.asarray(named.convert("L"))[:, : named.width - plain.width]
    assert left.min() < 100


def test_empty_sheet():
    with pytest.raises(StfsebError, match="would be empty"):
        contact_sheet(torch.zeros(0, 1, 2, 2, dtype=torch.uint8), 1, 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_mat(tmp_path / "data/svhn/test_32x32.mat", 50)
    return tmp_path / "data"


def row(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{name} "))


def test_list_before_and_after_verify(folder):
    first = run("list")
    assert first.exit_code == 0
    assert "non-commercial" in row(first.output, "svhn")
    assert row(first.output, "svhn").rstrip().endswith("not yet")
    assert "64.3 MB" in row(first.output, "svhn")
    assert row(first.output, "mnist").rstrip().endswith("no")
    assert "subset  svhn/test_32x32.mat" in run("verify").output
    assert row(run("list").output, "svhn").rstrip().endswith("subset")
    (folder / "svhn/test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    verdict = run("verify", "svhn")
    assert isinstance(verdict.exception, StfsebError)
    assert "1 damaged: svhn/test_32x32.mat" in str(verdict.exception)
    assert row(run("list").output, "svhn").rstrip().endswith("DAMAGED")


def test_verify_an_empty_folder(folder):
    verdict = run("verify", "--folder", str(folder / "elsewhere"))
    assert "no published set is in" in str(verdict.exception)
    assert "missing  mnist/train-images" in run("verify", "mnist").output


def test_import_command(folder, tmp_path):
    write_medical(tmp_path / "in", "dermamnist")
    done = run("import", str(tmp_path / "in"))
    assert done.exit_code == 0, done.exception
    assert "medmnist/dermamnist.npz: reads well, not the published bytes" in done.output
    assert (folder / "medmnist/dermamnist.npz").is_file()


def test_download_command_without_a_network(folder, monkeypatch):
    import requests

    def nobody(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", nobody)
    done = run("download", "dermamnist", "bloodmnist")
    assert isinstance(done.exception, StfsebError)
    lines = str(done.exception).splitlines()
    assert len(lines) == 2
    assert "dermamnist could not be downloaded (zenodo.org: no connection): dermamnist.npz missing in" in lines[0]
    assert "already in" in run("download", "svhn").output


@pytest.mark.parametrize(("name", "rows"), [("svhn", 10), ("mini", 6)])
def test_show(folder, tmp_path, name, rows):
    done = run("show", name, "--columns", "5")
    assert done.exit_code == 0, done.exception
    with Image.open(tmp_path / f"{name}.png") as sheet:
        assert sheet.height > rows * 56
        assert sheet.width > 5 * 56


def test_show_errors(folder, tmp_path):
    assert "did you mean 'svhn'" in str(run("show", "shvn").exception)
    known = str(run("show", "nope").exception).partition("known are ")[2].split(", ")
    assert known == sorted({*sets.all_sets(), *task_names()})  # some are both, and named once
    assert "stfseb data download mnist" in str(run("show", "mnist").exception)
    assert "unknown split of svhn 'train'" in str(run("show", "svhn", "--split", "train").exception)
    assert "cifar10-c needs cifar10 test" in str(run("show", "cifar10-c").exception)
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.parametrize("suite", ["cifar10-c", "mnist-c"])
def test_show_suites(real_data, tmp_path, suite):
    out = tmp_path / "sheet.png"
    done = run("show", suite, "--out", str(out), "--folder", str(real_data))
    assert done.exit_code == 0, done.exception
    with Image.open(out) as file:
        sheet = np.asarray(file.convert("RGB")).astype(int)
    assert sheet.shape[0] > (20 if suite == "cifar10-c" else 16) * 56
    assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 100


def test_help_is_quick_to_import():
    code = (
        "import sys, stfseb.data.commands; print([m for m in ('torch', 'numpy', 'pooch', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
