"""What a person sees of a search: a live bar on a terminal, a line a trial elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stfseb.experiments.search.rules import RULES, choose
from stfseb.experiments.search.worker import Watcher

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from stfseb.experiments.search.plan import Plan
    from stfseb.experiments.search.rules import Images, Trial
    from stfseb.experiments.search.store import Claim
    from stfseb.experiments.search.trials import History


_QUIET = 30.0  # seconds without a line, after which an epoch is worth one


class SearchProgress(Watcher):
    """Trials done of all, how they ended, the best so far by each rule, and the time left."""

    def __init__(self, console: Console, *, show: bool = True) -> None:
        self.console = console
        self.live = show and console.is_terminal
        self.lines = show and not self.live
        self.running: dict[int, str] = {}
        self.told_waiting = False
        self.unit = "trial"
        self.spoke = time.perf_counter()
        self.bar = Progress(
            TextColumn("[bold]{task.description}[/]"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not self.live,
        )

    def __enter__(self) -> SearchProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def final(self, plan: Plan) -> None:
        """Say that the trials are over and how many of them go on."""
        if self.lines or self.live:
            assert plan.shortlist is not None
            self._say(f"{plan.shortlist.in_words}, now trained to the task's {plan.training['epochs']} epochs")
        self.unit = "finalist"
        self.running.clear()
        self.told_waiting = False
        self.bar.remove_task(self.task)

    def start(self, trials: list[Trial], total: int) -> None:
        """Show where the search stands."""
        self.total, self.before, self.begun = total, len(trials), time.perf_counter()
        name = "search" if self.unit == "trial" else "final"
        self.task = self.bar.add_task(name, total=total, completed=len(trials), figures="")
        if trials and (self.lines or self.live):
            adds = "adds draws" if self.unit == "trial" else "takes more"
            more = f"no {self.unit} is left to train (a larger --{self.unit}s {adds})"
            more = "going on" if len(trials) < total else more
            self._say(f"{len(trials)} of {total} {self.unit}s are finished already; {more}")

    def epoch(self, claim: Claim, history: History) -> None:
        """Show the epoch of each trial under way; without a terminal where nothing was said for a while."""
        self.running[claim.index] = f"#{claim.index} epoch {len(history)} NLL {history[-1]['validation_nll']:.3f}"
        under_way = " · ".join(self.running.values())
        if self.live:
            self.bar.update(self.task, figures=under_way)
        elif self.lines and time.perf_counter() - self.spoke >= _QUIET:
            self._say(f"under way: {under_way}")

    def finished(self, claim: Claim, result: dict[str, Any], trials: list[Trial]) -> None:
        """Show how a trial ended, and the best so far."""
        self.running.pop(claim.index, None)
        self.told_waiting = False
        if self.live:
            self.bar.update(self.task, completed=len(trials))
        if self.lines or self.live:
            self._say(self.line(claim, result, trials))

    def waiting(self, trials: list[Trial]) -> None:
        """Say once that the rest is with other workers."""
        if (self.lines or self.live) and not self.told_waiting:
            left = self.total - len(trials)
            rest, were = (f"1 {self.unit} is", "was") if left == 1 else (f"{left} {self.unit}s are", "were")
            self._say(
                f"{rest} with other workers, or {were} with one that died; waiting "
                "(what a dead one had comes back after --grace seconds)"
            )
        self.told_waiting = True
        if self.live:
            self.bar.update(self.task, completed=len(trials))

    def line(self, claim: Claim, result: dict[str, Any], trials: list[Trial]) -> str:
        """Return a finished trial and the state of the search in one line."""
        settings = " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in claim.params.items())
        figures = result["reason"] if result["outcome"] != "complete" else _figures(result)
        pruned = sum(t["outcome"] == "pruned" for t in trials)
        return (
            f"{len(trials)}/{self.total} · #{claim.index} {settings}: {result['outcome']}, {figures}, "
            f"{result['epochs']} {'epoch' if result['epochs'] == 1 else 'epochs'}, {result['seconds']:.0f} s · "
            f"pruned {pruned} · best so far: {_best(trials, self.images)}{self._left(len(trials))}"
        )

    def _left(self, done: int) -> str:
        """Return the time that is left at the pace of all workers since this one began."""
        new = done - self.before
        if new < 1 or done >= self.total:
            return ""
        seconds = (time.perf_counter() - self.begun) / new * (self.total - done)
        return f" · about {seconds / 60:.0f} min left" if seconds >= 90 else f" · about {seconds:.0f} s left"

    def _say(self, text: str) -> None:
        self.spoke = time.perf_counter()
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _figures(trial: dict[str, Any]) -> str:
    found = trial["metrics"]
    told = "" if found["tempered_auroc"] is None else f", AUROC {100 * found['tempered_auroc']:.1f} %"
    return f"NLL {trial['nll']:.4f}, at T={found['temperature']:.2f} {found['tempered_nll']:.4f}{told}"


def _best(trials: list[Trial], images: Images | None) -> str:
    """Return what each rule would choose now, the one to use first; `level` asks of how many images AUROCs are."""
    found: dict[int, tuple[Trial, list[str]]] = {}
    for rule in reversed(RULES):
        chosen = choose(trials, rule, images).trial
        if chosen is not None:
            found.setdefault(chosen["index"], (chosen, []))[1].append(rule)
    told = [f"{' and '.join(rules)} #{index} ({_figures(trial)})" for index, (trial, rules) in found.items()]
    if len(told) == 1:
        ((index, (trial, _)),) = found.items()
        return f"#{index} by all rules ({_figures(trial)})"
    return ", ".join(told) or "none"
