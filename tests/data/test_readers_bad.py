"""Crafted files: each ends in one line that names the file, and never takes the memory its header claims."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from published_files import (
    idx_bytes,
    pixels,
    png_bytes,
    put,
    tar_bytes,
    write_idx,
    write_mat,
    write_medical,
)
from scipy.io import savemat

from stfseb.data.readers import cifar10_c, mnist_c, read
from stfseb.errors import StfsebError

MEMORY = 48 * 2**20


@pytest.fixture
def refused():
    """Read and expect a refusal: one line, the file's name in it, and little memory."""

    def check(reader, *arguments, match):
        tracemalloc.start()
        try:
            with pytest.raises(StfsebError, match=match) as caught:
                reader(*arguments)
            assert tracemalloc.get_traced_memory()[1] < MEMORY
        finally:
            tracemalloc.stop()
        assert "\n" not in str(caught.value)
        assert str(arguments[0 if reader is not read else 1]) in str(caught.value)

    return check


def idx_file(tmp_path, data: bytes):
    write_idx(tmp_path / "mnist")
    return put(tmp_path / "mnist/t10k-images-idx3-ubyte.gz", data)


GOOD_IDX = idx_bytes(pixels(6, 28, 28))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (GOOD_IDX, "gzip"),  # the extension lies: not compressed
        (gzip.compress(b"\x00\x00\x08\x01" + GOOD_IDX[4:]), "magic"),
        (gzip.compress(GOOD_IDX[:-1]), "truncated"),
        (gzip.compress(GOOD_IDX)[:-200], "cannot be used"),
        (gzip.compress(GOOD_IDX[:10]), "truncated in its header"),
        (gzip.compress(GOOD_IDX + b"x"), "more than"),
        (gzip.compress(idx_bytes(pixels(6, 28, 27))), r"\(28, 27\), not \(28, 28\)"),
        (gzip.compress(struct.pack(">4I", 0x803, 2**32 - 1, 28, 28)), "declares"),
        (gzip.compress(struct.pack(">4I", 0x803, 600_000, 28, 28)), "cannot hold"),
        (gzip.compress(idx_bytes(pixels(5, 28, 28))), "5 images but labels"),
        (b"", "cannot be used"),
        (gzip.compress(GOOD_IDX)[:-8] + b"\0" * 8, "CRC"),
    ],
)
def test_idx(tmp_path, refused, data, match):
    idx_file(tmp_path, data)
    refused(read, "mnist", tmp_path, "test", match=match)


def test_idx_bomb_is_not_unpacked(tmp_path, refused):
    bomb = struct.pack(">4I", 0x803, 6, 28, 28) + bytes(2**27)
    idx_file(tmp_path, gzip.compress(bomb, 1))
    refused(read, "mnist", tmp_path, "test", match="more than")


@pytest.mark.parametrize(
    ("data", "match"), [(b"", "records"), (b"\x80\x04" * 100, "records"), (b"\x0a" + bytes(3072), "labels from 10")]
)
def test_cifar(tmp_path, refused, data, match):
    put(tmp_path / "cifar10/cifar-10-batches-bin/test_batch.bin", data)
    refused(read, "cifar10", tmp_path, "test", match=match)


def mat_bytes(**arrays) -> bytes:
    out = io.BytesIO()
    savemat(out, arrays, do_compression=True)
    return out.getvalue()


X, Y = pixels(32, 32, 3, 4), np.ones((4, 1), np.uint8)
MAT_HEAD = mat_bytes(X=X)[:128]
PIXELS = struct.pack("<II", 2, X.size)  # the tag of X's pixels


def mat_inside(**arrays) -> bytes:
    """Return the first array of a file, unpacked."""
    return zlib.decompress(mat_bytes(**arrays)[136:])


def element(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "MATLAB"),
        (b"\x89HDF\r\n\x1a\n" + bytes(400), "MATLAB"),
        (mat_bytes(X=X), "no variable y"),
        (mat_bytes(X=X, y=Y[:3]), "4 images but labels"),
        (mat_bytes(X=X[:31], y=Y), "not uint8"),
        (mat_bytes(X=X.astype(float), y=Y), "not uint8"),
        (mat_bytes(X=X, y=np.array([["a"]] * 4, object)), "y is not of real numbers"),
        (mat_bytes(X=X, y=Y * 11), "labels from 11"),
        (mat_bytes(X=X, y=Y * 0.5), "whole numbers"),
        (mat_bytes(X=X, y=Y * np.nan), "whole numbers"),
        (MAT_HEAD + element(mat_inside(X=X).replace(PIXELS, struct.pack("<II", 2, 3 * 2**24))), "cut short"),
        (mat_bytes(X=X * 1j, y=Y), "X is not of real numbers"),
        (mat_bytes(X=X, y=Y)[:-30], "truncated"),
        (MAT_HEAD + struct.pack("<II", 15, 2**32 - 1) + b"xx", "cut short"),
        (MAT_HEAD + element(struct.pack("<II", 14, 2**32 - 16) + bytes(64)), "whole array"),
        (MAT_HEAD + element(b""), "empty"),
        (MAT_HEAD + element(element(bytes(100))), "whole array"),
    ],
)
def test_svhn(tmp_path, refused, data, match):
    put(tmp_path / "svhn/test_32x32.mat", data)
    refused(read, "svhn", tmp_path, "test", match=match)


