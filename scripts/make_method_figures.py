"""Draw the pictures of docs/method.md: `python scripts/make_method_figures.py [folder]`.

A minute on two CPU cores. Everything follows from the seeds below.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import stfseb

INK, GREY, BLUE, ORANGE = "#222222", "#8a8a8a", "#1f5fa8", "#d1661c"
REACH = 6.0  # the map and the context points cover [-REACH, REACH]^2


def moons(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two interleaved half circles with noise."""
    angle = torch.rand(rows, generator=generator) * math.pi
    upper = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], 1)
    label = (torch.arange(rows) % 2).long()
    x = torch.where(label[:, None] == 0, upper, -upper)
    return 1.6 * x + 0.2 * torch.randn(rows, 2, generator=generator), label


def trained(name: str) -> tuple[stfseb.Method, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = moons(400, generator)
    context = (2 * torch.rand(1000, 2, generator=generator) - 1) * REACH
    context = context[torch.cdist(context, x).min(1).values > 1.0]
    torch.manual_seed(1)
    net = stfseb.MLP(2, 2, hidden=(64, 64), dropout=0.1)
    if name == "MAP":
        method: stfseb.Method = stfseb.MAP(net, sigma=3.0)
    elif name == "MC Dropout":
        method = stfseb.MCDropout(net, sigma=3.0)
    else:
        method = stfseb.STFSEB(net, context=context, dof=5.0, sigma=3.0, tau1=1.0, tau2=1.0)
    stfseb.fit(method, (x, y), moons(200, generator), epochs=150, patience=150, lr=5e-3, progress=False, batch_size=64)
    return method, x, y, context


def map_of_confidence(path: Path) -> None:
    """Three methods on the same points: where is each sure?"""
    side = torch.linspace(-REACH, REACH, 161)
    grid = torch.cartesian_prod(side, side)
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), sharey=True, layout="constrained")
    shown = None
    for axis, name in zip(axes, ("MAP", "MC Dropout", "ST-FS-EB"), strict=True):
        method, x, y, context = trained(name)
        sure = method.predict_proba(grid, 50, seed=0).max(1).values.view(161, 161).T
        shown = axis.imshow(
            sure, origin="lower", extent=(-REACH, REACH, -REACH, REACH), vmin=0.5, vmax=1.0, cmap="viridis"
        )
        if name == "ST-FS-EB":
            axis.scatter(*context[:150].T, s=5, marker="x", color="white", linewidths=0.6, alpha=0.7)
        for label, colour in ((0, "white"), (1, ORANGE)):
            axis.scatter(*x[y == label][:100].T, s=7, color=colour, edgecolors=INK, linewidths=0.3)
        axis.set_title(name, fontsize=11)
        axis.set_xticks([])
        axis.set_yticks([])
    assert shown is not None
    bar = figure.colorbar(shown, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("probability of the likelier class")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def prices(path: Path) -> None:
    """What one output costs at a context point, and how hard it is pushed back."""
    c = np.linspace(0, 60, 600)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    points = 32
    for dof, colour in ((2.1, ORANGE), (5.0, "#b08900"), (20.0, "#3c8d5a"), (math.inf, BLUE)):
        if math.isinf(dof):
            price, push, label = c / 2, np.full_like(c, 0.5), "Gaussian (dof = inf)"
        else:
            price = (dof + points) / 2 * np.log1p(c / (dof - 2))
            push = (dof + points) / 2 / (dof - 2 + c)
            label = f"dof = {dof:g}"
        left.plot(c, price, color=colour, label=label)
        right.plot(c, push, color=colour)
    left.set_ylim(0, 100)
    right.set_yscale("log")
    left.set_ylabel("penalty (nats)")
    right.set_ylabel("push per unit of c (nats)")
    for axis in (left, right):
        axis.set_xlabel("c, the size of one output over 32 context points")
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def one_step(path: Path) -> None:
    """How a training step flows."""
    figure, axis = plt.subplots(figsize=(9.5, 3.6), layout="constrained")
    axis.set_xlim(0, 19)
    axis.set_ylim(0, 7)
    axis.axis("off")

    def box(x: float, y: float, width: float, text: str, colour: str = INK, height: float = 1.3) -> None:
        shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.1", fill=False, edgecolor=colour)
        axis.add_patch(shape)
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=colour)

    def arrow(start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
        axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour))

    box(0.2, 5.2, 3.2, "labelled images\n(a minibatch)")
    box(0.2, 2.7, 3.2, "context images\n(32, unlabelled)", ORANGE)
    box(5.4, 3.4, 3.2, "network, S random\ndropout masks", INK, 2.2)
    box(5.4, 0.4, 3.2, "frozen copy: features,\nkernel K", ORANGE)
    box(10.6, 5.2, 3.2, "fit: cross-entropy\nof the labels")
    box(10.6, 2.7, 3.2, "calm: Student's t penalty\non the outputs, through K", ORANGE)
    box(10.6, 0.4, 3.2, "small weights:\nStudent's t prior", BLUE)
    box(15.6, 2.7, 3.0, "sum, gradient,\nupdate")
    arrow((3.5, 5.8), (5.3, 4.9))
    arrow((3.5, 3.4), (5.3, 4.1), ORANGE)
    arrow((3.5, 2.7), (5.3, 1.4), ORANGE)
    arrow((8.7, 5.0), (10.5, 5.8))
    arrow((8.7, 4.0), (10.5, 3.5), ORANGE)
    arrow((8.7, 1.2), (10.5, 2.8), ORANGE)
    arrow((13.9, 5.6), (15.5, 4.1))
    arrow((13.9, 3.35), (15.5, 3.35), ORANGE)
    arrow((13.9, 1.2), (15.5, 2.7), BLUE)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "images")
    folder.mkdir(parents=True, exist_ok=True)
    one_step(folder / "method-step.png")
    prices(folder / "method-penalty.png")
    map_of_confidence(folder / "method-map.png")


if __name__ == "__main__":
    main()
