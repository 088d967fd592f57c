"""How an epoch is run: eagerly, or as one CUDA graph a step that the host only replays.

Both make the same steps in the same order; which one a run gets is chosen by `make_engine` and said in the
log and in the result.
"""

from __future__ import annotations

import copy
import gc
import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.inputs import ONE_ROW
from stfseb.networks.capturing import capturing
from stfseb.networks.folding import chain
from stfseb.networks.layout import takes_any_layout
from stfseb.networks.precision import resolve, running
from stfseb.training.batches import Batches, ResidentBatches
from stfseb.training.folds import Folds
from stfseb.training.static_step import StaticStep, release

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method, Terms

log = logging.getLogger("stfseb")

_WARM_UP = 3
_COMPILATIONS = 1024  # of one function, in a process that may train hundreds of runs
_WORTH_COMPILING = 20_000  # steps: below, the half minute of compilation is not earned back


class Engine(Protocol):
    """Runs epochs; `description` says how, in words."""

    description: str

    @property
    def seen(self) -> int:
        """Return how many rows the epoch has had: a loader's may be more or fewer than its data set's."""
        ...

    def epoch(self, number: int, on_step: Callable[[int], None], check: Callable[[Terms], None]) -> Tensor:
        """Make one pass over the data and return the sums of the three terms."""
        ...

    def reseed(self, seed: int) -> None:
        """Restart the engine's own random stream, if it has one."""
        ...


def _said(method: Method, precision: str) -> str:
    """Return the precision in words; "float32" leaves a network of float64 as it is."""
    return "float64" if method.like.dtype == torch.float64 and precision == "float32" else precision


class EagerEngine:
    """One objective, one backward pass, one update at a time: for everything that cannot be captured."""

    def __init__(
        self, method: Method, batches: Batches, optimiser: torch.optim.Optimizer, precision: str, why: str = ""
    ) -> None:
        self.method, self.batches, self.optimiser, self.precision = method, batches, optimiser, precision
        self.description = f"eager, {_said(method, precision)}" + (f" ({why})" if why else "")
        self.folds = Folds(method)
        # Steps and rows of this epoch, and the sums of their terms.
        self.made, self.seen, self.sums = 0, 0, torch.zeros(3, dtype=torch.float64)
        self._left: tuple[int, Tensor, Callable[[], None]] | None = None

    def take_up(self, made: int, sums: Tensor, ready: Callable[[], None]) -> None:
        """Let the next epoch start after `made` steps with these sums; `ready` then sets the random sources."""
        self._left = made, sums, ready

    def epoch(self, number: int, on_step: Callable[[int], None], check: Callable[[Terms], None]) -> Tensor:
        """Make one pass over the data."""
        device = self.method.like.device
        self.made, self.seen, self.sums = 0, 0, torch.zeros(3, dtype=torch.float64, device=device)
        minibatches = self.batches.epoch(number)
        if self._left is not None:
            made, sums, ready = self._left
            self._left, self.made, self.sums = None, made, sums.to(device)
            for _ in range(made):
                self.seen += len(next(minibatches)[1])
            ready()
        for x, y in minibatches:
            terms = self.step(x, y)
            if device.type == "cpu":  # elsewhere it would wait for the device at every step
                check(terms)
            self.optimiser.step()
            self.sums += torch.stack([term.detach() for term in terms]).double()
            self.made += 1
            self.seen += len(y)
            on_step(1)
        return self.sums

    def reseed(self, seed: int) -> None:
        """Do nothing: torch's default generator, which the caller seeds, rules."""

    def step(self, x: Tensor, y: Tensor) -> Terms:
        """Compute the objective of a minibatch and its gradient, in parts where memory asks for it."""
        return self.folds.run(x, y, self.optimiser.zero_grad, self._gradient)

    def _gradient(self, x: Tensor, y: Tensor, whole: int | None) -> Terms:
        with running(self.precision, self.method.like.device):
            try:
                terms = self.method.objective(x, y, self.batches.num_data, whole)
            except ValueError as error:
                if len(x) == 1 and ONE_ROW in str(error):
                    raise StfsebError(
                        "the last minibatch has one row, of which batch norm cannot take statistics: choose a "
                        f"batch_size that does not leave one of {self.batches.num_data} examples over"
                    ) from error
                raise
        # Divided by the nominal batch size, so that a smaller last batch weighs what it holds.
        (terms.total / self.batches.batch_size).backward()
        return terms


