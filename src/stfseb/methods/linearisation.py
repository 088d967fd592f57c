"""The law of a linearised network at a set of points, without the Jacobian of all classes.

f_L(x; w) = f(x; mu) + J(x) (w - mu) with w ~ N(mu, diag(s^2)) has, class by class, the mean f_l(x; mu) and the
covariance J_l diag(s^2) J_l'. It is accumulated layer by layer, for a few classes at a time:
what is used as the weight of a linear or convolution layer by `layer_products`, every other parameter by
a copy of it for every row.

Rows must not see one another (batch norm uses its running statistics). Gradients flow through mu and s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from stfseb.errors import StfsebError
from stfseb.methods.base import evaluating
from stfseb.methods.layer_calls import LayerCall, call_parts, kind_of, single_use_calls
from stfseb.methods.layer_products import by_pairs, is_supported, layer_bytes, layer_covariance, pair_products
from stfseb.methods.twice import Normalised, Stage, substitute, unfused
from stfseb.networks.dropout import NoDropout
from stfseb.networks.functional import call_with, places

if TYPE_CHECKING:
    from collections.abc import Callable

Scales = dict[str, Tensor]


class Linearisation:
    """Means and covariances of a linearised network; `last_layer` takes only its parameters as random.

    Args:
        net: the network; its parameters are mu.
        example: one row, to find out how the parameters are used.
        last_layer: linearise in the parameters of the output layer alone.
    """

    def __init__(self, net: nn.Module, example: Tensor, *, last_layer: bool = False) -> None:
        self.net = net
        self.last_layer = last_layer
        self.calls = {call.weight: call for call in single_use_calls(net, example) if is_supported(call)}
        self._clone = False
        self._stage = Stage()
        if last_layer:
            self.calls = _output_call(net, self.calls, example)
        covered = {name for call in self.calls.values() for name in (call.weight, call.bias)}
        names = [name for name, p in net.named_parameters() if p.requires_grad]
        self.rest = [] if last_layer else [name for name in names if name not in covered]
        self.outputs = 0
        with torch.no_grad():
            self.outputs = int(self._run(example)[0].shape[1])
        if not last_layer:
            self._check(example)

    def law(self, x: Tensor, scales: Scales, classes: Tensor, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        """Return means (n, N) and covariances (n, N, N) in float64 of the n `classes` at the N rows of x."""
        count, rows = len(classes), len(x)
        if self.last_layer:
            out, seen = self._run(x)
            (call,) = self.calls.values()
            products = pair_products(seen[call.weight][0], scales[call.weight], _optional(scales, call.bias))
            return out.T[classes].double(), products.permute(2, 0, 1)[classes]
        with unfused():
            out, seen = self._run(x.repeat(count, *(1,) * (x.ndim - 1)))
        self._stage.inputs_only = True
        chosen = out.view(count, rows, -1).gather(2, classes.view(-1, 1, 1).expand(-1, rows, 1)).squeeze(2)
        names = list(seen)
        gradients = _gradients(chosen.sum(), [seen[name][1] for name in names], create_graph=create_graph)
        self._stage.inputs_only = False
        covariance = torch.zeros(count, rows, rows, dtype=torch.float64, device=x.device)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                call = self.calls[name]
                inputs = seen[name][0][:rows]  # the same for every class
                g = gradient.reshape(count, rows, *gradient.shape[1:])
                covariance = covariance + layer_covariance(call, inputs, g, scales[name], _optional(scales, call.bias))
        if self.rest:
            covariance = covariance + self._general(x, scales, classes, create_graph=create_graph)
        return chosen.double(), covariance

    def bytes_needed(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Estimate the memory of a covariance at its peak, gradients included: once, and for each class."""
        layers = [layer_bytes(call, rows, itemsize, only=self.last_layer) for call in self.calls.values()]
        general = sum(p.numel() for name, p in self.net.named_parameters() if name in self.rest)
        each = sum(share for _, share in layers) + rows * general * (3 * itemsize + 16)
        return sum(once for once, _ in layers), each

    def _check(self, example: Tensor) -> None:
        """Raise unless the law of one row and class can be computed and differentiated, as a step will need it."""
        trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        try:
            with torch.enable_grad():
                scales = {name: torch.ones_like(p) for name, p in trained.items()}
                first = torch.zeros(1, dtype=torch.int64, device=example.device)
                _, covariance = self.law(example, scales, first, create_graph=True)
                if covariance.requires_grad:  # that of a linear model is constant
                    _gradients(covariance.sum(), list(trained.values()), create_graph=False)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise StfsebError(
                f"{type(self.net).__name__} cannot be linearised in all of its parameters "
                f"({' '.join(str(error).split())[:200]}): use linearise='last_layer'"
            ) from error

    def _run(self, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the outputs, and by weight the input and output of each call that is followed."""
        weights = {id(p): name for name, p in self.net.named_parameters() if name in self.calls}
        watch = _Watch(weights, clone=self._clone, stage=self._stage)
        with evaluating(self.net), NoDropout(), watch:
            out: Tensor = self.net(x)
        if any(z._version != version for (_, z), version in zip(watch.seen.values(), watch.versions, strict=True)):
            # A layer's output was overwritten in place (ReLU(inplace=True)): follow copies from now on.
            self._clone = True
            return self._run(x)
        return out, watch.seen

    def _general(self, x: Tensor, scales: Scales, classes: Tensor, *, create_graph: bool) -> Tensor:
        """Return the share of all other parameters: every row and class has a copy of them to be differentiated by.

        Not vmap(grad): through native layer norm its result, differentiated once more, is wrong (torch 2.13).
        """
        count, rows, where = len(classes), len(x), places(self.net)
        copies = {
            name: p.expand(count * rows, *p.shape) for name, p in self.net.named_parameters() if name in self.rest
        }

        def one(values: dict[str, Tensor], row: Tensor) -> Tensor:
            with NoDropout(), Normalised():
                return call_with(self.net, values, row.unsqueeze(0), where)[0]

        with evaluating(self.net), unfused():
            out = vmap(one)(copies, x.repeat(count, *(1,) * (x.ndim - 1)))
        chosen = out.gather(1, classes.repeat_interleave(rows).unsqueeze(1)).sum()
        gradients = _gradients(chosen, list(copies.values()), create_graph=create_graph)
        parts = [
            (gradient * scales[name]).reshape(count, rows, -1)
            for name, gradient in zip(copies, gradients, strict=True)
            if gradient is not None
        ]
        flat = torch.cat(parts, dim=2).double() if parts else torch.zeros(count, rows, 1, dtype=torch.float64)
        return flat.to(x.device) @ flat.to(x.device).mT


class _Watch(TorchFunctionMode):
    """Keep the inputs and outputs of the calls with certain weights; run what can be differentiated twice cheaply."""

    def __init__(self, weights: dict[int, str], *, clone: bool, stage: Stage) -> None:
        super().__init__()
        self.weights = weights
        self.clone = clone
        self.stage = stage
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}
        self.versions: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the call if it is one of those; let everything through."""
        kwargs = kwargs or {}
        out = substitute(func, args, kwargs, self.stage)
        if out is None:
            out = func(*args, **kwargs)
        if kind_of(func) is None:
            return out
        x, weight, _, _ = call_parts(func, args, kwargs)
        name = self.weights.get(id(weight))
        if name is None:
            return out
        self.seen[name] = (x.clone() if self.clone else x, out)
        self.versions.append(out._version)
        return out.clone() if self.clone else out


def _output_call(net: nn.Module, calls: dict[str, LayerCall], example: Tensor) -> dict[str, LayerCall]:
    """Return the call whose output is the network's output."""
    weights = {id(p): name for name, p in net.named_parameters() if name in calls and by_pairs(calls[name])}
    watch = _Watch(weights, clone=False, stage=Stage())
    with torch.no_grad(), evaluating(net), NoDropout(), watch:
        out = net(example)
    for name, (_, z) in watch.seen.items():
        if z is out:
            return {name: calls[name]}
    raise StfsebError(
        f"linearise='last_layer': the output of {type(net).__name__} is not that of a linear layer with its own "
        "weights: use linearise='full' or 'subset'"
    )


def _gradients(value: Tensor, inputs: list[Tensor], *, create_graph: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar by the inputs, None by those that it does not depend on."""
    if not inputs:  # which torch refuses
        return ()
    return torch.autograd.grad(value, inputs, create_graph=create_graph, allow_unused=True)


def _optional(scales: Scales, name: str | None) -> Tensor | None:
    return None if name is None else scales[name]
