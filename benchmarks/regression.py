"""UCI-style regression: ST-FS-EB, MC Dropout and MAP against an exact Gaussian process (gpytorch).

Random splits, 90 % for training; features and targets are standardised on the training part. Reported on the test
part, in the targets' own units: RMSE, NLL (nats), coverage and mean width of central 95 % intervals. Diabetes comes
with scikit-learn; California housing is used where scikit-learn already has it on disk (nothing is downloaded), and
then the first 2,000 rows of a random order, since an exact Gaussian process is cubic in the rows.

    python benchmarks/regression.py --splits 10
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from typing import TYPE_CHECKING, Any

import gpytorch
import numpy as np
import torch
from scipy.stats import norm
from sklearn.datasets import fetch_california_housing, get_data_home, load_diabetes

from stfseb.sklearn import MAPRegressor, MCDropoutRegressor, STFSEBRegressor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Result = dict[str, float]

MOST_ROWS = 2000


class GP(gpytorch.models.ExactGP):
    """A constant mean and a Matern 5/2 kernel with one length scale a feature."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[1]))

    def forward(self, x: torch.Tensor) -> Any:
        """Return the prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gaussian_process(x: Array, y: Array, x_test: Array, y_test: Array, seed: int) -> Result:
    """Maximise the marginal likelihood with 150 steps of Adam, then predict."""
    torch.manual_seed(seed)
    (shift, scale), (centre, spread) = (x.mean(0), x.std(0)), (y.mean(), y.std())
    rows, targets = torch.from_numpy((x - shift) / scale), torch.from_numpy((y - centre) / spread)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = GP(rows, targets, likelihood).double()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        loss = -objective(model(rows), targets)
        loss.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        found = likelihood(model(torch.from_numpy((x_test - shift) / scale)))
    mean, std = found.mean.numpy() * spread + centre, found.stddev.numpy() * spread
    half = norm.ppf(0.975) * std
    return scores(y_test, mean, -norm.logpdf(y_test, mean, std), mean - half, mean + half)


def network(make: Callable[[int], Any]) -> Callable[[Array, Array, Array, Array, int], Result]:
    """Return the same for one of the estimators."""

    def run(x: Array, y: Array, x_test: Array, y_test: Array, seed: int) -> Result:
        model = make(seed).fit(x, y)
        low, high = model.predict_interval(x_test)
        rows = model._inputs(x_test)
        outputs = model.method_.sample_logits(rows, model.predict_samples, seed=model.seed_)
        target = torch.from_numpy((y_test - model.target_mean_) / model.target_scale_)
        with torch.no_grad():
            nll = -model.method_.likelihood.log_predictive(outputs, target).numpy() + math.log(model.target_scale_[0])
        return scores(y_test, model.predict(x_test), nll, low, high)

    return run


def scores(y: Array, mean: Array, nll: Array, low: Array, high: Array) -> Result:
    return {
        "rmse": float(np.sqrt(((y - mean) ** 2).mean())),
        "nll": float(nll.mean()),
        "coverage": float(((low <= y) & (y <= high)).mean()),
        "width": float((high - low).mean()),
    }


METHODS: dict[str, Callable[[Array, Array, Array, Array, int], Result]] = {
    "ST-FS-EB": network(lambda seed: STFSEBRegressor(random_state=seed)),
    "ST-FS-EB, Student's t noise": network(lambda seed: STFSEBRegressor(random_state=seed, likelihood="student_t")),
    "MC Dropout": network(lambda seed: MCDropoutRegressor(random_state=seed)),
    "MAP": network(lambda seed: MAPRegressor(random_state=seed)),
    "Gaussian process": gaussian_process,
}


def data_sets() -> dict[str, tuple[Array, Array]]:
    """Return features and targets by name; California housing only where scikit-learn has it on disk."""
    found = {"diabetes": load_diabetes(return_X_y=True)}
    try:
        x, y = fetch_california_housing(return_X_y=True, download_if_missing=False)
    except OSError:
        print(
            f"California housing is not in {get_data_home()}: left out "
            "(sklearn.datasets.fetch_california_housing() puts it there)"
        )
        return found
    order = np.random.default_rng(0).permutation(len(x))[:MOST_ROWS]
    return found | {"california": (x[order], y[order])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=10)
    splits = parser.parse_args().splits
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, (x, y) in data_sets().items():
        print(f"\n{name}: {len(x)} rows, {x.shape[1]} features, {splits} splits")
        print("| method | RMSE | NLL | 95 % coverage | width | seconds a fit |\n|---|---|---|---|---|---|")
        for method, run in METHODS.items():
            results, started = [], time.perf_counter()
            for seed in range(splits):
                order = np.random.default_rng(seed).permutation(len(x))
                train, test = order[len(x) // 10 :], order[: len(x) // 10]
                results.append(run(x[train], y[train], x[test], y[test], seed))
            seconds = (time.perf_counter() - started) / splits
            cells = []
            for key in ("rmse", "nll", "coverage", "width"):
                values = [100 * r[key] if key == "coverage" else r[key] for r in results]
                error = np.std(values, ddof=1) / math.sqrt(splits)
                digits = 1 if max(values) >= 20 else 3
                cells.append(f"{np.mean(values):.{digits}f} ± {error:.{digits}f}")
            print(f"| {method} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
