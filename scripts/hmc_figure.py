"""MFVI and FS-EB beside a long Hamiltonian Monte Carlo run under the same prior: docs/images/hmc.png.

One-dimensional regression with known noise, a network of one hidden layer of 16 tanh units, prior N(0, 1) on
every weight. For FS-EB the prior is multiplied by N(f(x_c); 0, K) at context points beside and between the data.
HMC draws from the exact posteriors (sixteen chains from the prior, step sizes adapted in the first third); the two
methods are trained by their own objectives. The table compares the functions, not the weights, which have
symmetries.

    python scripts/hmc_figure.py [--draws 1500] [--steps 8000] [--out docs/images/hmc.png]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from stfseb.likelihoods import GaussianRegression
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.mfvi import MFVI
from stfseb.report.style import GRID, INK, MUTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method

mpl.use("Agg")
import matplotlib.pyplot as plt

NOISE, SIGMA, TAU1, TAU2, HIDDEN, CHAINS, LEAPFROG = 0.15, 1.0, 0.05, 0.02, 16, 16, 40


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()
    with torch.no_grad():  # a start, and features for the function prior, of the weight prior's own size
        for p in net.parameters():
            p.normal_(0.0, 0.7)
    return net


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and targets in two clusters, and context points beside and between them."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.rand(20, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.cat([-1.2 + 0.7 * left, 0.5 + 0.7 * right])[:, None]
    y = torch.sin(3 * x) + NOISE * torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    context = torch.tensor([-3.0, -2.5, -2.0, -0.2, 0.0, 0.2, 2.0, 2.5, 3.0], dtype=torch.float64)[:, None]
    return x, y, context


def hmc(net: nn.Module, log_posterior: Callable[[Tensor], Tensor], draws: int) -> tuple[Tensor, float]:
    """Return weights (draws, chains, P) after a warm-up of draws / 2, and the share of proposals accepted."""
    generator = torch.Generator().manual_seed(2)
    count = sum(p.numel() for p in net.parameters())
    theta = SIGMA * torch.randn(CHAINS, count, generator=generator, dtype=torch.float64)
    slope = vmap(grad_and_value(lambda t: -log_posterior(t)))
    log_step = torch.full((CHAINS, 1), math.log(0.01), dtype=torch.float64)
    gradient, energy = slope(theta)
    kept, accepted = [], []
    warm_up = draws // 2
    for index in range(warm_up + draws):
        momentum = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        # A random length of the path keeps it from closing on itself.
        step = log_step.exp() * (0.8 + 0.4 * torch.rand(CHAINS, 1, generator=generator, dtype=torch.float64))
        place, speed, slope_here = theta, momentum - step / 2 * gradient, gradient
        for turn in range(LEAPFROG):
            place = place + step * speed
            slope_here, energy_here = slope(place)
            speed = speed - step * (0.5 if turn == LEAPFROG - 1 else 1.0) * slope_here
        before = energy + momentum.square().sum(1) / 2
        after = energy_here + speed.square().sum(1) / 2
        chance = (before - after).exp().clamp(max=1.0).nan_to_num(0.0)
        taken = torch.rand(CHAINS, generator=generator, dtype=torch.float64) < chance
        theta = torch.where(taken[:, None], place, theta)
        gradient = torch.where(taken[:, None], slope_here, gradient)
        energy = torch.where(taken, energy_here, energy)
        if index < warm_up:
            log_step = log_step + 0.5 / math.sqrt(index + 1) * (chance[:, None] - 0.8)
        else:
            kept.append(theta)
            accepted.append(float(chance.mean()))
    return torch.stack(kept), float(np.mean(accepted))


def functions(net: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """Return the functions of weights (..., P) at x, (..., N)."""
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def one(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return functional_call(net, named, (x,))[:, 0]

    return vmap(one)(theta.reshape(-1, theta.shape[-1])).view(*theta.shape[:-1], len(x))


def train(method: Method, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.Adam(method.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        method.objective(x, y, len(x)).total.backward()
        optimiser.step()
        schedule.step()


def r_hat(values: Tensor) -> float:
    """Return the largest split R-hat over the points, values (draws, chains, N)."""
    half = len(values) // 2
    split = torch.cat([values[:half], values[half : 2 * half]], dim=1)
    within = split.var(0).mean(0)
    between = half * split.mean(0).var(0)
    return float((((half - 1) / half * within + between / half) / within).sqrt().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("docs/images/hmc.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y, context = data()
    grid = torch.linspace(-3.2, 3.2, 129, dtype=torch.float64)[:, None]
    likelihood = GaussianRegression(NOISE, learn=False)
    mfvi = MFVI(network(), SIGMA, 16, vectorise=True, likelihood=likelihood)
    fseb = FSEB(
        network(),
        context,
        SIGMA,
        TAU1,
        TAU2,
        len(context),
        16,
        vectorise=True,
        likelihood=GaussianRegression(NOISE, learn=False),
    )
    assert fseb.context is not None
    prior = fseb.function_prior(fseb.context.draw(x, 0))
    order = fseb.context.draw(x, 0).images  # the prior's factor belongs to this order of the points

    def weights_only(theta: Tensor) -> Tensor:
        fit = functions(template, theta, x) - y[:, 0]
        return -fit.square().sum() / (2 * NOISE**2) - theta.square().sum() / (2 * SIGMA**2)

    def with_functions(theta: Tensor) -> Tensor:
        return weights_only(theta) - prior.penalty(functions(template, theta, order)[:, None])

    template = network()
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, constrained_layout=True)
    cases = ((panels[0], mfvi, weights_only, "#cc79a7"), (panels[1], fseb, with_functions, "#0072b2"))
    print("method   mean-error/sd  spread ratio (data, beside and between)  R-hat  accepted")
    for panel, method, target, colour in cases:
        theta, accepted = hmc(template, target, arguments.draws)
        exact = functions(template, theta[:: max(1, arguments.draws // 500)], grid)
        train(method, x, y, arguments.steps)
        drawn = method.sample_logits(grid, 2000, seed=0)[..., 0]
        flat = exact.flatten(0, 1)
        mean, spread, ours, our_spread = flat.mean(0), flat.std(0), drawn.mean(0), drawn.std(0)
        near = ((grid - x.T).abs().amin(1) < 0.1).bool()
        error = float(((ours - mean) / spread).square().mean().sqrt())
        ratios = [float((our_spread / spread)[mask].mean()) for mask in (near, ~near)]
        print(
            f"{method.label:8} {error:13.2f}  {ratios[0]:12.2f} {ratios[1]:26.2f} {r_hat(exact):8.3f} {accepted:9.2f}"
        )
        line = grid[:, 0].numpy()
        panel.fill_between(line, mean - 2 * spread, mean + 2 * spread, color=GRID, lw=0, label="HMC, mean ± 2 sd")
        panel.plot(line, mean, color=MUTED, lw=1.4)
        panel.plot(line, ours, color=colour, lw=1.6, label=f"{method.label}, mean ± 2 sd")
        for sign in (-2, 2):
            panel.plot(line, ours + sign * our_spread, color=colour, lw=1.1, ls="--")
        panel.plot(x, y, ".", color=INK, ms=4, label="data")
        if method is fseb:
            panel.plot(context[:, 0], torch.full((len(context),), -3.3), "|", color=INK, ms=9, label="context points")
        panel.set_title("Weight prior N(0, 1)" if method is mfvi else "Weight prior times function prior", loc="left")
        panel.set_xlim(-3.2, 3.2)
        panel.set_ylim(-3.5, 3.5)
        panel.legend(loc="upper right", fontsize=8.5, frameon=False)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=130)


if __name__ == "__main__":
    main()
