"""Which calls of an objective belong to one step, so that its parts share their context points and masks.

A step ends when the rows of its parts have reached its size, when an optimiser has stepped, or when the weights have
changed. None of the three would do alone: a process has only its share of the rows, an update need not be an
optimiser's of torch, and one of a low learning rate is lost in the rounding of bfloat16 weights.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Step:
    """The step to which parts belong; only one that has parts is ever open."""

    def __init__(self) -> None:
        self._mark: Tensor | None = None  # of the weights, while the step is open
        self._rows = 0
        self._parameters: frozenset[int] = frozenset()

    def end(self) -> None:
        """Let the next part be the first of another step."""
        self._mark = None

    def begins(self, rows: int, whole: int | None, parameters: Sequence[Tensor]) -> bool:
        """Tell whether a call with `rows` rows is the first of a step of `whole` rows (None: of these rows)."""
        if whole is None or rows >= whole:
            self.end()
            return True
        first: bool = self._first(rows, whole, parameters)
        return first

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it asks for values, and has nothing to compile
    def _first(self, rows: int, whole: int, parameters: Sequence[Tensor]) -> bool:
        mark = _mark(parameters)
        new = self._ended(whole) or not _same(mark, self._mark)
        self._rows = rows if new else self._rows + rows
        self._mark, self._parameters = mark, frozenset(map(id, parameters))
        _watch(self)
        return new

    def _ended(self, whole: int) -> bool:
        # Processes count no rows: with unequal shares, they would come to different ends.
        return self._mark is None or (self._rows >= whole and not _several_processes())

    def stepped(self, parameters: Iterable[Tensor]) -> None:
        """End the step if an optimiser of these parameters has some of this step's."""
        if any(id(parameter) in self._parameters for parameter in parameters):
            self.end()


_open: WeakSet[Step] = WeakSet()  # steps with parts
_hooked: list[Any] = []
_guard = threading.Lock()


def _watch(step: Step) -> None:
    """Let optimisers end the step; torch is told of it when the first step has parts."""
    with _guard:
        if not _hooked:
            _hooked.append(register_optimizer_step_post_hook(_after_step))
        _open.add(step)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # for optimisers that are compiled
def _after_step(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    with _guard:
        for step in list(_open):
            step.stepped(parameter for group in optimiser.param_groups for parameter in group["params"])
            if step._mark is None:
                _open.discard(step)


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def _mark(parameters: Sequence[Tensor]) -> Tensor:
    """Return a few numbers that change with most updates: the first and the last element of each tensor.

    Version counters would not do, as fused optimisers leave them alone.
    """
    flat = [p.detach().reshape(-1) for p in parameters]
    return torch.stack([f[i].double() for f in flat for i in (0, -1)])


def _same(mark: Tensor, before: Tensor | None) -> bool:
    return before is not None and mark.device == before.device and torch.equal(mark, before)
