"""Fetching published sets: mirrors in turn, checksums, resumed transfers, several sets at once.

pooch does the retrieving (temporary file, checksum, move). It cannot resume, so its downloader is replaced by
one that keeps what has come in a `.part` file and asks the server for the rest.
"""

from __future__ import annotations

import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from stfseb.data import placing, sets
from stfseb.data.folder import data_folder, require_writable
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stfseb.data.sets import DataSet, PublishedFile

TRIES = 3  # times a broken transfer is taken up again before the next mirror is asked
PAUSE = 1.0  # seconds before the first new try
TIMEOUT = (10.0, 60.0)  # seconds to connect, seconds of silence
BLOCK = 1 << 13  # bytes; what is lost of a transfer that breaks off is less than this
TELL_EVERY = 1 << 18
UNKNOWN_CAP = 2**30  # bytes taken at most where the size is not published


class Progress(Protocol):
    """What is told about a transfer; `total` may be unknown."""

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Hear that `done` of `total` bytes of a file have come."""


def silent(name: str, done: int, total: int | None) -> None:
    """Show nothing."""


class Resuming:
    """A pooch downloader that takes up a broken transfer where it stopped."""

    def __init__(self, file: PublishedFile, part: Path, progress: Progress) -> None:
        self.file, self.part, self.progress = file, part, progress

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:  # noqa: ARG002
        """Fetch `url`; only a complete transfer becomes `output_file`."""
        import requests

        with _locked(self.part) as out:
            for attempt in range(TRIES):
                try:
                    self._take(url, out)
                    break
                except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                    # Where nothing ever came there is nobody at the other end: do not insist.
                    broke_off = isinstance(error, requests.exceptions.ChunkedEncodingError) or out.tell() > 0
                    if attempt == TRIES - 1 or not broke_off:
                        raise
                    time.sleep(PAUSE * (attempt + 1))
        self.part.replace(output_file)

    def _take(self, url: str, out: IO[bytes]) -> None:
        import requests

        start = out.seek(0, 2)
        if start and start == self.file.bytes:
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        # Identity: a server that compressed on the fly would make ranges and sizes meaningless.
        headers["Accept-Encoding"] = "identity"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if start and response.status_code == requests.codes.requested_range_not_satisfiable:
                out.truncate(0)  # the part is of something else: begin again
                self._take(url, out)
                return
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content or not response.headers.get(
                "Content-Range", ""
            ).startswith(f"bytes {start}-"):
                start = 0
                out.truncate(0)
                out.seek(0)
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else self.file.bytes
            cap = self.file.bytes or UNKNOWN_CAP
            done = told = start
            for block in response.iter_content(BLOCK):
                done += len(block)
                if done > cap:
                    out.truncate(0)
                    raise ValueError(f"more than the {cap:,} bytes that were expected")
                out.write(block)
                if done - told >= TELL_EVERY or done == total:
                    told = done
                    self.progress(self.file.name, done, total)
            out.flush()


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """Open a part file for appending, alone: two transfers into one file would spoil both."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as out:
        try:
            import fcntl

            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # pragma: no cover - no such locks on Windows
            pass
        except OSError:
            raise StfsebError(f"{part.name.removesuffix('.part')} is being downloaded by another process") from None
        yield out


def fetch(file: PublishedFile, staged: Path, progress: Progress) -> Path:
    """Fetch one file from the first mirror that has it whole, into `staged`."""
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.ERROR)
    target = staged / file.path
    part = target.with_name(f"{target.name}.part")
    known = f"md5:{file.md5}" if file.md5 else None
    faults = []
    for url in file.urls:
        for _ in range(2):  # a resumed file that fails its checksum is fetched once more, whole
            resumed = part.is_file() and part.stat().st_size > 0
            try:
                pooch.retrieve(
                    url, known, fname=target.name, path=target.parent, downloader=Resuming(file, part, progress)
                )
            except StfsebError:
                raise
            except (requests.RequestException, ValueError, OSError) as error:
                faults.append(f"{url.split('/')[2]}: {_short(error)}")
                if not resumed or isinstance(error, requests.RequestException):
                    break
            else:
                return target
    raise StfsebError("; ".join(dict.fromkeys(faults)))


def _short(error: Exception) -> str:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the transfer broke off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if "hash" in str(error).lower():
        return "wrong checksum"
    return " ".join(str(error).split())[:100]


def download_set(data_set: DataSet, folder: Path, progress: Progress = silent) -> list[str]:
    """Fetch what is missing of one set, check it and put it in place; return what was done, a line a file."""
    if not data_set.missing(folder):
        return [f"{data_set.name}: already in {folder}"]
    require_writable(folder)
    staged = placing.incoming(folder) / data_set.name
    wanted = (data_set.archive,) if data_set.archive else tuple(data_set.missing(folder))
    try:
        fetched = [fetch(file, staged, progress) for file in wanted]
    except StfsebError as error:
        absent = ", ".join(file.name for file in data_set.missing(folder)[:4])
        raise StfsebError(
            f"{data_set.name} could not be downloaded ({error}): {absent} missing in {folder}; "
            f"get {', '.join(file.urls[0] for file in wanted)} by hand and run 'stfseb data import FILE'"
        ) from None
    files = placing.unpack(fetched[0], data_set, staged) if data_set.archive else list(wanted)
    lines = placing.place(data_set, files, staged, folder, force=True)
    shutil.rmtree(staged, ignore_errors=True)
    return lines


def download(
    names: Sequence[str], folder: str | Path | None = None, progress: Progress = silent
) -> tuple[list[str], list[str]]:
    """Fetch several sets at once; return what was done and what failed, each a list of lines."""
    chosen = [sets.get(name) for name in dict.fromkeys(names)]
    where = data_folder(folder)
    lines: list[str] = []
    faults: list[str] = []
    with ThreadPoolExecutor(min(4, len(chosen) or 1)) as pool:
        for job in [pool.submit(download_set, entry, where, progress) for entry in chosen]:
            try:
                lines += job.result()
            except StfsebError as error:
                faults.append(str(error))
    return lines, faults
