"""The whole job in one view: a live line on a terminal, nothing but the announcements elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

    from stfseb.experiments.executors.ledger import Ledger

A_SECOND = 1  # refreshes; each costs the driver about a millisecond


class View:
    """Shows a ledger while the block lasts: done of all, running, failed, time spent and left."""

    def __init__(self, ledger: Ledger, *, show: bool, slots: int | None = None, console: Console | None = None) -> None:
        self.ledger, self.slots = ledger, slots
        self.console = console or Console(stderr=True)
        self.live = show and self.console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]runs[/]"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=A_SECOND,
            disable=not self.live,
        )

    def __enter__(self) -> View:
        self._announce = self.ledger.announce
        if self.live:
            self.bar.start()
            self.task = self.bar.add_task("", total=len(self.ledger.jobs), completed=self.ledger.finished, now="")
            self.ledger.announce = lambda text: self.console.print(text, highlight=False, soft_wrap=True)
            self.ledger.changed = self._update
            self._update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger.announce, self.ledger.changed = self._announce, lambda: None
        self.bar.stop()

    def _update(self) -> None:
        running, failed = len(self.ledger.running), len(self.ledger.outcome.failed)
        running = running if self.slots is None else min(running, self.slots)
        claimed = len(self.ledger.claimed)
        now = f"{running} running" + (f" · {claimed} elsewhere" if claimed else "")
        now += f" · [red]{failed} failed[/]" if failed else ""
        self.bar.update(self.task, completed=self.ledger.finished, now=now)
