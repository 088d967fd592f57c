"""The registry: the paper's fifteen sets with well-formed facts, and the data folder's rules."""

from __future__ import annotations

import re
import stat
import sys

import pytest

from stfseb.data import sets
from stfseb.data.corruptions.suites import CIFAR10_C, CIFAR10_C_EXTRA, MNIST_C
from stfseb.data.folder import cache_folder, data_folder, require_writable, user_cache, writable
from stfseb.data.readers import READERS
from stfseb.errors import StfsebError

PAPER = {
    "mnist", "fmnist", "cifar10", "pathmnist", "organamnist", "kmnist", "cifar100", "dermamnist", "organcmnist",
    "notmnist", "svhn", "bloodmnist", "organsmnist", "mnist-c", "cifar10-c",
}  # fmt: skip


def test_the_papers_sets_and_one_more():
    assert set(sets.all_sets()) == PAPER | {"breastmnist"}
    assert set(READERS) == {name for name, entry in sets.all_sets().items() if not entry.types}


def test_facts_are_well_formed():
    seen: dict[str, str] = {}
    for entry in sets.all_sets().values():
        for file in (*entry.files, *entry.downloads):
            for md5 in (*((file.md5,) if file.md5 else ()), *file.earlier):
                assert re.fullmatch(r"[0-9a-f]{32}", md5), file
                assert seen.setdefault(md5, file.path) == file.path, "one checksum for two files"
        for file in entry.downloads:
            assert file.urls, file
            assert all(re.match(r"https?://", url) and file.name in url for url in file.urls)
        assert entry.licence
        assert entry.home.startswith("http")


def test_suites_agree_with_the_generators():
    assert sets.get("mnist-c").types == MNIST_C
    assert sets.get("cifar10-c").types == CIFAR10_C
    extra = {file.name.removesuffix(".npy") for file in sets.get("cifar10-c").extra}
    assert extra == set(CIFAR10_C_EXTRA)


def test_counts_of_the_publishers():
    counts = {name: {s: split.count for s, split in entry.splits.items()} for name, entry in sets.all_sets().items()}
    assert counts["mnist"] == {"train": 60_000, "test": 10_000}
    assert counts["cifar100"] == {"train": 50_000, "test": 10_000}
    assert counts["svhn"] == {"test": 26_032}
    assert counts["organamnist"] == {"train": 34_561, "validation": 6_491, "test": 17_778}
    assert counts["organsmnist"]["test"] == 8_827
    assert counts["notmnist"] == {"test": 18_724}


def test_unknown_set():
    with pytest.raises(StfsebError, match="unknown data set 'cifar': did you mean 'cifar10"):
        sets.get("cifar")


def test_missing_files_by_split(real_data):
    if (real_data / "kmnist/train-images-idx3-ubyte.gz").is_file():
        pytest.skip("the whole of KMNIST is on disk here")
    kmnist = sets.get("kmnist")
    assert kmnist.missing(real_data, "test") == []
    assert [file.name for file in kmnist.missing(real_data)] == [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    ]


def test_folder_from_argument_environment_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_DATA", str(tmp_path / "named"))
    assert data_folder() == tmp_path / "named"
    assert data_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("STFSEB_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert data_folder() == tmp_path / "cache" / "stfseb"
    monkeypatch.setenv("STFSEB_DATA", "~/x")
    assert "~" not in str(data_folder())


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StfsebError, match="is a file: name a folder"):
        data_folder(tmp_path / "f")
    with pytest.raises(StfsebError, match="cannot be made"):
        require_writable(tmp_path / "f" / "deeper")


def test_read_only_folder_is_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = tmp_path / "shared"
    shared.mkdir()
    assert cache_folder(shared) == shared / "generated"
    # Root may write anywhere, so that the refusal of the operating system is stood in for.
    shared.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr("stfseb.data.folder.os.access", lambda path, mode: path != shared)
    assert not writable(shared)
    assert not writable(shared / "not" / "there")
    assert cache_folder(shared) == user_cache() / "generated"
    with pytest.raises(StfsebError, match="is read-only: set STFSEB_DATA"):
        require_writable(shared)
    shared.chmod(stat.S_IRWXU)
