"""Downloads from a real HTTP server on loopback: ranges, broken transfers, wrong bytes, mirrors, nobody there."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from published_files import idx_bytes, pixels, tar_bytes

from stfseb.data import download as downloading
from stfseb.data import readers, sets
from stfseb.data.download import download
from stfseb.data.placing import unpack
from stfseb.data.sets import PublishedFile, Split
from stfseb.errors import StfsebError


class Server(ThreadingHTTPServer):
    """Serves `files`; `break_after` cuts the next transfers short, `no_ranges` ignores Range headers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.break_after: dict[str, list[int]] = {}
        self.no_ranges = False
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, asked = self.path.lstrip("/"), self.headers.get("Range")
        self.server.asked.append((name, asked))
        body = self.server.files.get(name)
        if body is None:
            self.send_error(404)
            return
        start = int(re.match(r"bytes=(\d+)-", asked)[1]) if asked and not self.server.no_ranges else 0
        if start >= len(body) > 0 and start:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        cuts = self.server.break_after.get(name, [])
        stop = start + cuts.pop(0) if cuts else len(body)
        self.wfile.write(body[start:stop])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(downloading, "PAUSE", 0.0)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


IMAGES = gzip.compress(idx_bytes(pixels(40, 28, 28)), mtime=0)
LABELS = gzip.compress(idx_bytes((np.arange(40) % 10).astype(np.uint8)), mtime=0)


@pytest.fixture
def small_mnist(server, monkeypatch):
    """A set in MNIST's format with forty images, had from the loopback server alone."""
    server.files = {"images.gz": IMAGES, "labels.gz": LABELS}
    files = tuple(
        PublishedFile(f"mnist/t10k-{part}-ubyte.gz", md5(data), len(data), (f"{server.url}/{name}",))
        for part, name, data in (("images-idx3", "images.gz", IMAGES), ("labels-idx1", "labels.gz", LABELS))
    )
    entry = replace(sets.get("mnist"), files=files, splits={"test": Split(40, files)})
    return register(monkeypatch, entry)


def register(monkeypatch, *entries):
    known = sets.all_sets() | {entry.name: entry for entry in entries}
    monkeypatch.setattr(sets, "all_sets", lambda: known)
    return entries[0]


