"""Every reader on damaged bytes: a valid set or one line, never another exception and never much memory.

Packed formats are damaged twice: as they lie on disk, where a checksum mostly finds it, and inside, packed
again with fresh checksums, where only the reader's own checks stand.
"""

from __future__ import annotations

import gzip
import io
import struct
import tempfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_files import idx_bytes, pixels, png_bytes, put, tar_bytes, write_idx, write_mat, write_medical

from stfseb.data.images import ImageSet
from stfseb.data.readers import cifar10_c, mnist_c, read
from stfseb.errors import StfsebError

MEMORY = 48 * 2**20
EDIT = st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=8))


@st.composite
def damages(draw):
    """A function that overwrites, cuts or lengthens bytes; headers, which come first, are hit more often."""
    edits = draw(st.lists(st.tuples(st.sampled_from([64, 512, 2**16]), EDIT), max_size=4))
    keep = draw(st.one_of(st.none(), st.floats(0, 1)))
    tail = draw(st.binary(max_size=4))

    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        for within, (place, new) in edits:
            start = place % max(1, min(within, len(changed)))
            changed[start : start + len(new)] = new
        if keep is not None:
            del changed[int(keep * len(changed)) :]
        return bytes(changed) + tail

    return damage


def same(data: bytes, damage) -> bytes:
    return damage(data)


def inside_gzip(data: bytes, damage) -> bytes:
    return gzip.compress(damage(gzip.decompress(data)), 1)


def inside_zip(data: bytes, damage) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, damage(old.read(name)) if name.startswith("test") else old.read(name))
    return out.getvalue()


def inside_mat(data: bytes, damage) -> bytes:
    out, position = [data[:128]], 128
    while position < len(data):
        length = struct.unpack_from("<I", data, position + 4)[0]
        packed = zlib.compress(damage(zlib.decompress(data[position + 8 : position + 8 + length])))
        out.append(struct.pack("<II", 15, len(packed)) + packed)
        position += 8 + length
    return b"".join(out)


def idx(folder):
    write_idx(folder / "mnist")
    return folder / "mnist/t10k-images-idx3-ubyte.gz", lambda: read("mnist", folder, "test")


def idx_labels(folder):
    write_idx(folder / "mnist")
    return folder / "mnist/t10k-labels-idx1-ubyte.gz", lambda: read("mnist", folder, "test")


def cifar(folder):
    records = pixels(2, 3073)
    records[:, 0] %= 10
    path = put(folder / "cifar10/cifar-10-batches-bin/test_batch.bin", records.tobytes())
    return path, lambda: read("cifar10", folder, "test")


def svhn(folder):
    write_mat(folder / "svhn/test_32x32.mat")
    return folder / "svhn/test_32x32.mat", lambda: read("svhn", folder, "test")


def svhn_plain(folder):
    write_mat(folder / "svhn/test_32x32.mat", compress=False)
    return folder / "svhn/test_32x32.mat", lambda: read("svhn", folder, "test")


def notmnist(folder):
    members = [(f"notMNIST_small/{letter}/x.png", png_bytes(pixels(28, 28))) for letter in "ABJ"]
    path = put(folder / "notmnist/notMNIST_small.tar.gz", gzip.compress(tar_bytes(members)))
    return path, lambda: read("notmnist", folder, "test")


def medmnist(folder):
    write_medical(folder / "medmnist", "pathmnist")
    return folder / "medmnist/pathmnist.npz", lambda: read("pathmnist", folder, "test")


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def mnist_c_images(folder):
    path = put(folder / "mnist_c/fog/test_images.npy", saved(pixels(3, 28, 28, 1)))
    put(folder / "mnist_c/fog/test_labels.npy", saved(np.arange(3)))
    return path, lambda: mnist_c.read(folder, "fog")


def cifar10_c_labels(folder):
    put(folder / "CIFAR-10-C/fog.npy", saved(pixels(5, 32, 32, 3)))
    path = put(folder / "CIFAR-10-C/labels.npy", saved(np.arange(5)))
    return path, lambda: cifar10_c.read(folder, "fog", 5)


CASES = [
    *((make, same) for make in (idx, idx_labels, cifar, svhn, svhn_plain, notmnist, medmnist)),
    *((make, same) for make in (mnist_c_images, cifar10_c_labels)),
    *((make, inside_gzip) for make in (idx, idx_labels, notmnist)),
    (svhn, inside_mat),
    (medmnist, inside_zip),
]


@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing")
@pytest.mark.parametrize(("make", "layer"), CASES, ids=lambda part: part.__name__)
def test_damaged_bytes(make, layer):
    with tempfile.TemporaryDirectory() as name:
        path, load = make(Path(name))
        good = path.read_bytes()
        assert isinstance(load(), ImageSet)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(damages())
        def check(damage):
            path.write_bytes(layer(good, damage))
            tracemalloc.start()
            try:
                got = load()
            except StfsebError as error:
                got = str(error)
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < MEMORY
            if isinstance(got, str):
                assert "\n" not in got
                assert name in got
            else:
                assert len(got.labels) == len(got.images)
                assert all(0 <= label < len(got.classes) for label in got.labels)

        check()


def test_the_written_idx_bytes_are_those_of_the_publisher():
    """The fuzzed files start out right: the first sixteen bytes of the published test images."""
    assert idx_bytes(pixels(1, 28, 28))[:8].hex() == "0000080300000001"
