"""Run a network for many Monte Carlo samples in one pass.

The part of a network before its first dropout runs once, and what that dropout gives is repeated for the samples. A
chain of `nn.Sequential` is known to allow that. Any other module may bring rows from before the dropout together with
rows from behind it, so it is tried both ways on two rows first; where the outputs differ the whole batch is repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stfseb.errors import StfsebError
from stfseb.networks.dropout import (
    DROPOUT_MODULES,
    Block,
    Lanes,
    MonteCarloDropout,
    NoDropout,
    PrefixHasDropoutError,
)
from stfseb.networks.layout import hooked, takes_any_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def chain(net: nn.Module) -> list[nn.Module]:
    """Return the modules that `net` applies one after the other, nested `nn.Sequential` unrolled."""
    own = type(net).forward is not nn.Sequential.forward or "forward" in vars(net)
    plain = not (own or net._forward_hooks or net._forward_pre_hooks)
    if not (isinstance(net, nn.Sequential) and plain):
        return [net]
    return [leaf for child in net for leaf in chain(child)]


def first_dropout(modules: Sequence[nn.Module]) -> int:
    """Return how many modules of a chain come before its first dropout (0: nothing can be shared)."""
    for index, module in enumerate(modules):
        if isinstance(module, DROPOUT_MODULES):
            return index
    return 0


def averaging_layers(net: nn.Module) -> list[nn.Module]:
    """Return the layers that in training mode mix rows, or move statistics that are kept of them."""
    return [
        module
        for module in net.modules()
        if isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
    ]


def has_batch_statistics(net: nn.Module) -> bool:
    """Tell whether a forward pass in training mode would mix rows, or move statistics that are kept of them."""
    return bool(averaging_layers(net))


def rearranged(modules: Sequence[nn.Module], *, flatten: bool = True) -> list[Callable[[Tensor], Tensor]]:
    """Return the same function with less to do: ReLU after max-pooling, flattening into the Linear's weights.

    max(relu(x)) = relu(max(x)), in value and gradient, and pooling leaves a quarter of the elements. A
    channels-last tensor is flattened as it lies, and the columns of the Linear behind it are permuted instead.
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    modules = list(modules)
    index = 0
    while index < len(modules):
        module = modules[index]
        after = modules[index + 1] if index + 1 < len(modules) else None
        if hooked(module) or after is None or hooked(after):
            steps.append(module)
        elif type(module) is nn.ReLU and type(after) is nn.MaxPool2d and not after.return_indices:
            steps += [after, module]
            index += 1
        elif (
            flatten
            and type(module) is nn.Flatten
            and type(after) is nn.Linear
            and (module.start_dim, module.end_dim) == (1, -1)
        ):
            steps.append(_FlattenLinear(after))
            index += 1
        else:
            steps.append(module)
        index += 1
    return steps


