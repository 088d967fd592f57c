"""Fit a Gaussian process prior's kernel to class labels, for GFSVI.

Labels become regression targets with a known noise for each point and class (Dirichlet transform):

    alpha = onehot + a_eps,   s2 = log(1 + 1/alpha),   t = log(alpha) - s2/2

and the kernel's length-scale and variance maximise the mean over classes of log N(t_l; 0, K + diag(s2_l)) on
random subsets of the data, with Adam, in float64. Targets are first centred: by each class's log-frequency
and one global constant, to which the softmax is blind; a zero-mean process would otherwise fit the offset.

Milios et al., Dirichlet-based Gaussian processes for large-scale calibrated classification, NeurIPS 2018,
https://arxiv.org/abs/1805.10915. Kernels and transform are gpytorch's.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stfseb.data.folder import user_cache, writable
from stfseb.data.images import fingerprint
from stfseb.errors import DivergedError, StfsebError, unknown
from stfseb.files import read_json, write_json
from stfseb.inputs import scaled
from stfseb.methods.context import generator
from stfseb.methods.settings import check_count, check_positive

SMOOTHNESS: dict[str, float] = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5, "rbf": math.inf}
_STREAM = 7  # of the subsets; the fit is a function of the data and its settings, not of a run's seed
_WORSE = 0.1  # nats per point and class by which a fit may end below its start before it counts as diverged
_INITIAL_ROWS = 2048
_memory: dict[str, FittedKernel] = {}


@dataclass(frozen=True)
class KernelFit:
    """How a kernel is fitted: its kind, the Dirichlet transform's a_eps, and Adam's steps."""

    kernel: str = "matern52"
    a_eps: float = 0.01
    steps: int = 500
    batch: int = 512
    lr: float = 0.05

    def __post_init__(self) -> None:
        if self.kernel not in SMOOTHNESS:
            raise unknown("kernel", str(self.kernel), SMOOTHNESS)
        check_positive(a_eps=self.a_eps, kernel_lr=self.lr)
        check_count(kernel_steps=self.steps, kernel_batch=self.batch)


@dataclass(frozen=True)
class FittedKernel:
    """A kernel's hyper-parameters and the mean log marginal likelihood per point and class they reached."""

    length_scale: float
    variance: float
    log_likelihood: float


def dirichlet_targets(y: Tensor, classes: int, a_eps: float) -> tuple[Tensor, Tensor]:
    """Return targets and noise variances, each (classes, N) in float64, before centring."""
    likelihoods = _gpytorch().likelihoods
    # gpytorch counts the classes it sees: one row of each makes sure that it sees them all.
    every = torch.cat([y.long(), torch.arange(classes, device=y.device)])
    transform = likelihoods.DirichletClassificationLikelihood(
        every, alpha_epsilon=a_eps, learn_additional_noise=False, dtype=torch.float64
    )
    noise: Tensor = transform.noise_covar.noise[:, : len(y)]
    targets: Tensor = transform.transformed_targets[:, : len(y)]
    return targets, noise


def centred(targets: Tensor, y: Tensor) -> Tensor:
    """Subtract each class's log-frequency, then the mean of everything."""
    counts = torch.bincount(y.long(), minlength=len(targets)).to(targets).clamp_min(0.5)
    shifted = targets - (counts / len(y)).log()[:, None]
    return shifted - shifted.mean()


