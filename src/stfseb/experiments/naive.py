"""The naive way: what a first implementation does, as the yardstick of every speed claim.

Eager float32, a DataLoader, a Python loop over the Monte Carlo samples, and for the function prior the
extractor and the Cholesky factorisation anew in every step.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stfseb.function_prior import FunctionPrior
from stfseb.inputs import scaled
from stfseb.networks.precision import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stfseb.methods.base import Method

DROPOUT = ("stfseb", "mcdropout")


class NaiveTraining:
    """Training steps of a method done the naive way; `step()` makes one."""

    def __init__(self, method: Method, x: Tensor, y: Tensor, batch_size: int, *, augment: Any = None) -> None:
        self.method, self.num_data, self.batch_size, self.augment = method, len(x), batch_size, augment
        self.device = method.like.device
        self.loader = DataLoader(
            TensorDataset(x.float() / 255.0, y), batch_size=batch_size, shuffle=True, drop_last=True
        )
        self.optimiser = torch.optim.Adam([p for p in method.parameters() if p.requires_grad], lr=5e-4)
        self.samples = method.samples
        self.batches = self._forever()
        if method.key == "stfseb":
            self.extractor = copy.deepcopy(method.net).eval()[:-1]  # type: ignore[index]

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def step(self) -> None:
        """Make one step: a pass and a backward pass through a sum over samples."""
        x, y = next(self.batches)
        x, y = x.to(self.device), y.to(self.device)
        if self.augment is not None:
            x = self.augment(x)
        with running("float32", self.device):
            total = self._dropout(x, y) if self.method.key in DROPOUT else self._generic(x, y)
            self.optimiser.zero_grad()
            (total / self.batch_size).backward()
        self.optimiser.step()

    def _dropout(self, x: Tensor, y: Tensor) -> Tensor:
        method, net = self.method, self.method.net.train()
        settings: Any = method.settings
        rows, prior = x, None
        if method.key == "stfseb":
            assert method.context is not None
            assert method.context.images is not None
            chosen = torch.randperm(len(method.context.images))[: settings.num_context]
            context = scaled(method.context.images[chosen.to(method.context.images.device)], x)
            with torch.no_grad():
                features = self.extractor(context)
            prior = FunctionPrior(features, settings.tau1, settings.tau2, settings.nu_function)
            rows = torch.cat([x, context])
        total = x.new_zeros(())
        for _ in range(self.samples):
            logits = net(rows)
            total = total + F.cross_entropy(logits[: len(x)], y, reduction="sum") / self.samples
            if prior is not None:
                total = total + prior.penalty(logits[len(x) :]) / self.samples
        dof = settings.nu_weights if method.key == "stfseb" else math.inf
        for p in net.parameters():
            squares = (p / settings.sigma).square()
            energy = squares / 2 if math.isinf(dof) else (dof + 1) / 2 * torch.log1p(squares / dof)
            total = total + energy.sum() * (0.5 * len(x) / self.num_data)
        return total

    def _generic(self, x: Tensor, y: Tensor) -> Tensor:
        """Use the method's own objective, one sample at a time, nothing cached between steps."""
        method = self.method
        whole = method.settings
        if "samples" in method.settings_type.names():
            method.settings = method.settings_type.from_dict({**whole.as_dict(), "samples": 1})
        try:
            parts = [method.objective(x, y, self.num_data).total for _ in range(self.samples)]
        finally:
            method.settings = whole
        return torch.stack(parts).mean()