class _FlattenLinear:
    """A Linear behind a Flatten, applied to a channels-last tensor without moving it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        if not last:
            return F.linear(x.flatten(1), weight, self.linear.bias)
        columns = weight.view(-1, *x.shape[1:]).permute(0, 2, 3, 1).reshape(weight.shape)
        return F.linear(x.permute(0, 2, 3, 1).reshape(len(x), -1), columns, self.linear.bias)


class FoldedNetwork:
    """A network seen as `samples` networks: rows in, (samples, rows, outputs) out."""

    def __init__(self, net: nn.Module, *, share_prefix: bool = True) -> None:
        self.net = net
        self.share_prefix = share_prefix
        # Whether a module of one's own needs all rows repeated; None until it has been tried.
        self.whole: bool | None = None if share_prefix else True
        self.lanes: Sequence[Tensor] | None = None  # masks' random bits, where an engine draws them beforehand
        self.plan: list[Lanes] = []  # the masks that the last pass asked for

    def __call__(self, x: Tensor, samples: int, blocks: Sequence[Block]) -> tuple[Tensor, set[float]]:
        """Return outputs (samples, rows, ...) and the dropout rates that were met on the way."""
        modules = chain(self.net)
        cut = first_dropout(modules) if self.share_prefix else 0
        laid_out = takes_any_layout(modules)
        prefix, suffix = rearranged(modules[:cut]), rearranged(modules[cut:])
        if cut:
            mode = MonteCarloDropout(samples, blocks, folded=False, lanes=self.lanes, laid_out=laid_out)
            try:
                with mode:
                    out = x
                    mode.in_prefix = True
                    for module in prefix:
                        out = module(out)
                    mode.in_prefix = False
                    for module in suffix:
                        out = module(out)
            except PrefixHasDropoutError:
                # A custom layer in the prefix draws dropout of its own: start over with the whole batch.
                self.share_prefix = False
                return self(x, samples, blocks)
        else:
            if self.whole is None and not torch.compiler.is_compiling():
                self.whole = _needs_whole(self.net, x)
            # A single row has no batch statistics of its own; repeated for the samples it passes, as ever.
            whole = self.whole is not False or (len(x) == 1 and self.net.training)
            mode = MonteCarloDropout(samples, blocks, folded=whole, lanes=self.lanes, laid_out=laid_out)
            with mode:
                out = self.net(x.repeat(samples, *(1,) * (x.ndim - 1)) if whole else x)
            if mode.rates and not whole and len(returned(out)) != samples * len(x):
                self.whole = True  # in this mode, or for this many rows, it does not go together after all
                return self(x, samples, blocks)
        if not mode.rates:
            raise StfsebError(
                f"no dropout ran in {type(self.net).__name__}'s forward pass, so every Monte Carlo sample is the "
                "same: call the network's dropout layers in forward, or use MAP, MFVI or FSEB"
            )
        self.plan = mode.plan
        logits = returned(out)
        return logits.view(samples, -1, logits.shape[1]), mode.rates


def _needs_whole(net: nn.Module, x: Tensor) -> bool | None:
    """Tell whether a module needs all rows repeated from its beginning on: run it both ways on two rows.

    None where these rows do not pass at all. Outputs that are the same for all rows and samples tell nothing: then
    the answer is yes.
    """
    if not len(x):
        return None
    if not all(p.dtype in (torch.float32, torch.float64) for p in net.parameters()):
        return True
    rows = torch.cat([x[:1], x[-1:]]) if len(x) > 1 else torch.cat([x, x.flip(-1)])
    flags = {module: module.training for module in net.modules()}
    net.eval()
    found = []
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            for folded in (True, False):
                generator = torch.Generator(x.device).manual_seed(0)
                mode = MonteCarloDropout(3, [Block(2, False, generator)], folded=folded)
                with mode:
                    found.append(returned(net(rows.repeat(3, *(1,) * (x.ndim - 1)) if folded else rows)))
    except Exception:
        return True if found else None  # without a first pass either, the real one says what is wrong
    finally:
        for module, training in flags.items():
            module.training = training
    whole, early = found
    if whole.shape != early.shape or not bool(whole.isfinite().all()):
        return True
    spread = float((whole.amax(0) - whole.amin(0)).max())  # over rows and samples
    return spread == 0.0 or float((whole - early).abs().max()) > 1e-4 * spread


def without_dropout(net: nn.Module, *, substituted: bool = False) -> NoDropout:
    """Return the mode in which every dropout of the network is the identity."""
    return NoDropout(laid_out=takes_any_layout(chain(net)), substituted=substituted)


def deterministic(net: nn.Module, x: Tensor) -> Tensor:
    """Run the network with every dropout as the identity."""
    with without_dropout(net):
        return returned(net(x))


def returned(outputs: Any) -> Tensor:
    """Return what a network gave back, if it is one row of logits an example, as `single` has it."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise StfsebError(f"the network must return logits of shape (N, classes), not {shape}")
    return single(outputs)


def single(outputs: Tensor) -> Tensor:
    """Return outputs of a half-precision pass in float32: losses and probabilities need its digits."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
