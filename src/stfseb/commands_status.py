"""`stfseb status`: how a folder of results stands."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stfseb.experiments.status import RunStatus, Status

_LISTED = 20


def status(
    results: Annotated[Path, typer.Argument(help="A folder of results, the one that holds 'runs'.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    failures: Annotated[bool, typer.Option("--failures", help="Print the tracebacks of failed runs.")] = False,
) -> None:
    """Show what is done, running, failed and left in a folder of results, with times; of searches, their trials."""
    from rich.console import Console

    from stfseb.experiments.status import status as look

    found = look(results)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    screen = Console()
    if failures:
        _tracebacks(found, screen)
        return
    if found.runs:
        screen.print(_by_kind(found))
    if found.of("running"):
        screen.print(_running(found.of("running")))
    if found.of("failed"):
        screen.print(_failed(found.of("failed")))
    if found.runs:
        screen.print(summary(found), highlight=False, soft_wrap=True)
    for search in found.searches:
        told = (
            "no worker has ended yet"
            if search.finished is None
            else f"{search.finished} of {search.asked} {search.kind}"
        )
        screen.print(f"search {search.study}: {told}", highlight=False, soft_wrap=True, markup=False)


def summary(found: Status) -> str:
    """Return the whole folder in a line."""
    counts = found.counts
    line = ", ".join(f"{counts[state]} {state}" for state in counts) + f" of {len(found.runs)} runs"
    if found.queued:
        line += f"; {found.queued} of those left {'waits' if found.queued == 1 else 'wait'} for a Dask worker"
    if (counts["left"] or counts["running"]) and found.seconds_left is not None:
        if counts["left"] or found.seconds_left >= 1:
            line += f"; about {_time(found.seconds_left)} more, {max(1, counts['running'])} at a time"
        else:  # by what others have taken they were to be done by now
            which = "the one under way takes" if counts["running"] == 1 else "those under way take"
            line += f"; {which} longer than such runs have taken"
    if counts["failed"]:
        line += "; --failures shows the tracebacks"
    return line


def _by_kind(found: Status) -> Any:
    from rich.table import Table

    table = Table(title="runs")
    for name in ("task", "method"):
        table.add_column(name)
    for name in ("done", "running", "failed", "left", "a run takes"):
        table.add_column(name, justify="right")
    kinds: dict[tuple[str, str], list[RunStatus]] = {}
    for run in found.runs:
        kinds.setdefault((run.task, run.method), []).append(run)
    for kind, runs in sorted(kinds.items()):
        numbers = [sum(run.state == state for run in runs) for state in found.counts]
        times = [run.seconds or 0.0 for run in runs if run.state == "done"]
        mean = _time(sum(times) / len(times)) if times else ""
        table.add_row(*kind, *(str(number) if number else "" for number in numbers), mean)
    return table


def _running(runs: list[RunStatus]) -> Any:
    from rich.table import Table

    table = Table(title="running")
    for name in ("run", "for", "epoch", "by"):
        table.add_column(name, overflow="fold")
    for run in runs[:_LISTED]:
        epoch = "" if run.epoch is None else f"{run.epoch}/{run.epochs}" if run.epochs else str(run.epoch)
        what = f" ({', '.join(run.missing)})" if run.missing else ""
        by = f"{run.who.get('host', '?')}, process {run.who.get('process', '?')}"
        by += " (Dask)" if run.who.get("executor") == "dask" else ""
        table.add_row(run.label + what, _time(run.seconds or 0.0), "" if run.missing else epoch, by)
    _more(table, runs)
    return table


def _failed(runs: list[RunStatus]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="failed")
    table.add_column("run", overflow="fold")
    table.add_column("attempts", justify="right")
    table.add_column("error", overflow="fold")
    for run in runs[:_LISTED]:
        table.add_row(run.label, str(run.attempt), escape(run.error[:300]))
    _more(table, runs)
    return table


def _more(table: Any, runs: list[RunStatus]) -> None:
    if len(runs) > _LISTED:
        table.add_row(f"and {len(runs) - _LISTED} more")


def _tracebacks(found: Status, screen: Any) -> None:
    failed = [run for run in found.runs if run.error]
    for run in failed:
        screen.rule(f"{run.label} ({run.name}), attempt {run.attempt}")
        screen.print(run.traceback or run.error, highlight=False, markup=False, soft_wrap=True)
    if not failed:
        screen.print("no run has failed")


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
