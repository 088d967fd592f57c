"""A search to look at: the table of its best trials, what the two rules chose, and the two quantities they weigh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.files import write_bytes
from stfseb.report.style import FAMILIAR, INK, UNFAMILIAR, plain_ticks, rendered, styled

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure
    from rich.table import Table

Search = dict[str, Any]  # the contents of search.json
# The columns, and whether a narrow screen has room for them.
_FIGURES = {
    "NLL": True,
    "T": False,
    "at T": True,
    "ACC": True,
    "ECE": False,
    "AUROC": False,
    "AUROC at T": True,
    "epochs": False,
}
_MARKS = {"paper": ("o", 170, "none", UNFAMILIAR[1]), "ours": ("*", 120, UNFAMILIAR[0], INK)}  # both seen on one spot


def search_table(found: Search, width: int = 120, top: int = 10) -> Table:
    """Return the trials of the lowest NLL and the two choices, one row each, repeats left out.

    "at T" is after the trial's own temperature; a narrow screen gets fewer columns.
    """
    from rich import box
    from rich.table import Table

    chosen = {rule: choice["trial"] for rule, choice in found["choices"].items()}
    whole = [t for t in found["trials"] if t["outcome"] == "complete" and t.get("same_as") is None]
    whole.sort(key=lambda t: float(t["metrics"]["tempered_nll"]))
    rows = [t for place, t in enumerate(whole) if place < top or t["index"] in chosen.values()]
    settings = list(found["plan"]["choices"])
    figures = [name for name, narrow in _FIGURES.items() if narrow or width >= 110]
    title = f"{found['study']}: best of {len(found['trials'])} trials, on validation images"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1 if width >= 110 else 0))
    for name in ("trial", *settings, *figures):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chosen by", no_wrap=True)
    for trial in rows:
        m = trial["metrics"]
        cells = {
            "NLL": f"{trial['nll']:.4f}",
            "T": f"{m['temperature']:.2f}",
            "at T": f"{m['tempered_nll']:.4f}",
            "ACC": f"{100 * m['accuracy']:.2f}",
            "ECE": f"{m['ece']:.3f}",
            "AUROC": _percent(m["auroc"]),
            "AUROC at T": _percent(m["tempered_auroc"]),
            "epochs": str(trial["epochs"]),
        }
        rules = [rule for rule, index in chosen.items() if index == trial["index"]]
        table.add_row(
            str(trial["index"]),
            *(_setting(trial["params"][name]) for name in settings),
            *(cells[name] for name in figures),
            ", ".join(rules),
            style="bold" if rules else "",
        )
    return table


def search_in_words(found: Search) -> list[str]:
    """Return how many trials ended how, and what each rule chose and why."""
    counts, trials = found["counts"], found["trials"]
    seconds = sum(t.get("seconds", 0.0) for t in trials if t.get("same_as") is None)
    ends = ", ".join(f"{counts[name]} {name}" for name in ("complete", "pruned", "diverged", "failed") if counts[name])
    again = counts["repeats"]
    words = "repeats an earlier draw and was" if again == 1 else "repeat earlier draws and were"
    repeats = f"; {again} {words} not trained again" if again else ""
    count = f"{len(trials)}" if len(trials) == found["asked"] else f"{len(trials)} of {found['asked']}"
    lines = [f"{count} trials finished ({ends or 'none'}{repeats}), {seconds:.0f} s of training."]
    for rule, choice in found["choices"].items():
        if choice["trial"] is None:
            lines.append(f"{rule}: none ({choice['why']})")
            continue
        trial = next(t for t in trials if t["index"] == choice["trial"])
        settings = ", ".join(f"{name} {_setting(value)}" for name, value in trial["params"].items())
        lines.append(f"{rule}: trial {trial['index']}, {settings} ({choice['why']})")
    return lines


def search_figure(found: Search, *, small: bool = False, title: str = "") -> Figure | None:
    """Validation NLL after one temperature against AUROC of held-back context images, the two choices marked.

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
        ax.scatter(x, y, s=16, color=FAMILIAR, linewidths=0, zorder=2, label="trials")
        edge = low["tempered_nll"] + low["tempered_nll_se"]
        ax.axvspan(
            low["tempered_nll"], edge, color=FAMILIAR, alpha=0.25, linewidth=0, label="within one standard error"
        )
        for rule, choice in found["choices"].items():
            trial = next((t for t in whole if t["index"] == choice["trial"]), None)
            if trial is not None:
                mark, size, face, line = _MARKS[rule]
                spot = trial["metrics"]["tempered_nll"], 100 * trial["metrics"]["tempered_auroc"]
                ax.scatter(*spot, s=size, marker=mark, facecolors=face, edgecolors=line, zorder=4, label=rule)
        if max(x) > 3 * min(x):
            ax.set_xscale("log")
            plain_ticks(ax.xaxis)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(4 if small else 7))
        usual = f"{found['task_title']}: {len(whole)} trials of {method_class(found['plan']['method']).label}"
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


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