def test_svhn_bomb(tmp_path, refused, monkeypatch):
    """What does not fit under the cap is left packed, however small the file is."""
    monkeypatch.setattr("stfseb.data.readers.svhn.CAP", 2**20)
    put(tmp_path / "svhn/test_32x32.mat", MAT_HEAD + element(bytes(2**27)))
    refused(read, "svhn", tmp_path, "test", match="too large")


def test_svhn_dimensions_that_claim_more_than_the_file(tmp_path, refused):
    write_mat(tmp_path / "svhn/test_32x32.mat", 4, compress=False)
    path = tmp_path / "svhn/test_32x32.mat"
    dims = struct.pack("<4i", 32, 32, 3, 4)
    put(path, path.read_bytes().replace(dims, struct.pack("<4i", 32, 32, 3, 2**30)))
    refused(read, "svhn", tmp_path, "test", match="variable X")


def archive(*members, kind=None, **fields) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.type = kind or tarfile.REGTYPE
            for key, value in fields.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG that declares any size over one row of pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 + min(width, 100)))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


GOOD_PNG = png_bytes(pixels(28, 28))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (archive(("../../A/x.png", GOOD_PNG)), "outside the archive"),
        (archive(("/A/x.png", GOOD_PNG)), "outside the archive"),
        (archive(("n/A/x.png", b""), kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "not a regular file"),
        (archive(("n/A/x.png", b""), kind=tarfile.LNKTYPE, linkname="n/A/y.png"), "not a regular file"),
        (archive(("n/A/x.png", b""), kind=tarfile.CHRTYPE), "not a regular file"),
        (archive(("n/A/x.png", b""), kind=tarfile.FIFOTYPE), "not a regular file"),
        (archive(("n/A/x.png", b"")).replace(b"00000000000\x00", b"77777777777\x00", 1), "cannot be used"),
        (archive(("n/A/x.png", bytes(2**17))), "declares 131,072 bytes"),
        (archive(("n/K/x.png", GOOD_PNG)), "letter from A to J"),
        (archive(("n/A/x.gif", GOOD_PNG)), "letter from A to J"),
        (archive(("n/A/x.png", png(60_000, 60_000))), "60000 x 60000 pixels"),
        (archive(("n/A/x.png", png(29, 28))), "29 x 28 pixels"),
        (archive(("n/A/x.png", png_bytes(pixels(28, 28, 3)))), "8-bit grey"),
        (archive(("n/A/x.png", b"GIF89a")), "no readable image"),
        (tar_bytes([(f"n/A/{i}.png", GOOD_PNG if i else b"") for i in range(3)])[:1600], "cannot be used"),
        (tar_bytes([("n/A/x.png", GOOD_PNG), *((f"n/A/{i}.png", b"") for i in range(101))]), "101 of its"),
        (b"PK\x03\x04 not a tar", "cannot be used"),
        (b"", "cannot be used"),
    ],
)
def test_notmnist(tmp_path, refused, data, match):
    put(tmp_path / "notmnist/notMNIST_small.tar.gz", gzip.compress(data))
    refused(read, "notmnist", tmp_path, "test", match=match)
    assert [path.name for path in tmp_path.rglob("*.png")] == []


def test_notmnist_bomb_in_a_long_name(tmp_path, refused, monkeypatch):
    """tarfile gathers a member's extended header in memory; the stream under it ends the bomb."""
    monkeypatch.setattr("stfseb.data.readers.notmnist.UNPACKED", 2**22)
    long = archive(("././@LongLink", bytes(2**26)), kind=tarfile.GNUTYPE_LONGNAME)
    put(tmp_path / "notmnist/notMNIST_small.tar.gz", gzip.compress(long, 1))
    refused(read, "notmnist", tmp_path, "test", match="unpacks to more")


def test_notmnist_not_gzip(tmp_path, refused):
    put(tmp_path / "notmnist/notMNIST_small.tar.gz", archive(("n/A/x.png", GOOD_PNG)))
    refused(read, "notmnist", tmp_path, "test", match="gzip")


