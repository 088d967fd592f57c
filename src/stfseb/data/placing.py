"""Putting files into the data folder: checked in a corner of it first, then moved into place in one step."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING

from stfseb.data.checks import check, md5_of, remember
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stfseb.data.sets import DataSet, PublishedFile

MEMBER_CAP = 2**28  # bytes; the largest published member has 153,700,000


def incoming(folder: Path) -> Path:
    """Return the corner of the data folder where files wait until they have been checked."""
    return folder / ".incoming"


def unpack(archive: Path, data_set: DataSet, staged: Path) -> list[PublishedFile]:
    """Unpack the set's own files from an archive into `staged`; every other member is left alone.

    Nothing but a registered name is ever written, so that no member can leave the folder.
    """
    wanted = {file.path: file for file in (*data_set.files, *data_set.extra)}
    prefix = "" if data_set.folder == "." else f"{data_set.folder}/"
    done = []
    try:
        for name, size, stream in _members(archive):
            file = wanted.get(prefix + str(PurePosixPath(name)))
            if file is None:
                continue
            if size > MEMBER_CAP:
                raise StfsebError(f"'{archive}': member '{name}' declares {size:,} bytes: not the published archive")
            target = staged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            done.append(file)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, StfsebError):
            raise
        reason = " ".join(str(error).split())[:120]
        raise StfsebError(f"'{archive}' cannot be unpacked ({reason}): get the published archive again") from None
    if absent := [file for file in data_set.files if file not in done]:
        raise StfsebError(f"'{archive}' does not hold {absent[0].path}: not the published archive of {data_set.name}")
    return done


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    with packed.open(entry) as stream:
                        yield entry.filename, entry.file_size, stream
        return
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            body = tar.extractfile(member) if member.isreg() else None
            if body is not None:
                yield member.name, member.size, body


def place(data_set: DataSet, files: list[PublishedFile], staged: Path, folder: Path, force: bool = False) -> list[str]:
    """Check staged files of a set and move them into the data folder; return what was done, a line a file.

    A file that is already there stays unless `force` is given. Where the checks need the rest of the set
    (labels beside images), the files that already lie in the data folder stand in.
    """
    borrowed = []
    for file in data_set.files:
        if file not in files and (folder / file.path).is_file():
            link = staged / file.path
            if not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                borrowed.append(link)
                try:
                    link.symlink_to((folder / file.path).resolve())
                except OSError:  # Windows keeps symbolic links for administrators
                    shutil.copyfile(folder / file.path, link)
    try:
        verdicts = {verdict.path: verdict for verdict in check(data_set, staged)}
    finally:
        for link in borrowed:
            link.unlink(missing_ok=True)
    lines = []
    for file in files:
        verdict = verdicts.get(file.path)
        if verdict is not None and verdict.status == "damaged":
            raise StfsebError(f"{file.name} is not {data_set.title} as published: {verdict.said}")
        source, target = staged / file.path, folder / file.path
        if target.is_file() and not force:
            same = target.stat().st_size == source.stat().st_size and md5_of(target) == md5_of(source)
            if not same:
                raise StfsebError(f"'{target}' is already there with other content: add --force to replace it")
            lines.append(f"{file.path}: already there")
            source.unlink()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        lines.append(f"{file.path}: {verdict.said if verdict else 'put in place'}")
    moved = {file.path for file in files}
    remember(folder, [verdict for path, verdict in verdicts.items() if path in moved])
    return lines