def leftovers(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_download_checks_and_places(server, small_mnist, tmp_path):
    heard = []
    lines, faults = download(["mnist"], tmp_path, lambda name, done, total: heard.append((name, done, total)))
    assert faults == []
    assert len(lines) == 2
    assert "as published" in lines[0]
    assert readers.read("mnist", tmp_path, "test").labels.tolist() == [i % 10 for i in range(40)]
    assert heard[0] == ("t10k-images-idx3-ubyte.gz", len(IMAGES), len(IMAGES))
    assert leftovers(tmp_path) == [
        ".verified.json",
        "mnist/t10k-images-idx3-ubyte.gz",
        "mnist/t10k-labels-idx1-ubyte.gz",
    ]
    before = len(server.asked)
    assert download(["mnist"], tmp_path)[0] == [f"mnist: already in {tmp_path}"]
    assert len(server.asked) == before


def test_broken_transfers_are_taken_up_where_they_stopped(server, small_mnist, tmp_path):
    server.break_after["images.gz"] = [9000, 9000]
    lines, faults = download(["mnist"], tmp_path)
    assert (len(lines), faults) == (2, [])
    ranges = [asked for name, asked in server.asked if name == "images.gz"]
    assert ranges == [None, "bytes=8192-", "bytes=16384-"]


def test_a_later_run_resumes(server, small_mnist, tmp_path):
    server.break_after["images.gz"] = [9000, 100, 100]
    lines, faults = download(["mnist"], tmp_path)
    assert lines == []
    assert "the transfer broke off" in faults[0]
    assert not (tmp_path / "mnist").exists()
    server.asked.clear()
    assert download(["mnist"], tmp_path)[1] == []
    assert server.asked[0] == ("images.gz", "bytes=8192-")


def test_server_without_ranges_starts_again(server, small_mnist, tmp_path):
    server.no_ranges = True
    server.break_after["images.gz"] = [9000]
    assert download(["mnist"], tmp_path)[1] == []
    assert (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").read_bytes() == IMAGES


def test_spoiled_part_is_thrown_away(server, small_mnist, tmp_path):
    part = tmp_path / ".incoming/mnist/mnist/t10k-images-idx3-ubyte.gz.part"
    part.parent.mkdir(parents=True)
    for spoiled in (b"x" * 500, b"x" * len(IMAGES), b"x" * (len(IMAGES) + 5)):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(spoiled)
        assert download(["mnist"], tmp_path)[1] == []
        assert (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").read_bytes() == IMAGES
        (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").unlink()


def test_wrong_checksum_is_never_placed(server, small_mnist, tmp_path):
    flipped = bytearray(IMAGES)
    flipped[500] ^= 1
    server.files["images.gz"] = bytes(flipped)
    lines, faults = download(["mnist"], tmp_path)
    assert lines == []
    assert re.search(r"mnist could not be downloaded \(127.0.0.1:\d+: wrong checksum\)", faults[0])
    assert not (tmp_path / "mnist").exists()


def test_endless_answers_are_cut(server, small_mnist, tmp_path):
    server.files["images.gz"] = IMAGES + b"more" * 1000
    lines, faults = download(["mnist"], tmp_path)
    assert lines == []
    assert f"more than the {len(IMAGES):,} bytes" in faults[0]


def test_mirrors_in_turn(server, small_mnist, tmp_path, monkeypatch):
    flipped = bytes([IMAGES[0] ^ 1]) + IMAGES[1:]
    server.files["flipped.gz"] = flipped
    urls = (f"{server.url}/gone.gz", f"{server.url}/flipped.gz", f"{server.url}/images.gz")
    files = (replace(small_mnist.files[0], urls=urls), small_mnist.files[1])
    register(monkeypatch, replace(small_mnist, files=files, splits={"test": Split(40, files)}))
    assert download(["mnist"], tmp_path)[1] == []
    assert [name for name, _ in server.asked] == ["gone.gz", "flipped.gz", "images.gz", "labels.gz"]


def test_offline_says_what_where_and_what_to_do(server, small_mnist, tmp_path, monkeypatch):
    import socket

    with socket.socket() as probe:  # a port with nobody behind it, and kept so
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
        files = tuple(replace(file, urls=(f"{dead}/{file.name}",)) for file in small_mnist.files)
        register(monkeypatch, replace(small_mnist, files=files, splits={"test": Split(40, files)}))
        lines, (fault,) = download(["mnist"], tmp_path)
    assert lines == []
    assert "\n" not in fault
    assert "no connection" in fault
    assert "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz missing in" in fault
    assert str(tmp_path) in fault
    assert f"get {dead}/t10k-images" in fault
    assert "stfseb data import FILE" in fault


def test_several_sets_at_once_and_one_that_fails(server, small_mnist, tmp_path, monkeypatch):
    server.files["breastmnist.npz"] = b"PK not really"
    file = PublishedFile("medmnist/breastmnist.npz", None, None, (f"{server.url}/breastmnist.npz",))
    splits = {"test": Split(156, (file,))}
    register(monkeypatch, small_mnist, replace(sets.get("breastmnist"), files=(file,), splits=splits))
    lines, faults = download(["mnist", "breastmnist", "mnist"], tmp_path)
    assert len(lines) == 2
    assert len(faults) == 1
    assert "breastmnist" in faults[0]
    assert not (tmp_path / "medmnist").exists()


def test_unknown_set_before_anything_is_fetched(server, small_mnist, tmp_path):
    with pytest.raises(StfsebError, match="unknown data set 'mnits'"):
        download(["mnist", "mnits"], tmp_path)
    assert server.asked == []


def test_two_transfers_never_share_a_part(server, small_mnist, tmp_path):
    pytest.importorskip("fcntl")
    part = tmp_path / ".incoming/mnist/mnist/t10k-images-idx3-ubyte.gz.part"
    with downloading._locked(part):
        _, (fault,) = download(["mnist"], tmp_path)
    assert "is being downloaded by another process" in fault


def cifar_archive(members: list[tuple[str, bytes]]) -> bytes:
    return gzip.compress(tar_bytes(members), mtime=0)


@pytest.fixture
def small_cifar(server, monkeypatch):
    record = np.zeros((10, 3073), np.uint8).tobytes()
    files = {name: md5(record) for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")}
    members = [(f"cifar-10-batches-bin/{name}", record) for name in files]
    archive = cifar_archive([*members, ("cifar-10-batches-bin/readme.html", b"hello"), ("../evil.bin", b"out")])
    server.files["cifar.tar.gz"] = archive
    published = tuple(
        PublishedFile(f"cifar10/cifar-10-batches-bin/{name}", digest, len(record)) for name, digest in files.items()
    )
    entry = replace(
        sets.get("cifar10"),
        files=published,
        splits={"train": Split(50, published[:5]), "test": Split(10, published[5:])},
        archive=PublishedFile(
            "cifar10/cifar-10-binary.tar.gz", md5(archive), len(archive), (f"{server.url}/cifar.tar.gz",)
        ),
    )
    return register(monkeypatch, entry)


def test_archives_are_unpacked_to_registered_names_only(server, small_cifar, tmp_path):
    folder = tmp_path / "data"
    assert download(["cifar10"], folder)[1] == []
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    assert leftovers(tmp_path) == [
        "data/.verified.json",
        *(f"data/cifar10/cifar-10-batches-bin/{name}" for name in names),
    ]


def test_hostile_and_foreign_archives(small_cifar, tmp_path):
    def attempt(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(StfsebError) as caught:
            unpack(tmp_path / name, small_cifar, tmp_path / "staged")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "cannot be unpacked" in attempt("a.tar.gz", b"rubbish")
    whole = cifar_archive([("cifar-10-batches-bin/test_batch.bin", bytes(30_730))])
    assert "does not hold cifar10/cifar-10-batches-bin/data_batch_1.bin" in attempt("b.tar.gz", whole)
    noise = np.random.default_rng(0).bytes(30_730)
    cut = cifar_archive([("cifar-10-batches-bin/test_batch.bin", noise)])[:20_000]
    assert "cannot be unpacked" in attempt("c.tar.gz", cut)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert "does not hold" in attempt("d.tar.gz", out.getvalue())
    assert "does not hold" in attempt("e.tar.gz", cifar_archive([("../../cifar-10-batches-bin/test_batch.bin", b"x")]))
    huge = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
    huge.size = 2**40
    assert "declares 1,099,511,627,776 bytes" in attempt("f.tar", huge.tobuf() + bytes(1024))
    assert "cannot be unpacked" in attempt("g.zip", b"PK\x03\x04")