class CapturedEngine:
    """A step as one CUDA graph over resident data, and another for a smaller last minibatch."""

    def __init__(
        self,
        method: Method,
        batches: ResidentBatches,
        optimiser: torch.optim.Optimizer,
        precision: str,
        *,
        compiled: bool,
    ) -> None:
        self.method, self.batches, self.optimiser, self.precision = method, batches, optimiser, precision
        self.description = f"captured, {_said(method, precision)}" + (", compiled" if compiled else "")
        full, rest = divmod(batches.num_data, batches.batch_size)
        before = copy.deepcopy(self._tensors())
        drawn = 0 if method.context is None else method.context.step
        method.train()
        method.make_live(method.like)
        # A generator of its own: what other runs draw on the same device does not change this one.
        self.generator = torch.Generator(method.like.device)
        self.capturing = torch.cuda.Stream(method.like.device)
        try:
            self.full = self._static(full, batches.batch_size)
            self.graph = self._capture(self.full, compiled)
            self.rest = self._static(1, rest) if rest else None
            # The last minibatch is not worth a compilation of its own; its graph may reuse the first one's memory.
            self.rest_graph = None if self.rest is None else self._capture(self.rest, False, self.graph.pool())
        finally:  # warming up made a few steps: put everything back, in place; after a failure the eager engine goes on
            self._put_back(before, drawn)

    @property
    def seen(self) -> int:
        """Return how many rows an epoch has: all."""
        return self.batches.num_data

    def _tensors(self) -> dict[str, Tensor]:
        """Return all that steps may change, buffers that are not saved included."""
        return {**self.method.state_dict(), **{f"net.{name}": value for name, value in self.method.net.named_buffers()}}

    @torch.no_grad()
    def _put_back(self, before: dict[str, Tensor], drawn: int) -> None:
        for name, value in self._tensors().items():
            value.copy_(before[name])
        self._clear_optimiser()
        if self.method.context is not None:
            self.method.context.step = drawn
        release(self.method)

    @torch.no_grad()
    def _clear_optimiser(self) -> None:
        for state in self.optimiser.state.values():
            for value in state.values():
                value.zero_()

    def _static(self, steps: int, size: int) -> StaticStep:
        return StaticStep(
            self.method,
            self.batches,
            self.optimiser,
            self.precision,
            steps=steps,
            size=size,
            generator=self.generator,
        )

    def serves(self, method: Method) -> bool:
        """Tell whether the captured step is also that of another method, but for its weights and live settings."""
        ours, theirs = self.method.context, method.context
        images = [None if context is None or context.images is None else context.images for context in (ours, theirs)]
        alike = (images[0] is None) == (images[1] is None)
        if images[0] is not None and images[1] is not None:
            alike = images[0].shape == images[1].shape and images[0].dtype == images[1].dtype
        return alike and self.method.captured_key() == method.captured_key()

    def take_over(self, method: Method, batches: ResidentBatches) -> None:
        """Go on with another method's weights and settings, and another order of the same data, from the start."""
        self.method.take_over(method)
        self.batches = self.full.batches = batches
        if self.rest is not None:
            self.rest.batches = batches
        self._clear_optimiser()

    def reseed(self, seed: int) -> None:
        """Restart the stream of masks and augmentation."""
        self.generator.manual_seed(seed)

    def _capture(self, step: StaticStep, compiled: bool, pool: Any = None) -> torch.cuda.CUDAGraph:
        """Warm up on a side stream, as capture asks for, and capture one step."""
        step.load(torch.arange(step.order.numel(), device=step.device))
        step.learn_plan()
        if compiled:
            import torch._inductor.config as inductor

            inductor.fallback_random = True  # what a method draws inside is drawn by torch's own kernels
            # Every run of a process compiles its update for its own weights; the defaults of 8 for a function, 256 in
            # all would leave later ones eager.
            for limit in ("recompile_limit", "accumulated_recompile_limit"):
                setattr(torch._dynamo.config, limit, max(_COMPILATIONS, getattr(torch._dynamo.config, limit)))
            step.forward = torch.compile(step.terms_to_compile(), dynamic=False)
            step.update = torch.compile(self.optimiser.step)
        side = torch.cuda.Stream(step.device)
        side.wait_stream(torch.cuda.current_stream(step.device))
        try:
            with torch.cuda.stream(side), running(self.precision, step.device):
                for _ in range(_WARM_UP):
                    step.counter.zero_()
                    self.optimiser.zero_grad(set_to_none=True)
                    step()
        finally:
            torch.cuda.current_stream(step.device).wait_stream(side)
        self.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize(step.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # On a stream of its own, unlike torch's one for all: runs of a population are replayed at once.
        with (
            running(self.precision, step.device),
            capturing(graph, step.device, self.capturing, generator=self.generator, pool=pool),
        ):
            step()
        return graph

    def epoch(self, number: int, on_step: Callable[[int], None], check: Callable[[Terms], None]) -> Tensor:
        """Replay the graph for every full minibatch, then the last one's."""
        del check  # the sums are checked after the epoch
        order = self.batches.order(number)
        full = self.full.order.numel()
        sums = torch.zeros_like(self.full.sums)
        for step, graph, rows in ((self.full, self.graph, order[:full]), (self.rest, self.rest_graph, order[full:])):
            if step is None or graph is None:
                continue
            step.load(rows)
            step.sums.zero_()
            for _ in range(step.steps):
                graph.replay()
            sums += step.sums
            on_step(step.steps)
        return sums


def worth_compiling(steps: int) -> bool:
    """Tell whether so many steps earn back the time of a compilation."""
    return steps >= _WORTH_COMPILING


def make_engine(
    method: Method,
    batches: Batches,
    optimiser: torch.optim.Optimizer,
    *,
    precision: str = "auto",
    capture: bool | None = None,
    compiled: bool | None = None,
    epochs: int = 1,
) -> Engine:
    """Return the fastest engine that this method, data and device allow, and say in the log which and why."""
    chosen = resolve(precision, method.net)
    why = "" if capture is False else _cannot_capture(method, batches, asked=bool(capture))
    engine: Engine
    on_cuda = method.like.device.type == "cuda"
    if chosen == "bf16" and (on_cuda or not takes_any_layout(chain(method.net))):
        # Convolutions in bf16 want channels last; the numbers are the same (other chains on the CPU: see `Pass`).
        for parameter in method.net.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    if capture is False or why or not on_cuda or not isinstance(batches, ResidentBatches):
        engine = EagerEngine(method, batches, optimiser, chosen, why)
    else:
        steps = epochs * (batches.num_data // batches.batch_size)
        wanted = worth_compiling(steps) if compiled is None else compiled
        engine = _fastest(method, batches, optimiser, chosen, compiled=wanted, strict=bool(capture))
    log.info("%s trains %s", method.label, engine.description)
    return engine


def _fastest(
    method: Method,
    batches: ResidentBatches,
    optimiser: torch.optim.Optimizer,
    precision: str,
    *,
    compiled: bool,
    strict: bool,
) -> Engine:
    """Return a captured engine, uncompiled where there is no compiler, and an eager one where nothing else runs."""
    reason = ""
    for how in (True, False) if compiled else (False,):
        try:
            engine = CapturedEngine(method, batches, optimiser, precision, compiled=how)
        except Exception as error:  # a module may do anything in its forward; eager can run it
            if strict:
                raise
            said = str(error).splitlines()[0] if str(error) else ""
            reason = f"{'compilation' if how else 'capture'} failed: {type(error).__name__}: {said}"[:200]
        else:
            engine.description += f" ({reason})" if reason else ""
            return engine
        gc.collect()  # what the attempt has left on the card
        log.warning("%s: %s; training goes on more slowly", method.label, reason)
    return EagerEngine(method, batches, optimiser, precision, reason)


def _cannot_capture(method: Method, batches: Batches, *, asked: bool) -> str:
    """Return why a step cannot be captured, or nothing."""
    if method.like.device.type != "cuda":
        return "capture=True needs CUDA" if asked else ""  # there are no graphs elsewhere
    if not isinstance(batches, ResidentBatches):
        return "the data are streamed"
    if method.uses_context and (method.context is None or method.context.images is None):
        return "context='train' takes its points from each minibatch"
    return ""


def make_optimiser(method: Method, **settings: Any) -> torch.optim.Adam:
    """Return Adam over everything that is trained, its state on the device so that it can be captured.

    On the CPU the fused form is the fastest. On CUDA the multi-tensor form is: captured, or compiled into a few
    kernels, where the fused one leaves most of the card idle for networks of this size.
    """
    cuda = method.like.device.type == "cuda"
    trained = [p for p in method.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, fused=method.like.device.type == "cpu", foreach=cuda, capturable=cuda, **settings)
