"""Bringing one's own copies and checking them: recognised by checksum or name, never half placed, flips found."""

from __future__ import annotations

import gzip
import io
import shutil
import zipfile

import numpy as np
import pytest
from published_files import idx_bytes, pixels, write_idx, write_mat, write_medical

from stfseb.data import sets
from stfseb.data.checks import check, recall, remember
from stfseb.data.importing import import_path, recognise
from stfseb.errors import StfsebError


def statuses(name, folder):
    return {verdict.path.rsplit("/", 1)[-1]: verdict.status for verdict in check(sets.get(name), folder)}


def test_real_copies_are_recognised_under_any_name(real_data, tmp_path):
    copy = tmp_path / "downloads" / "clothes.bin"
    copy.parent.mkdir()
    shutil.copy(real_data / "fashion-mnist/t10k-labels-idx1-ubyte.gz", copy)
    entry, file = recognise(copy)
    assert (entry.name, file.name) == ("fmnist", "t10k-labels-idx1-ubyte.gz")
    folder = tmp_path / "data"
    (line,) = import_path(copy, folder)
    assert line.startswith(
        "fashion-mnist/t10k-labels-idx1-ubyte.gz: md5 bb300cfdad3c16e7a12a480ee83cd310, as published"
    )
    assert (folder / "fashion-mnist/t10k-labels-idx1-ubyte.gz").read_bytes() == copy.read_bytes()
    assert import_path(copy, folder) == ["fashion-mnist/t10k-labels-idx1-ubyte.gz: already there"]
    assert list((folder / ".incoming").iterdir()) == []


def test_real_folder_of_several_sets(real_data, tmp_path):
    mixed = tmp_path / "mixed"
    for name in ("mnist", "kmnist"):
        (mixed / name).mkdir(parents=True)
        for part in ("images-idx3", "labels-idx1"):
            shutil.copy(real_data / name / f"t10k-{part}-ubyte.gz", mixed / name)
    shutil.copy(real_data / "medmnist/breastmnist.npz", mixed / "copy.npz")
    (mixed / "notes.txt").write_text("mine")
    lines = import_path(mixed, tmp_path / "data")
    assert len(lines) == 5
    assert statuses("breastmnist", tmp_path / "data") == {"breastmnist.npz": "published"}
    assert recall(tmp_path / "data", sets.get("breastmnist").files[0]) == "published"


def test_real_cifar_checksums_and_a_flipped_byte(real_data, tmp_path):
    found = statuses("cifar10", real_data)
    assert set(found.values()) == {"published"}
    assert len(found) == 6
    assert statuses("cifar100", real_data)["test.bin"] == "published"
    copy = tmp_path / "cifar100/cifar-100-binary/test.bin"
    copy.parent.mkdir(parents=True)
    data = bytearray((real_data / "cifar100/cifar-100-binary/test.bin").read_bytes())
    data[12_345_678] ^= 16
    copy.write_bytes(data)
    assert statuses("cifar100", tmp_path) == {"train.bin": "missing", "test.bin": "damaged"}
    with pytest.raises(
        StfsebError, match=r"test.bin is not CIFAR-100 as published: md5 [0-9a-f]{32}, published is 4499"
    ):
        import_path(copy, tmp_path / "data")
    assert not (tmp_path / "data" / "cifar100").exists()