def npy(shape: str, descr: str = "|u1", order: str = "False", body: bytes = b"") -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def npz(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


LABELS = npy("(2, 1)", body=b"\0\1")
IMAGES = npy("(2, 28, 28)", body=bytes(2 * 784))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"not a zip", "zip"),
        (npz(test_images=IMAGES), "no array test_labels"),
        (npz(test_images=IMAGES, test_labels=npy("(2, 1)", "|O", body=b"cos\nsystem\n.")), "pickled"),
        (npz(test_images=npy("(2, 28, 28)", "|O"), test_labels=LABELS), "pickled"),
        (npz(test_images=npy("(2, 28, 28)", "<f8", body=bytes(2 * 784 * 8)), test_labels=LABELS), "integers"),
        (npz(test_images=npy("(2, 28, 28)", "<u2", body=bytes(2 * 784 * 2)), test_labels=LABELS), "not uint8"),
        (npz(test_images=npy("(2, 28, 28, 3)", body=bytes(4704)), test_labels=LABELS), r"not \(N, 28, 28\)"),
        (npz(test_images=npy("(2000000000, 28, 28)"), test_labels=LABELS), "does not fit"),
        (npz(test_images=npy("(-2, 28, 28)"), test_labels=LABELS), "impossible shape"),
        (npz(test_images=npy("(2, 28, 28)", order="True", body=bytes(1568)), test_labels=LABELS), "Fortran"),
        (npz(test_images=IMAGES, test_labels=npy("(2, 1)", body=b"\0\2")), "labels from 0 to 2"),
        (npz(test_images=IMAGES, test_labels=npy("(3, 1)", body=b"\0\1\0")), "2 images but labels"),
        (npz(test_images=IMAGES, test_labels=b"\x93NUMPY\x09\x00"), "cannot be used"),
        (npz(test_images=IMAGES, test_labels=LABELS)[:-10], "zip"),
    ],
)
def test_medmnist(tmp_path, refused, data, match):
    put(tmp_path / "medmnist/breastmnist.npz", data)
    refused(read, "breastmnist", tmp_path, "test", match=match)


def test_medmnist_bomb_and_lying_directory(tmp_path, refused):
    path = put(tmp_path / "medmnist/breastmnist.npz", npz(test_images=IMAGES + bytes(2**27), test_labels=LABELS))
    refused(read, "breastmnist", tmp_path, "test", match="does not fit")
    honest = npz(test_images=IMAGES, test_labels=LABELS)
    size = struct.pack("<I", len(IMAGES))
    assert honest.count(size) == 2
    put(path, honest.replace(size, struct.pack("<I", 2**31)))
    refused(read, "breastmnist", tmp_path, "test", match="declares")


def test_medmnist_flipped_pixel_fails_its_checksum(tmp_path, refused):
    write_medical(tmp_path / "medmnist", "breastmnist")
    path = tmp_path / "medmnist/breastmnist.npz"
    with zipfile.ZipFile(path) as old:
        stored = io.BytesIO()
        with zipfile.ZipFile(stored, "w") as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
    data = bytearray(stored.getvalue())
    with zipfile.ZipFile(stored) as new:
        data[new.getinfo("test_images.npy").header_offset + 1000] ^= 1
    put(path, bytes(data))
    refused(read, "breastmnist", tmp_path, "test", match="CRC")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (npy("(5, 32, 32, 3)", body=bytes(5 * 3072 - 1)), "needs"),
        (npy("(5000000000, 32, 32, 3)"), "declares"),
        (npy("(4, 32, 32, 3)", body=bytes(4 * 3072)), "not uint8"),
        (npy("(5, 32, 32, 1)", body=bytes(5 * 1024)), "not uint8"),
        (npy("(5, 32, 32, 3)", "|O", body=bytes(5 * 3072)), "pickled"),
        (b"PK\x03\x04", "cannot be used"),
        (b"", "cannot be used"),
    ],
)
def test_cifar10_c(tmp_path, refused, data, match):
    put(tmp_path / "CIFAR-10-C/fog.npy", data)
    put(tmp_path / "CIFAR-10-C/labels.npy", npy("(5,)", body=bytes(5)))
    refused(cifar10_c.read, tmp_path, "fog", 1, match=match)


def test_mnist_c(tmp_path, refused):
    images = put(tmp_path / "mnist_c/fog/test_images.npy", npy("(2, 28, 28, 1)", body=bytes(1568)))
    put(tmp_path / "mnist_c/fog/test_labels.npy", npy("(3,)", body=bytes(3)))
    refused(mnist_c.read, tmp_path, "fog", match="2 images but labels")
    put(images, npy("(2, 29, 28, 1)", body=bytes(2 * 29 * 28)))
    refused(mnist_c.read, tmp_path, "fog", match="not uint8")
