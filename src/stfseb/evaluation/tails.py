"""How heavy are the tails? Degrees of freedom fitted to trained weights and to outputs at context points.

The premise of Student's t priors is that both have heavier tails than a Gaussian. Each sample is fitted by maximum
likelihood with a t distribution of location zero, in scale form: for squared Mahalanobis distances c_b of blocks of
n values (n = 1 and c = x^2 for single ones),

    sum_b lgamma((nu + n)/2) - lgamma(nu/2) - n/2 log(nu pi s^2) - (nu + n)/2 log1p(c_b / (nu s^2))

is maximised over nu and s. The interval of nu is the profile likelihood's: twice the loss is below the chi-squared
quantile. It takes the values for independent draws, which weights of a network are not: read it as a lower bound of
the uncertainty. Where a Gaussian fits best, nu is infinite.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, scaled
from stfseb.methods.context import Draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike
    from torch import Tensor

    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method

_LOWEST, _HIGHEST = 0.05, 1e4  # of nu: beyond, a t is a Gaussian to four digits


@dataclass(frozen=True)
class TailFit:
    """The Student's t that fits a sample best."""

    name: str
    count: int
    """Draws: single values, or blocks of `dimension` values."""
    dimension: int
    dof: float
    """The estimate of nu, infinite where a Gaussian fits best."""
    low: float
    """Lower end of the interval of nu; 0 where the likelihood does not bound it."""
    high: float
    """Upper end; infinite where the data do not tell the t from a Gaussian."""
    scale: float
    """s, the scale of the t: of the values themselves, or of blocks relative to K^(1/2)."""
    gain: float
    """Log-likelihood over the best Gaussian's, in nats a draw."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON knows it (infinity as a string)."""
        return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.name}: dof {self.dof:.3g} [{self.low:.3g}, {self.high:.3g}], {self.count} draws"


def fit_tails(quadratic: ArrayLike, dimension: int = 1, *, name: str = "", level: float = 0.95) -> TailFit:
    """Fit nu and s to squared distances c (count,) of draws of `dimension` values; c = x^2 for single values x.

    Draws of exactly zero are left out, and not counted: under any t they have probability zero (dead weights, say),
    and enough of them would make the likelihood grow without bound as s goes to zero.
    """
    c = np.asarray(quadratic, dtype=np.float64).ravel()
    if not np.isfinite(c).all() or (c < 0).any() or np.count_nonzero(c) < 2:
        raise StfsebError(f"{name or 'tails'}: {len(c)} squared values; all must be finite, and at least two not zero")
    if not 0 < level < 1:
        raise StfsebError(f"level={level}: give a number between 0 and 1, for example 0.95")
    from scipy.optimize import brentq, minimize_scalar
    from scipy.special import chdtri, logsumexp

    # In logarithms throughout: squares reach from 1e-308 to 1e308, their sums and ratios further.
    logs = np.log(c[c > 0])
    # The Gaussian's log s^2; the rest is relative to it.
    unit = float(logsumexp(logs)) - math.log(len(logs) * dimension)
    profile = _Profile(logs - unit, dimension)
    # A sample of two scales has a maximum for either: the search begins at the best of a few places.
    places = np.linspace(math.log(_LOWEST), math.log(_HIGHEST), 25)
    heights = [profile(float(place)) for place in places]
    near = int(np.argmax(heights))
    bounds = float(places[max(near - 1, 0)]), float(places[min(near + 1, len(places) - 1)])
    inner = minimize_scalar(lambda a: -profile(a), bounds=bounds, method="bounded", options={"xatol": 1e-4})
    best, top = max((float(inner.x), -float(inner.fun)), (float(places[near]), heights[near]), key=lambda at: at[1])
    gaussian = profile.gaussian()
    at_end = best > math.log(_HIGHEST) - 1e-3 or top < gaussian
    if at_end:
        top = gaussian
    cut = top - float(chdtri(1, 1 - level)) / 2

    def end(outer: float) -> float | None:
        """Return the log nu between the optimum and `outer` at which the likelihood meets the cut."""
        if profile(outer) >= cut:
            return None
        if profile(best) <= cut:  # every finite nu that was tried is out: the tails are lighter than a Gaussian's
            return best
        return float(brentq(lambda a: profile(a) - cut, min(best, outer), max(best, outer), xtol=1e-3))

    low, high = end(math.log(_LOWEST)), None if at_end or gaussian >= cut else end(math.log(_HIGHEST))
    return TailFit(
        name=name,
        count=len(logs),
        dimension=dimension,
        dof=math.inf if at_end else math.exp(best),
        low=0.0 if low is None else math.exp(low),
        high=math.inf if high is None else math.exp(high),
        scale=math.exp((unit if at_end else unit + profile.log_scale(math.exp(best))) / 2),
        gain=max(0.0, top - gaussian) / len(logs),
    )