@pytest.mark.parametrize("path", ["notmnist/notMNIST_small.tar.gz", "svhn/test_32x32.mat", "medmnist/pathmnist.npz"])
def test_real_flipped_byte_where_no_checksum_fits(real_data, tmp_path, path):
    """Subsets and repacked copies have no published checksum; their containers' own ones find the flip."""
    (name,) = [s.name for s in sets.all_sets().values() if any(file.path == path for file in s.files)]
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    data = bytearray((real_data / path).read_bytes())
    target.write_bytes(data)
    good = statuses(name, tmp_path)
    assert set(good.values()) <= {"readable", "subset", "published"}
    data[len(data) // 3] ^= 1
    target.write_bytes(data)
    assert set(statuses(name, tmp_path).values()) == {"damaged"}


def test_subset_is_named_as_one(tmp_path):
    write_mat(tmp_path / "svhn/test_32x32.mat")
    (verdict,) = check(sets.get("svhn"), tmp_path)
    assert verdict.status == "subset"
    assert verdict.said == "reads well, not the published bytes; subset: 5 of 26,032 test images"


def test_shared_file_names_need_a_word(tmp_path):
    write_idx(tmp_path / "mine")
    with pytest.raises(StfsebError, match=r"could belong to fmnist, kmnist, mnist, .*add --set NAME"):
        import_path(tmp_path / "mine", tmp_path / "data")
    lines = import_path(tmp_path / "mine", tmp_path / "data", only="kmnist")
    assert [line.split(":")[0] for line in lines] == [
        "kmnist/t10k-images-idx3-ubyte.gz",
        "kmnist/t10k-labels-idx1-ubyte.gz",
    ]
    assert "subset: 6 of 10,000" in lines[0]


def test_folder_names_tell_shared_file_names_apart(tmp_path):
    write_idx(tmp_path / "fashion-mnist")
    assert "fashion-mnist/t10k" in import_path(tmp_path / "fashion-mnist", tmp_path / "data")[0]


def test_labels_alone_cannot_be_checked(tmp_path):
    write_idx(tmp_path / "kmnist")
    (tmp_path / "kmnist/t10k-images-idx3-ubyte.gz").unlink()
    assert statuses("kmnist", tmp_path)["t10k-labels-idx1-ubyte.gz"] == "unchecked"


def test_damaged_copy_is_refused_and_nothing_is_left(tmp_path):
    write_medical(tmp_path / "in", "bloodmnist")
    path = tmp_path / "in/bloodmnist.npz"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(StfsebError, match=r"bloodmnist.npz is not BloodMNIST as published"):
        import_path(path, tmp_path / "data")
    assert [p for p in (tmp_path / "data").rglob("*") if p.is_file()] == []


def test_other_content_is_replaced_only_by_force(tmp_path):
    write_medical(tmp_path / "data/medmnist", "organamnist", 4)
    write_medical(tmp_path / "in", "organamnist", 7)
    before = (tmp_path / "data/medmnist/organamnist.npz").read_bytes()
    with pytest.raises(StfsebError, match="already there with other content: add --force"):
        import_path(tmp_path / "in", tmp_path / "data")
    assert (tmp_path / "data/medmnist/organamnist.npz").read_bytes() == before
    import_path(tmp_path / "in", tmp_path / "data", force=True)
    assert (tmp_path / "data/medmnist/organamnist.npz").read_bytes() != before


def test_unpacked_suite(tmp_path):
    source = tmp_path / "somewhere" / "mnist_c"
    for kind in sets.get("mnist-c").types:
        (source / kind).mkdir(parents=True)
        np.save(source / kind / "test_images.npy", pixels(10_000, 28, 28, 1))
        np.save(source / kind / "test_labels.npy", np.arange(10_000) % 10)
    lines = import_path(tmp_path / "somewhere", tmp_path / "data")
    assert len(lines) == 30
    assert not sets.get("mnist-c").missing(tmp_path / "data")
    assert "no checksum is published" in lines[0]


def test_archive_with_another_checksum(tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("mnist_c/fog/test_images.npy", b"")
    (tmp_path / "mnist_c.zip").write_bytes(out.getvalue())
    with pytest.raises(StfsebError, match="does not have the published checksum 4b34b330"):
        import_path(tmp_path / "mnist_c.zip", tmp_path / "data")


def test_nothing_to_import(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(StfsebError, match=r"nothing in .* is a published file"):
        import_path(tmp_path, tmp_path / "data")
    with pytest.raises(StfsebError, match="does not exist"):
        import_path(tmp_path / "gone", tmp_path / "data")
    with pytest.raises(StfsebError, match="unknown data set 'minst'"):
        import_path(tmp_path, tmp_path / "data", only="minst")


def test_a_verdict_lasts_until_the_file_changes(tmp_path):
    write_mat(tmp_path / "svhn/test_32x32.mat")
    entry = sets.get("svhn")
    assert recall(tmp_path, entry.files[0]) is None
    remember(tmp_path, check(entry, tmp_path))
    assert recall(tmp_path, entry.files[0]) == "subset"
    with (tmp_path / "svhn/test_32x32.mat").open("ab") as file:
        file.write(b"x")
    assert recall(tmp_path, entry.files[0]) is None
    (tmp_path / ".verified.json").write_text("[1, 2")
    assert recall(tmp_path, entry.files[0]) is None


def test_verdicts_on_a_read_only_folder_go_to_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = tmp_path / "shared"
    write_mat(shared / "svhn/test_32x32.mat")
    monkeypatch.setattr("stfseb.data.folder.os.access", lambda path, mode: "shared" not in str(path))
    remember(shared, check(sets.get("svhn"), shared))
    assert recall(shared, sets.get("svhn").files[0]) == "subset"
    assert not (shared / ".verified.json").exists()


def test_gzip_of_rubbish_is_damaged(tmp_path):
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels(6, 28, 27))))
    assert statuses("mnist", tmp_path)["t10k-images-idx3-ubyte.gz"] == "damaged"
