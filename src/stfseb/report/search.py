"""A search to look at: the table of its best trials, what the rules chose, and the two quantities they weigh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.experiments.search.finals import called, epochs, rank_correlation, standings
from stfseb.files import write_bytes
from stfseb.report.style import FAMILIAR, INK, UNFAMILIAR, plain_ticks, rendered, styled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure
    from rich.table import Table

Search = dict[str, Any]  # the contents of search.json
# The columns: whether a narrow screen has them, and what they show of a trial.
_FIGURES: dict[str, tuple[bool, Callable[[Search], str]]] = {
    "NLL": (True, lambda trial: f"{trial['nll']:.4f}"),
    "T": (False, lambda trial: f"{trial['metrics']['temperature']:.2f}"),
    "at T": (True, lambda trial: f"{trial['metrics']['tempered_nll']:.4f}"),
    "ACC": (True, lambda trial: f"{100 * trial['metrics']['accuracy']:.2f}"),
    "ECE": (False, lambda trial: f"{trial['metrics']['ece']:.3f}"),
    "AUROC": (False, lambda trial: _percent(trial["metrics"]["auroc"])),
    "AUROC at T": (True, lambda trial: _percent(trial["metrics"]["tempered_auroc"])),
    "epochs": (False, lambda trial: str(trial["epochs"])),
}
_MARKS = {  # all seen on one spot
    "paper": ("o", 170, "none", UNFAMILIAR[1]),
    "ours": ("*", 120, UNFAMILIAR[0], INK),
    "level": ("s", 260, "none", UNFAMILIAR[2]),
}


def search_table(found: Search, width: int = 120, top: int = 10) -> Table:
    """Return the trials of the lowest NLL and the choices, one row each, repeats left out.

    "at T" is after the trial's own temperature; where not all columns have room, the less telling are left out.
    """
    from rich import box
    from rich.table import Table

    chosen = {rule: choice["trial"] for rule, choice in found["choices"].items()}
    whole = [t for t in found["trials"] if t["outcome"] == "complete" and t.get("same_as") is None]
    whole.sort(key=lambda t: float(t["metrics"]["tempered_nll"]))
    rows = [t for place, t in enumerate(whole) if place < top or t["index"] in chosen.values()]
    settings = list(found["plan"]["choices"])
    final = found["plan"].get("shortlist") is not None
    columns = {"finalist" if final else "trial": [str(trial["index"]) for trial in rows]}
    columns |= {name: [_setting(trial["params"][name]) for trial in rows] for name in settings}
    columns |= {name: [show(trial) for trial in rows] for name, (_, show) in _FIGURES.items()}
    rules = [[rule for rule, index in chosen.items() if index == trial["index"]] for trial in rows]
    columns["chosen by"] = ["all" if len(names) == len(chosen) > 2 else ", ".join(names) for names in rules]
    spare = width - 1 - sum(max(map(len, (name, *cells))) + 1 for name, cells in columns.items())
    shown = [name for name in columns if spare >= 0 or name not in _FIGURES or _FIGURES[name][0]]
    title = f"{found['study']}: best of {_counted(found, len(found['trials']))}, on validation images"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1 if spare >= 2 * len(columns) else 0))
    for name in shown:
        table.add_column(name, justify="left" if name == "chosen by" else "right", no_wrap=name != "chosen by")
    for place, names in enumerate(rules):
        table.add_row(*(columns[name][place] for name in shown), style="bold" if names else "")
    return table


def search_in_words(found: Search) -> list[str]:
    """Return how many trials ended how, and what each rule chose and why."""
    counts, trials = found["counts"], found["trials"]
    seconds = sum(t.get("seconds", 0.0) for t in trials if t.get("same_as") is None)
    ends = ", ".join(f"{counts[name]} {name}" for name in ("complete", "pruned", "diverged", "failed") if counts[name])
    again = counts["repeats"]
    words = "repeats an earlier draw and was" if again == 1 else "repeat earlier draws and were"
    repeats = f"; {again} {words} not trained again" if again else ""
    count = ("" if len(trials) == found["asked"] else f"{len(trials)} of ") + _counted(found, found["asked"])
    lines = [f"{count} finished ({ends or 'none'}{repeats}), {seconds:.0f} s of training."]
    for rule, choice in found["choices"].items():
        if choice["trial"] is None:
            lines.append(f"{rule}: none ({choice['why']})")
            continue
        trial = next(t for t in trials if t["index"] == choice["trial"])
        settings = ", ".join(f"{name} {_setting(value)}" for name, value in trial["params"].items())
        lines.append(f"{rule}: {called(found, trial['index'])}, {settings} ({choice['why']})")
    return lines


def ranks_in_words(found: Search) -> list[str]:
    """Return of a final how each finalist stood after its short trial and stands now, a line each; else nothing."""
    lines = []
    for one in standings(found):
        before = f"{one.before:.4f} after {epochs(found['plan']['shortlist']['epochs'])}"
        after = one.outcome if one.after is None else f"{one.after:.4f} after {epochs(one.epochs)}"
        ranks = f"rank {one.rank_before} -> {one.rank_after or 'none'}"
        lines.append(f"{called(found, one.index)}: {ranks}, NLL at T {before} -> {after}")
    if (same := rank_correlation(found)) is not None:
        lines.append(f"Spearman's correlation of the two ranks: {same:.2f}")
    return lines


def search_figure(found: Search, *, small: bool = False, title: str = "") -> Figure | None:
    """Validation NLL after one temperature against AUROC of held-back context images, the choices marked.

    A small one, among others, leaves it to the text to say what the marks are.
    """
    whole = [t for t in found["trials"] if t["outcome"] == "complete" and t.get("same_as") is None]
    if not whole or any(t["metrics"]["tempered_auroc"] is None for t in whole):
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from stfseb.methods.registry import method_class

    low = min(whole, key=lambda t: t["metrics"]["tempered_nll"])["metrics"]
    with styled():
        figure = Figure(figsize=(4.3, 3.0) if small else (6.2, 4.0), layout="constrained")
        ax = figure.subplots()
        x = [t["metrics"]["tempered_nll"] for t in whole]
        y = [100 * t["metrics"]["tempered_auroc"] for t in whole]
        kind = "trials" if found["plan"].get("shortlist") is None else "finalists"
        ax.scatter(x, y, s=16, color=FAMILIAR, linewidths=0, zorder=2, label=kind)
        if kind == "finalists":  # few, and named in the table by their numbers
            for one, *place in zip(whole, x, y, strict=True):
                ax.annotate(str(one["index"]), (place[0], place[1]), (9, 0), textcoords="offset points", va="center")
            ax.margins(0.08)
        edge = low["tempered_nll"] + low["tempered_nll_se"]
        ax.axvspan(
            low["tempered_nll"], edge, color=FAMILIAR, alpha=0.25, linewidth=0, label="within one standard error"
        )
        for rule, choice in found["choices"].items():
            trial = next((t for t in whole if t["index"] == choice["trial"]), None)
            if trial is not None:
                mark, size, face, line = _MARKS[rule]
                spot = trial["metrics"]["tempered_nll"], 100 * trial["metrics"]["tempered_auroc"]
                drawn = ax.scatter(*spot, s=size, marker=mark, facecolors=face, edgecolors=line, zorder=4, label=rule)
                drawn.set_clip_on(False)
        if max(x) > 3 * min(x):
            ax.set_xscale("log")
            plain_ticks(ax.xaxis)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(4 if small else 7))
        usual = f"{found['task_title']}: {len(whole)} {kind} of {method_class(found['plan']['method']).label}"
        ax.set_title(title or usual)
        ax.set_xlabel("validation NLL after one temperature, nats")
        ax.set_ylabel("AUROC, %" if small else "AUROC against held-back context, %")
        if not small:
            figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def write_search_figure(found: Search, folder: Path) -> list[Path]:
    """Write the figure as PNG and PDF, where there is one."""
    figure = search_figure(found)
    paths = [] if figure is None else [folder / "search.png", folder / "search.pdf"]
    for path in paths:
        assert figure is not None
        write_bytes(path, rendered(figure, path.suffix[1:]))
    return paths


def _counted(found: Search, count: int) -> str:
    kind = "trial" if found["plan"].get("shortlist") is None else "finalist"
    return f"{count} {kind}{'s' * (count != 1)}"


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
