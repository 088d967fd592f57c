"""Monte Carlo prediction for minibatches of one size, at the speed of the card.

The masks of a seed are the same for every minibatch, so they are drawn once; on CUDA the folded pass is captured
as one graph. For servers and for large sets; `method.predict_proba` needs no preparation and takes any size.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.inputs import REFUSALS, as_tensor, check_fits, check_pixels, check_seed, scaled
from stfseb.methods.base import Method, evaluating
from stfseb.methods.calibrated import tempered
from stfseb.methods.mc_dropout import DropoutMethod
from stfseb.methods.settings import check_count
from stfseb.networks.capturing import capturing
from stfseb.networks.layout import CardLayout
from stfseb.networks.precision import resolve, running

log = logging.getLogger("stfseb")


def layout(method: Method, precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return what chooses memory layouts, in bf16 on CUDA; as in training, not where passes may be transformed."""
    return CardLayout() if precision == "bf16" and device.type == "cuda" and not method.vectorised else nullcontext()


class Predictor:
    """Predictions of a trained method, `batch_size` rows at a time, under the functions that `seed` draws.

    Args:
        method: a trained method; its weights are read at every call, so it may be trained on in between.
        example: one or more rows as the method takes them, for their shape; what is predicted may be uint8 or floating
            point, whichever this is.
        batch_size: rows in a pass; the last minibatch is filled up.
        samples: Monte Carlo samples (by default the method's own).
        seed: of the masks; equal to `method.sample_logits(x, samples, seed=seed)` up to rounding.
        precision: "float32", "tf32", "bf16" or "auto".
    """

    def __init__(
        self,
        method: Method,
        example: Any,
        batch_size: int = 256,
        samples: int | None = None,
        seed: int = 0,
        precision: str = "auto",
    ) -> None:
        self.samples = method.samples if samples is None else samples
        check_count(batch_size=batch_size, samples=self.samples)
        check_seed(seed)
        rows = as_tensor(example, "example")
        check_pixels(rows, "example")
        self.method, self.batch_size, self.seed = method, batch_size, seed
        self.device = method.like.device
        self.precision = resolve(precision, method.net)
        self.input = scaled(rows[:1], method.like).repeat(batch_size, *(1,) * (rows.ndim - 1))
        self.lanes: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        try:
            logits = self._pass()  # finds out which masks are needed
        except REFUSALS:
            with torch.no_grad(), evaluating(method.net):
                check_fits(lambda row: method._draw(scaled(row, method.like), 1, seed), rows, "example")
            raise
        if isinstance(method, DropoutMethod):
            generator = torch.Generator(self.device).manual_seed(seed)
            self.lanes = [lanes.draw(self.device, generator) for lanes in method.folded.plan]
            if self.device.type == "cuda":
                self._capture()
        self.outputs = logits.shape[-1]

    def _pass(self) -> Tensor:
        folded = getattr(self.method, "folded", None)
        if folded is not None:
            folded.lanes = self.lanes or None
        try:
            with (
                torch.no_grad(),
                evaluating(self.method.net),
                running(self.precision, self.device),
                layout(self.method, self.precision, self.device),
            ):
                return self.method._draw(self.input, self.samples, self.seed)
        finally:
            if folded is not None:
                folded.lanes = None

    def _capture(self) -> None:
        self.graph = None
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._pass()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self.device, side):
                self.logits = self._pass()
        except Exception as error:  # a module may do anything in its forward; as in training, eager can run it
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            log.warning("%s: capture failed: %s; prediction goes on more slowly", self.method.label, reason)
            return
        self.graph, self.captured = graph, self._places()

    def _places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return where the weights lie: a graph reads them there, and training on may lay them out anew."""
        return [(value.data_ptr(), value.stride()) for value in self.method.state_dict().values()]

    def sample_logits(self, x: Any) -> Tensor:
        """Return logits (S, N, L)."""
        rows = as_tensor(x, "x")
        self.method.seen.check(rows, "x")
        if rows.shape[1:] != self.input.shape[1:]:
            wanted = tuple(self.input.shape[1:])
            raise StfsebError(f"x has rows of shape {tuple(rows.shape[1:])}, the example had {wanted}: give that shape")
        if self.graph is not None and self._places() != self.captured:
            self._capture()
        parts = []
        for part in rows.split(self.batch_size):
            self.input[: len(part)] = scaled(part, self.method.like)
            if self.graph is None:
                logits = self._pass()
            else:
                self.graph.replay()
                logits = self.logits
            parts.append(logits[:, : len(part)].clone())
        return torch.cat(parts, dim=1)

    def predict_proba(self, x: Any) -> Tensor:
        """Return the Monte Carlo average of the predictive probabilities, (N, L)."""
        method = self.method
        return method._prediction(tempered(method.calibration, method.likelihood, self.sample_logits(x)))
