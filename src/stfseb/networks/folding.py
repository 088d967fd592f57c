"""Run a network for many Monte Carlo samples in one pass.

A chain of `nn.Sequential` is cut at its first dropout: the part before it runs once and its output is
repeated for the samples. Any other module gets the whole batch repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.networks.dropout import (
    DROPOUT_MODULES,
    Block,
    Lanes,
    MonteCarloDropout,
    NoDropout,
    PrefixHasDropoutError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain(net: nn.Module) -> list[nn.Module]:
    """Return the modules that `net` applies one after the other, nested `nn.Sequential` unrolled."""
    plain = type(net).forward is nn.Sequential.forward and not (net._forward_hooks or net._forward_pre_hooks)
    if not (isinstance(net, nn.Sequential) and plain):
        return [net]
    return [leaf for child in net for leaf in chain(child)]


def first_dropout(modules: Sequence[nn.Module]) -> int:
    """Return how many modules of a chain come before its first dropout (0: nothing can be shared)."""
    for index, module in enumerate(modules):
        if isinstance(module, DROPOUT_MODULES):
            return index
    return 0


def has_batch_statistics(net: nn.Module) -> bool:
    """Tell whether a forward pass in training mode would mix rows through running statistics."""
    return any(getattr(module, "running_mean", None) is not None for module in net.modules())


class FoldedNetwork:
    """A network seen as `samples` networks: rows in, (samples, rows, outputs) out."""

    def __init__(self, net: nn.Module, *, share_prefix: bool = True) -> None:
        self.net = net
        self.share_prefix = share_prefix
        self.lanes: Sequence[Tensor] | None = None  # masks' random bits, where an engine draws them beforehand
        self.plan: list[Lanes] = []  # the masks that the last pass asked for

    def __call__(self, x: Tensor, samples: int, blocks: Sequence[Block]) -> tuple[Tensor, set[float]]:
        """Return outputs (samples, rows, ...) and the dropout rates that were met on the way."""
        modules = chain(self.net)
        cut = first_dropout(modules) if self.share_prefix else 0
        if cut:
            mode = MonteCarloDropout(samples, blocks, folded=False, lanes=self.lanes)
            try:
                with mode:
                    out = x
                    mode.in_prefix = True
                    for module in modules[:cut]:
                        out = module(out)
                    mode.in_prefix = False
                    for module in modules[cut:]:
                        out = module(out)
            except PrefixHasDropoutError:
                # A custom layer in the prefix draws dropout of its own: start over with the whole batch.
                self.share_prefix = False
                return self(x, samples, blocks)
        else:
            mode = MonteCarloDropout(samples, blocks, folded=True, lanes=self.lanes)
            with mode:
                out = self.net(x.repeat(samples, *(1,) * (x.ndim - 1)))
        if not mode.rates:
            raise StfsebError(
                f"no dropout ran in {type(self.net).__name__}'s forward pass, so every Monte Carlo sample is the "
                "same: call the network's dropout layers in forward, or use MAP, MFVI or FSEB"
            )
        self.plan = mode.plan
        return single(out).view(samples, -1, *out.shape[1:]), mode.rates


def deterministic(net: nn.Module, x: Tensor) -> Tensor:
    """Run the network with every dropout as the identity."""
    with NoDropout():
        out: Tensor = net(x)
    return single(out)


def single(outputs: Tensor) -> Tensor:
    """Return outputs of a half-precision pass in float32: losses and probabilities need its digits."""
    half = getattr(outputs, "dtype", None) in (torch.bfloat16, torch.float16)  # checked for tensors by the caller
    return outputs.float() if half else outputs
