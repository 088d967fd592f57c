"""Out of memory in a step: run fewer rows at once and go on.

A minibatch is run in parts whose gradients add up to the whole one's: every part carries its share of the function
and weights terms, and all see the context points and masks of the step. So the objective stays what it was, up to
rounding; data rows draw other masks of the same law, and batch norm takes its statistics from the parts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from stfseb.inputs import scaled
from stfseb.methods.base import Method, Terms
from stfseb.methods.context import Context
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.memory import NoMemoryError, free_unused, is_out_of_memory
from stfseb.networks.folding import has_batch_statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

log = logging.getLogger("stfseb")


def contexts(method: Method) -> list[Context]:
    """Return the context sets of a method and of the methods inside it."""
    return [module for module in method.modules() if isinstance(module, Context)]


class Folds:
    """The gradient of a minibatch, in as many parts as memory asks for; `rows` is None while it is run whole."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.rows: int | None = None
        self.contexts = contexts(method)
        trained = {id(p) for p in method.parameters()}
        self.buffers = [v for v in method.state_dict(keep_vars=True).values() if id(v) not in trained]
        self.least = 2 if has_batch_statistics(method.net) else 1

    def run(
        self,
        x: Tensor,
        y: Tensor,
        clear: Callable[[], None],
        gradient: Callable[[Tensor, Tensor, int | None], Terms],
    ) -> Terms:
        """Add up the gradients of the parts after `clear`; on running out of memory halve the parts and start over.

        `gradient` takes rows, targets and the size of the whole step (None: these are all), and returns the terms.
        """
        while True:
            before = self._remember()
            try:
                clear()
                return self._parts(x, y, gradient)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            # Outside of the handler, where the error no longer holds the tensors of the failed attempt.
            clear()
            self._halve(len(x), reason)
            self._put_back(before)

    def _parts(self, x: Tensor, y: Tensor, gradient: Callable[[Tensor, Tensor, int | None], Terms]) -> Terms:
        if self.rows is None or len(x) <= self.rows:
            return gradient(x, y, None)
        count = -(-len(x) // self.rows)
        whole = scaled(x, self.method.like) if any(context.images is None for context in self.contexts) else None
        for context in self.contexts:
            context.begin_parts(whole)
        try:
            pairs = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
            parts = [gradient(xs, ys, len(x)) for xs, ys in pairs]
        finally:
            for context in self.contexts:
                context.begin_parts(None)
        return Terms(*(torch.stack([term.detach() for term in terms]).sum() for terms in zip(*parts, strict=True)))

    def _halve(self, size: int, reason: str) -> None:
        now = min(size, self.rows or size)
        now = -(-size // -(-size // now))  # the largest part that has been tried
        if now <= self.least:
            raise NoMemoryError(_refusal(self.method, now, reason))
        self.rows = max(self.least, now // 2)
        log.warning("out of memory with %d rows at once (%s): going on with %d at once", now, reason, self.rows)
        free_unused()

    # A failed attempt leaves no trace -----------------------------------------------------------------

    def _remember(self) -> tuple[Tensor, Tensor | None, list[int], list[Tensor]]:
        device = self.method.like.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        steps = [context.step for context in self.contexts]
        return torch.get_rng_state(), cuda, steps, [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def _put_back(self, before: tuple[Tensor, Tensor | None, list[int], list[Tensor]]) -> None:
        host, cuda, steps, buffers = before
        torch.set_rng_state(host)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.method.like.device)
        for context, step in zip(self.contexts, steps, strict=True):
            context.step = step
        for buffer, value in zip(self.buffers, buffers, strict=True):
            buffer.copy_(value)


def _refusal(method: Method, rows: int, reason: str) -> str:
    """Say that not even so few rows of a minibatch fit, and what they share the step with, which is never split."""
    beside: dict[str, int] = {}
    for one in method.modules():
        if isinstance(one, Method) and not isinstance(one, Ensemble):  # whose members have settings of their own
            points = getattr(one.settings, "num_context", 0) if one.uses_context else 0
            for name, count in (("num_context", points), ("samples", one.samples)):
                beside[name] = max(count, beside.get(name, 0))
    lower = [name for name, least in (("num_context", 1), ("samples", 1)) if beside[name] > least]
    held = f" with {' and '.join(f'{name}={beside[name]}' for name in lower)}" if lower else ""
    return (
        f"{rows} row{'s' * (rows > 1)} of a minibatch do{'es' * (rows == 1)} not fit into memory{held} ({reason}): "
        + (f"lower {' or '.join(lower)}, " if lower else "")
        + "take a smaller network, or a device with more memory"
    )