def log_marginal_likelihood(covariance: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    """Return log N(t_l; 0, K + diag(s2_l)) of each class, (classes,), from K (N, N) and (classes, N)."""
    result: Tensor = _LogMarginalLikelihood.apply(covariance, targets, noise)  # type: ignore[no-untyped-call]
    return result


class _LogMarginalLikelihood(torch.autograd.Function):
    """d/dK = sum_l (a_l a_l' - A_l^-1) / 2, A_l = K + diag(s2_l), a_l = A_l^-1 t_l: no way back through Cholesky."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        """Return the log densities, NaN where K + diag(s2_l) is not positive definite."""
        factor, info = torch.linalg.cholesky_ex(covariance + torch.diag_embed(noise))
        factor = torch.where((info == 0)[:, None, None], factor, math.nan)
        alpha = torch.cholesky_solve(targets.unsqueeze(-1), factor)
        ctx.save_for_backward(factor, alpha)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        quadratic = (targets.unsqueeze(-1) * alpha).sum((-2, -1))
        return -(quadratic + log_det + targets.shape[-1] * math.log(2 * math.pi)) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient with respect to K."""
        factor, alpha = ctx.saved_tensors
        slope = alpha @ alpha.mT - torch.cholesky_inverse(factor)
        return torch.einsum("l,lij->ij", outer, slope) / 2, None, None


def fit_kernel(x: Tensor, y: Tensor, classes: int, how: KernelFit) -> FittedKernel:
    """Maximise the marginal likelihood over random subsets of (x, y); raise if that diverges."""
    targets, noise = dirichlet_targets(y, classes, how.a_eps)
    targets = centred(targets, y)
    like = torch.empty((), dtype=torch.float64, device=x.device)
    some = scaled(x[torch.randperm(len(x), generator=generator(0, _STREAM, 0))[:_INITIAL_ROWS].to(x.device)], like)
    some = some.flatten(1)
    length_scale = float(some.std(0, correction=0).mean()) * math.sqrt(some.shape[1]) or 1.0
    kernel = _kernel(how.kernel, length_scale, float(targets.var())).to(x.device)
    optimiser = torch.optim.Adam(kernel.parameters(), lr=how.lr)

    def likelihood(index: Tensor) -> Tensor:
        pixels = scaled(x[index], like).flatten(1)
        return log_marginal_likelihood(kernel.forward(pixels, pixels), targets[:, index], noise[:, index]).mean()

    def subset(step: int) -> Tensor:
        return torch.randperm(len(x), generator=generator(0, _STREAM, step))[: how.batch].to(x.device)

    start = math.nan
    for step in range(how.steps):
        optimiser.zero_grad(set_to_none=True)
        loss = -likelihood(subset(step))
        loss.backward()
        value = -float(loss.detach())
        start = value if step == 0 else start
        if not math.isfinite(value):
            raise _diverged(how, step, kernel, value)
        optimiser.step()
    with torch.no_grad():
        points = min(how.batch, len(x))
        end = float(likelihood(subset(0))) / points
    fitted = FittedKernel(*_hyperparameters(kernel), end)
    sound = all(map(math.isfinite, asdict(fitted).values())) and fitted.length_scale > 0 and fitted.variance > 0
    if not sound or end < start / points - _WORSE:
        raise _diverged(how, how.steps, kernel, end)
    return fitted


def cached_fit(
    x: Tensor, y: Tensor, classes: int, how: KernelFit, folder: str | Path | bool | None = None
) -> FittedKernel:
    """Return the fit of these data with these settings, from memory or disk where it has been made before.

    `folder`: where fits are kept on disk; None: STFSEB_CACHE, else the user's cache; False: memory only.
    """
    settings = "-".join(str(value) for value in asdict(how).values())
    key = f"{fingerprint(x, y.long())}-{classes}-{settings}"
    file = None if folder is False else _cache(folder) / "kernels" / f"{key}.json"
    if key not in _memory:
        found = _read(file)
        if found is None:
            found = fit_kernel(x, y, classes, how)
            if file is not None and writable(file.parent):
                write_json(file, asdict(found))
        _memory[key] = found
    return _memory[key]


def _cache(folder: str | Path | bool | None) -> Path:
    if isinstance(folder, str | Path):
        return Path(folder).expanduser()
    named = os.environ.get("STFSEB_CACHE", "")
    return Path(named).expanduser() if named else user_cache()


def _read(file: Path | None) -> FittedKernel | None:
    """Return a fit from disk; a file that is missing or damaged only means that it is made again."""
    if file is None or not file.is_file():
        return None
    try:
        found = FittedKernel(**read_json(file, "kernel fit"))
        values = [float(value) for value in asdict(found).values()]
    except (StfsebError, TypeError, ValueError):
        return None
    return FittedKernel(*values) if all(map(math.isfinite, values)) and min(values[:2]) > 0 else None


def _gpytorch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it compiles a helper with torch.jit at import
        import gpytorch
    return gpytorch


def _kernel(name: str, length_scale: float, variance: float) -> Any:
    kernels = _gpytorch().kernels
    base = kernels.RBFKernel() if name == "rbf" else kernels.MaternKernel(nu=SMOOTHNESS[name])
    kernel = kernels.ScaleKernel(base).double()
    # As tensors: gpytorch would take numbers through float32.
    kernel.base_kernel.lengthscale = torch.tensor(length_scale, dtype=torch.float64)
    kernel.outputscale = torch.tensor(variance, dtype=torch.float64)
    return kernel


def _hyperparameters(kernel: Any) -> tuple[float, float]:
    return float(kernel.base_kernel.lengthscale.detach()), float(kernel.outputscale.detach())


def _diverged(how: KernelFit, step: int, kernel: Any, value: float) -> DivergedError:
    length_scale, variance = _hyperparameters(kernel)
    return DivergedError(
        f"the fit of the {how.kernel} kernel diverged after {step} of {how.steps} steps (log likelihood {value:.3g}, "
        f"length-scale {length_scale:.3g}, variance {variance:.3g}): lower kernel_lr={how.lr}, "
        "or change a_eps or kernel"
    )
