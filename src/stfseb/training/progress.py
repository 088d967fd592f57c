"""What a person sees while a network trains: a live bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType


def in_epochs(count: int) -> str:
    """Return "1 epoch", "2 epochs"."""
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def describe(entry: dict[str, Any]) -> str:
    """Return one epoch's figures in a line: the terms in nats per example and the validation score."""
    terms = [f"{name} {entry[name]:.3f}" for name in ("data", "function", "weights") if entry[name] != 0.0]
    if "validation_nll" in entry:
        terms.append(f"validation NLL {entry['validation_nll']:.4f}")
        if entry["validation_accuracy"] == entry["validation_accuracy"]:
            terms.append(f"accuracy {100 * entry['validation_accuracy']:.2f} %")
    return " · ".join(terms)


class TrainingProgress:
    """A progress display for one run; silent when `show` is False."""

    def __init__(self, title: str, epochs: int, steps: int, *, show: bool, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.epochs, self.steps = title, epochs, steps
        self.live = show and self.console.is_terminal
        self.lines = show and not self.live
        self.figures = ""
        self.bar = Progress(
            TextColumn("[bold]{task.fields[title]}[/]"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", justify="left"),
            console=self.console,
            transient=True,
            disable=not self.live,
        )

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        self.task = self.bar.add_task("", total=self.epochs * self.steps, title=self.title, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def resumed(self, steps: int, text: str) -> None:
        """Count the steps that an earlier start has made, and say where the run goes on."""
        self.step(steps)
        if self.live or self.lines:
            self.console.print(f"{self.title}: {text}", highlight=False, soft_wrap=True)

    def step(self, count: int = 1) -> None:
        """Count minibatches."""
        if self.live:
            self.bar.advance(self.task, count)

    def epoch(self, entry: dict[str, Any], best: bool) -> None:
        """Show an epoch's figures; the best epoch so far is starred."""
        star = " *" if best else ""
        if self.live:
            self.bar.update(self.task, figures=f"epoch {entry['epoch']}: {describe(entry)}{star}")
        elif self.lines:
            self.console.print(
                f"{self.title}: epoch {entry['epoch']}/{self.epochs} · {describe(entry)} · "
                f"{entry['seconds']:.1f} s{star}",
                highlight=False,
                soft_wrap=True,
            )