class _Profile:
    """The log-likelihood of log nu, maximised over s^2, from the logarithms of c."""

    def __init__(self, logs: Array, dimension: int) -> None:
        self.logs, self.n = logs, dimension
        # At the root, c / (nu s^2 + c) is n / (nu + n) on average: s^2 is between the least and the largest c / n.
        self.ends = float(logs.min()) - math.log(dimension), float(logs.max()) - math.log(dimension)
        self.start = 0.0  # log s^2, from one evaluation to the next

    def log_scale(self, nu: float) -> float:
        """Return the best log s^2: the root of a decreasing score, by Newton's method, halving where that leaps out."""
        from scipy.special import expit

        n, (low, high) = self.n, self.ends
        b = min(high, max(low, self.start))
        for _ in range(100):
            share = expit(self.logs - (math.log(nu) + b))
            score = (nu + n) / 2 * float(share.mean()) - n / 2
            low, high = (b, high) if score > 0 else (low, b)
            slope = (nu + n) / 2 * float((share * (1 - share)).mean())
            step = score / max(slope, 1e-300)
            if not low <= b + step <= high:
                step = (low + high) / 2 - b
            b += step
            if abs(step) < 1e-5:  # quadratic: the next step would be about its square
                break
        self.start = b
        return b

    def __call__(self, log_nu: float) -> float:
        from scipy.special import gammaln

        nu, n = math.exp(log_nu), self.n
        b = self.log_scale(nu)
        constant = gammaln((nu + n) / 2) - gammaln(nu / 2) - n / 2 * (log_nu + math.log(math.pi) + b)
        return float(len(self.logs) * constant - (nu + n) / 2 * np.logaddexp(0.0, self.logs - (log_nu + b)).sum())

    def gaussian(self) -> float:
        """Return the log-likelihood of the best Gaussian, s^2 = mean c / n = 1."""
        return -len(self.logs) * self.n / 2 * (math.log(2 * math.pi) + 1)


def weight_tails(method: Method, *, level: float = 0.95) -> list[TailFit]:
    """Return the fitted tails of the network's parameters: tensor by tensor, and all together.

    "all" is what a weight prior with one scale sees: tensors of different spread make its tails heavier than any
    tensor's own. "all, unit scale" divides each tensor by its root mean square first.
    """
    named = [(name, _flat(p)) for name, p in method.net.named_parameters() if p.requires_grad]
    used = [(name, values) for name, values in named if np.count_nonzero(values**2) > 1]
    if not used:
        raise StfsebError("no trainable tensor has two values that are not zero: nothing can be fitted; train it first")
    rows = [fit_tails(values**2, name=name, level=level) for name, values in used]
    together = [values**2 for _, values in used]
    rows.append(fit_tails(np.concatenate(together), name="all", level=level))
    rows.append(fit_tails(np.concatenate([v / v.mean() for v in together]), name="all, unit scale", level=level))
    return rows


@torch.no_grad()
def context_tails(
    method: Method,
    images: Any = None,
    *,
    samples: int = 1,
    seed: int = 0,
    level: float = 0.95,
) -> list[TailFit]:
    """Return the fitted tails of the outputs at context images: of single outputs and, where there is K, of blocks.

    Args:
        method: a trained method.
        images: context images; by default those the method was trained with.
        samples: functions drawn from the posterior, their outputs taken together.
        seed: of the functions and of the blocks.
        level: coverage of the intervals.

    Blocks of N_c points are the unit of the function prior: their rows, "class l, blocks", fit t(nu, 0, s^2 K) with
    the method's own K, and are left out for methods that have none (or that were loaded, without extractor).
    """
    context = method.context
    if images is None:
        originals = None if context is None else context.originals
        if originals is None:
            raise StfsebError("this method has no context images of its own: give images")
        images = originals
    images = as_tensor(getattr(images, "images", images), "images")
    values = method.sample_logits(images, samples, seed=seed).double()
    centred = getattr(method, "centred", None)
    if centred is not None:
        values = centred(values, scaled(images, method.like))
    rows = _by_class(values.square().flatten(0, 1).cpu().numpy(), 1, "", level)
    prior_of: Callable[[Draw], Any] | None = getattr(method, "function_prior", None)
    if prior_of is None or context is None or context.images_only or len(images) < 2 * context.num_context:
        return rows
    features = context.extract(images, method.like)
    size = context.num_context
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    blocks = order[: len(order) // size * size].view(-1, size)
    distances = []
    for block in blocks:
        prior = prior_of(Draw(images[block], features[block.to(features.device)]))
        distances.append(prior.quadratic(values[:, block.to(values.device)]))
    return rows + _by_class(torch.cat(distances).cpu().numpy(), size, ", blocks", level)


def _by_class(c: Array, dimension: int, suffix: str, level: float) -> list[TailFit]:
    """Fit each column of c (draws, classes), then all of them together."""
    rows = [
        fit_tails(c[:, k], dimension, name=f"class {k}{suffix}", level=level)
        for k in range(c.shape[1])
        if np.count_nonzero(c[:, k]) > 1
    ]
    return [*rows, fit_tails(c, dimension, name=f"all classes{suffix}", level=level)]


def _flat(parameter: Tensor) -> Array:
    flat: Array = parameter.detach().double().cpu().numpy().ravel()
    return flat
