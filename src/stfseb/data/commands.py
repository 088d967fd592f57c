"""`stfseb data`: list, download, import, verify and show the published sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stfseb.errors import StfsebError

app = typer.Typer(
    help="See, fetch, bring, check and look at the data sets. They lie in the folder that STFSEB_DATA names.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None, typer.Option("--folder", help="Data folder [default: STFSEB_DATA, else the user's cache].")
]


@app.command("list")
def list_sets(folder: Folder = None) -> None:
    """List every set: what it is, its licence and size, whether it is on disk and has been verified."""
    from rich.console import Console
    from rich.table import Table

    from stfseb.data import sets
    from stfseb.data.folder import data_folder

    where = data_folder(folder)
    table = Table(title=f"Data sets in {where}", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "what", "licence", "download", "on disk", "verified"):
        table.add_column(column, justify="right" if column == "download" else "left")
    for entry in sets.all_sets().values():
        table.add_row(
            entry.name, entry.title, entry.licence, size_of(entry), on_disk(entry, where), verified(entry, where)
        )
    Console().print(table)


def size_of(entry: Any) -> str:
    """Say how much has to be downloaded: the published size, else a bound from the number of pixels."""
    sizes = [file.bytes for file in entry.downloads]
    if None not in sizes:
        return f"{sum(sizes) / 1e6:,.1f} MB"
    if entry.types:
        return "unknown"
    pixels = sum(split.count for split in entry.splits.values()) * entry.channels * entry.image_size**2
    return f"< {pixels / 1e6:,.0f} MB"


def on_disk(entry: Any, where: Path) -> str:
    """Say which splits of a set are in the data folder."""
    here = [split for split in entry.splits if not entry.missing(where, split)]
    if len(here) == len(entry.splits):
        return "yes"
    return f"{', '.join(here)} only" if here else "no"


def verified(entry: Any, where: Path) -> str:
    """Say what the last `verify` found about the files that are on disk."""
    from stfseb.data.checks import recall

    found = {recall(where, file) for file in entry.files if (where / file.path).is_file()}
    if not found:
        return ""
    for status, said in (("damaged", "DAMAGED"), (None, "not yet"), ("unchecked", "not yet")):
        if status in found:
            return said
    return "yes" if found <= {"published", "earlier"} else "subset" if "subset" in found else "readable"


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Names of sets ('stfseb data list'), or 'all'.")],
    folder: Folder = None,
) -> None:
    """Download sets: checksums are compared, a broken transfer goes on where it stopped, mirrors are tried."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from stfseb.data import sets
    from stfseb.data.download import download as run

    chosen = list(sets.all_sets()) if names == ["all"] else names
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        lines, faults = run(chosen, folder, progress)
    for line in lines:
        typer.echo(line)
    if faults:
        raise StfsebError("\n".join(faults))


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A file, an archive or a folder with a copy of published files.")],
    set_name: Annotated[
        str | None, typer.Option("--set", help="The set it belongs to, where that is not plain.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are already there.")] = False,
    folder: Folder = None,
) -> None:
    """Recognise your copy of a published set, check it and put it in place."""
    from stfseb.data.importing import import_path

    for line in import_path(path, folder, set_name, force):
        typer.echo(line)


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Names of sets [default: all that are on disk].")] = None,
    folder: Folder = None,
) -> None:
    """Compare files with their published checksums, or read them whole where none is published."""
    from stfseb.data import sets
    from stfseb.data.checks import check, remember
    from stfseb.data.folder import data_folder

    where = data_folder(folder)
    chosen = [sets.get(name) for name in names or sets.all_sets()]
    damaged, seen = [], 0
    for entry in chosen:
        if not names and len(entry.missing(where)) == len(entry.files):
            continue
        verdicts = check(entry, where)
        remember(where, verdicts)
        for verdict in verdicts:
            if verdict.status == "missing" and not names:
                continue
            seen += 1
            typer.echo(f"{verdict.status:>10}  {verdict.path}: {verdict.said}")
        damaged += [verdict.path for verdict in verdicts if verdict.status == "damaged"]
    if damaged:
        raise StfsebError(f"{len(damaged)} damaged: {', '.join(damaged)}: remove and download again")
    if not seen:
        raise StfsebError(f"no published set is in '{where}': see 'stfseb data download --help'")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A set, a corruption suite, a task or a task file.")],
    out: Annotated[Path | None, typer.Option("--out", help="PNG to write [default: NAME.png].")] = None,
    split: Annotated[str | None, typer.Option("--split", help="train, validation or test.")] = None,
    columns: Annotated[int, typer.Option("--columns", min=1, max=40)] = 12,
    seed: Annotated[int, typer.Option("--seed", help="Which images are drawn.")] = 0,
    folder: Folder = None,
) -> None:
    """Draw a contact sheet: the classes of a set, the types of a corruption suite, the parts of a task."""
    from stfseb.data.folder import data_folder
    from stfseb.data.showing import sheet_of
    from stfseb.files import replacing

    png = sheet_of(name, data_folder(folder), split, columns, seed)
    target = out or Path(f"{Path(name).stem}.png")
    with replacing(target) as part:
        part.write_bytes(png)
    typer.echo(f"{target}")
