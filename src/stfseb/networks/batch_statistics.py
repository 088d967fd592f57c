"""Batch norm in a pass of data rows and context rows: statistics of data rows only, by which both are normalised.

    m, v = mean and variance over data rows,   y = (x - m) / sqrt(v + eps) * weight + bias   for every row

with gradients through m and v. Running averages move by m and v alone, so that they are what prediction needs. Context
rows in a pass of their own under the running averages would not do: there the outputs follow the scale of the weights
before a batch norm, which the data term does not feel. The function term then shrinks (or grows) these weights until
the averages, which lag behind, fit no more, and the network is one thing in training and another in prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stfseb.networks.folding import averaging_layers

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")
_JOINED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DEFAULTS: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_NAMES = ("input", "running_mean", "running_var", *_DEFAULTS)


def can_join(net: nn.Module, data: int) -> bool:
    """Tell whether so many data rows may go through the network together with context rows, under `DataStatistics`.

    Not a single row, of which there are no statistics, and not layers that take their averages in other ways
    (`nn.SyncBatchNorm` of several processes, instance norm that tracks them).
    """
    return data > 1 and all(isinstance(layer, _JOINED) for layer in averaging_layers(net))


class RegroupedRowsError(Exception):
    """A batch norm met a batch of which it cannot be told which rows are data rows: patches of images, say."""


class Together:
    """One pass of data rows and context rows through a network with batch norm, where that can be had."""

    def __init__(self) -> None:
        self.possible: bool | None = None  # None until it has been tried

    def __call__(self, net: nn.Module, data: int, rows: int, samples: int, run: Callable[[], Result]) -> Result | None:
        """Return `run()` with statistics of the first `data` of the `rows` rows, None where they must go apart.

        The rows may come once or, sample by sample, `samples` times.
        """
        if self.possible is False or not can_join(net, data):
            return None
        before = [] if self.possible else [(buffer, buffer.clone()) for buffer in net.buffers()]
        try:
            with DataStatistics(data, rows, samples):
                out = run()
        except RegroupedRowsError:
            self.possible = False
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            return None
        self.possible = True
        return out


class DataStatistics(TorchFunctionMode):
    """Of every `rows` rows of a batch the first `data` are data rows, whose statistics normalise all of them."""

    def __init__(self, data: int, rows: int, samples: int = 1) -> None:
        super().__init__()
        self.data, self.rows, self.sizes = data, rows, (rows, samples * rows)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Split batch norm in training mode; let everything else through."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | kwargs
            if given["training"]:
                if len(given["input"]) not in self.sizes:
                    raise RegroupedRowsError
                return self._split(**given)
        return func(*args, **kwargs)

    def _split(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **rest: Any) -> Tensor:  # noqa: A002
        parts = input.unflatten(0, (-1, self.rows))
        data, context = parts[:, : self.data].flatten(0, 1), parts[:, self.data :].flatten(0, 1)
        normed = F.batch_norm(data, weight=weight, bias=bias, eps=eps, **rest)
        known, other = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (data, context))
        over = [0, *range(2, input.ndim)]
        variance, mean = torch.var_mean(known, over, correction=0, keepdim=True)
        other = (other - mean) * (variance + eps).rsqrt()
        shape = [1, -1, *[1] * (input.ndim - 2)]
        other = other if weight is None else other * weight.view(shape)
        other = other if bias is None else other + bias.view(shape)
        folds = len(parts)
        both = [one.unflatten(0, (folds, -1)) for one in (normed, other.to(normed.dtype))]
        return torch.cat(both, 1).flatten(0, 1)
