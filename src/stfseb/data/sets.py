"""The registered data sets, read from `sets.yaml`: files, published checksums, addresses, licences and counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from stfseb.errors import unknown

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class PublishedFile:
    """One file, what its publisher says of it, and where it may be had; `path` is relative to the data folder."""

    path: str
    md5: str | None = None  # None where no checksum is published: the content is judged instead
    bytes: int | None = None
    urls: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's own name, without folders."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Split:
    """How many images the publisher counts in a split, and the files that hold them."""

    count: int
    files: tuple[PublishedFile, ...]


@dataclass(frozen=True)
class DataSet:
    """One published set."""

    name: str
    title: str
    licence: str
    home: str
    channels: int
    image_size: int
    classes: int
    folder: str
    files: tuple[PublishedFile, ...]
    splits: dict[str, Split]
    archive: PublishedFile | None = None
    types: tuple[str, ...] = ()  # the corruption types of a suite
    extra: tuple[PublishedFile, ...] = ()  # files that are welcome and not needed

    @property
    def downloads(self) -> tuple[PublishedFile, ...]:
        """What has to be fetched: the archive, or else the files one by one."""
        return (self.archive,) if self.archive else self.files

    def missing(self, folder: Path, split: str | None = None) -> list[PublishedFile]:
        """List the files of a split (by default of all) that are not in the data folder."""
        files = self.splits[split].files if split else self.files
        return [file for file in files if not (folder / file.path).is_file()]

    def remedy(self, folder: Path) -> str:
        """Say in one line how this set may be had and where its files belong."""
        return (
            f"get it with 'stfseb data download {self.name}', or take {', '.join(f.name for f in self.downloads)} "
            f"from {self.home} and run 'stfseb data import FILE' (it goes to {folder / self.folder})"
        )


@cache
def all_sets() -> dict[str, DataSet]:
    """Return every registered set by name."""
    import yaml

    text = resources.files("stfseb.data").joinpath("sets.yaml").read_text(encoding="utf-8")
    return {name: _data_set(name, entry) for name, entry in yaml.safe_load(text).items()}


def get(name: str) -> DataSet:
    """Return one registered set."""
    sets = all_sets()
    if name not in sets:
        raise unknown("data set", name, sets)
    return sets[name]


def _data_set(name: str, entry: dict[str, Any]) -> DataSet:
    folder, types = entry["folder"], tuple(entry.get("types", ()))

    def published(file: str, facts: dict[str, Any], urls: list[str]) -> PublishedFile:
        addresses = tuple(url.replace("{file}", file) for url in urls)
        earlier = tuple(facts.get("earlier", ()))
        path = file if folder == "." else f"{folder}/{file}"
        return PublishedFile(path, facts.get("md5"), facts.get("bytes"), addresses, earlier)

    def spelled(types: tuple[str, ...], only_types: bool = False) -> dict[str, PublishedFile]:
        return {
            full: published(full, facts, entry.get("urls", []))
            for pattern, facts in entry["files"].items()
            if "{type}" in pattern or not only_types
            for full in ([pattern.replace("{type}", t) for t in types] if "{type}" in pattern else [pattern])
        }

    files = spelled(types)
    archive = entry.get("archive")
    return DataSet(
        name=name,
        title=entry["title"],
        licence=entry["licence"],
        home=entry["home"],
        channels=entry["image"][0],
        image_size=entry["image"][1],
        classes=entry["classes"],
        folder=folder,
        files=tuple(files.values()),
        splits={
            split: Split(facts["count"], tuple(files[file] for file in facts.get("files", files)))
            for split, facts in entry["splits"].items()
        },
        archive=published(archive["name"], archive, archive["urls"]) if archive else None,
        types=types,
        extra=tuple(spelled(tuple(entry.get("extra_types", ())), only_types=True).values()),
    )
