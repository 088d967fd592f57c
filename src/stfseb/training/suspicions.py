"""What is no error, but nearly always a mistake: said once, before training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from stfseb.inputs import scaled
from stfseb.likelihoods import Categorical
from stfseb.methods.base import evaluating
from stfseb.methods.ensemble import Ensemble
from stfseb.networks.folding import deterministic

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.methods.base import Method

_ROWS = 3
_NEAR = 1e-3


class SuspiciousWarning(UserWarning):
    """Training goes on, but hardly with what was meant."""


def warn_of_mistakes(method: Method, x: Tensor, y: Tensor, num_data: int) -> None:
    """Warn of training labels that are all of one class, and of a network that ends in a softmax.

    Of a loader only the first batch is here: fewer than `num_data` rows, which say nothing of the others' classes.
    """
    if not isinstance(method.likelihood, Categorical):
        return
    if len(y) >= max(num_data, 2) and bool((y == y[0]).all()):
        _say(f"all {len(y)} train labels are of class {int(y[0])}: nothing can be learnt from them")
    for one in method.members if isinstance(method, Ensemble) else [method]:
        if said := _normalised(one, x[:_ROWS]):
            _say(said)
            return


def _normalised(method: Method, x: Tensor) -> str:
    """Say that outputs are probabilities or their logarithms; nothing where they are not on every row."""
    if isinstance(method, Ensemble):  # of ensembles
        return next(filter(None, (_normalised(one, x) for one in method.members)), "")
    with torch.no_grad(), evaluating(method.net):
        outputs = deterministic(method.net, scaled(x, method.like)).double()
    constant = len(outputs) > 1 and bool((outputs == outputs[0]).all())  # a head of zeros, with the classes' shares
    if outputs.ndim != 2 or outputs.shape[1] < 2 or constant:
        return ""
    probabilities = ((outputs >= 0) & (outputs <= 1)).all() and (outputs.sum(1) - 1).abs().max() < _NEAR
    if not probabilities and outputs.logsumexp(1).abs().max() >= _NEAR:
        return ""
    kinds = (nn.Softmax, nn.LogSoftmax)
    layers = [f"'{name}' ({type(m).__name__})" for name, m in method.net.named_modules() if isinstance(m, kinds)]
    what, where = "probabilities" if probabilities else "log-probabilities", f", layer {layers[-1]}" if layers else ""
    return (
        f"{type(method.net).__name__} ends in a softmax{where}: its outputs are {what}, where logits are wanted, of "
        "which the likelihood takes the softmax itself: leave the last step out"
    )


def _say(text: str) -> None:
    warnings.warn(text, SuspiciousWarning, stacklevel=5)
