"""Minibatches from what people have: tensors and arrays (on the device where they fit), a Dataset or a DataLoader.

The order of an epoch is a function of (seed, epoch) alone, so that a run can be resumed at any epoch.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, check_pixels
from stfseb.methods.context import generator

log = logging.getLogger("stfseb")

_OF_THEIR_ROWS = (SequentialSampler, SubsetRandomSampler, list, tuple, range)  # the same in every epoch
_ROOM = 0.7  # of a device's free memory that examples may take
Batch = tuple[Tensor, Tensor]
Augment = Callable[..., Tensor]


class Batches(Protocol):
    """An epoch at a time: `num_data` examples in minibatches of `batch_size`."""

    num_data: int
    batch_size: int

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the minibatches of one epoch."""
        ...

    def examples(self, count: int) -> Batch:
        """Return the first `count` examples, for checks and for `prepare`."""
        ...


class ResidentBatches:
    """All examples on the device in their own type; each epoch is one permutation."""

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, seed: int, device: torch.device, augment: Augment | None = None
    ) -> None:
        self.x, self.y = x.to(device), y.to(device)
        self.num_data, self.batch_size = len(x), min(batch_size, len(x))
        self.seed, self.augment = seed, augment
        self._takes_generator = augment is not None and "generator" in inspect.signature(augment).parameters

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the minibatches of one epoch; the last may be smaller."""
        for rows in self.order(number).split(self.batch_size):
            yield self.rows(rows)

    def order(self, number: int) -> Tensor:
        """Return the permutation of one epoch."""
        return torch.randperm(self.num_data, generator=generator(self.seed, 3, number)).to(self.x.device)

    def rows(self, rows: Tensor) -> Batch:
        """Return these rows as a minibatch, augmented."""
        return self.augmented(self.x[rows]), self.y[rows]

    def augmented(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the minibatch augmented, from `generator` where the augmentation takes one."""
        if self.augment is None:
            return x
        return self.augment(x, generator=generator) if self._takes_generator else self.augment(x)

    def examples(self, count: int) -> Batch:
        """Return the first `count` examples."""
        return self.x[:count], self.y[:count]


class HostBatches:
    """Examples that do not fit on the device: in the host's memory, in the order that resident ones would have.

    Steps are launched ahead of the device, so a minibatch is gathered while the device works on those before it.
    """

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, seed: int, device: torch.device, augment: Augment | None = None
    ) -> None:
        self.held = ResidentBatches(x, y, batch_size, seed, torch.device("cpu"))
        self.num_data, self.batch_size = self.held.num_data, self.held.batch_size
        self.device, self.augment = device, augment

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the minibatches of one epoch, moved to the device and augmented there."""
        for rows, y in self.held.epoch(number):
            x = sent(rows, self.device)
            yield (x if self.augment is None else self.augment(x)), sent(y, self.device)

    def examples(self, count: int) -> Batch:
        """Return the first `count` examples, where they are."""
        return self.held.examples(count)


class LoaderBatches:
    """A user's DataLoader, in its own order and batch size.

    Here too steps are launched ahead of the device: the next minibatch is read while the device works, by the loader's
    own workers where it has some.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, augment: Augment | None = None, what: str = "train"
    ) -> None:
        self.num_data = drawn_from(loader)
        if self.num_data == 0:
            raise StfsebError(f"{what} is empty: give at least one example")
        if loader.batch_size is None:
            raise StfsebError(
                "the DataLoader has batch_size=None or a batch_sampler, but the objective needs a batch size: give "
                "DataLoader(..., batch_size=..., sampler=...)"
            )
        self.loader, self.device, self.augment = loader, device, augment
        self.batch_size = loader.batch_size
        self.check: Callable[[Tensor], None] = lambda _: None  # of targets, while they are in the host's memory
        if self.steps > 1 and self.batch_size > self.num_data:  # rows again and again, more in a step than there are
            raise StfsebError(
                f"the DataLoader's batch_size={self.batch_size} is more than the {self.num_data} rows that its sampler "
                "draws from: lower it"
            )

    @property
    def steps(self) -> int:
        """Return how many minibatches an epoch has, as far as the loader says it."""
        with suppress(TypeError):  # a sampler without a length
            return len(self.loader)
        return -(-self.num_data // self.batch_size)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the loader's minibatches, moved to the device."""
        del number  # the loader's sampler draws from torch's default generator, which fit seeds
        for x, y in self._pairs():
            x = sent(x, self.device)
            yield (x if self.augment is None else self.augment(x)), sent(y, self.device)

    def examples(self, count: int) -> Batch:
        """Return the first `count` examples of an epoch."""
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        for x, y in self._pairs():
            xs.append(x)
            ys.append(y)
            if sum(map(len, xs)) >= count:
                break
        if not xs:
            raise StfsebError(
                f"the DataLoader gives no minibatch of its {self.num_data} examples: lower batch_size or drop_last"
            )
        return torch.cat(xs)[:count], torch.cat(ys)[:count]

    def _pairs(self) -> Iterator[Batch]:
        for batch in self.loader:
            if not isinstance(batch, Sequence) or len(batch) != 2:
                kinds = len(batch) if isinstance(batch, Sequence) else type(batch).__name__
                raise StfsebError(f"the DataLoader's minibatches must be pairs (x, y), not {kinds}")
            x, y = batch
            y = y if y.is_floating_point() else y.long()
            if y.device.type == "cpu":
                self.check(y)
            yield x, y


class SamplerWarning(UserWarning):
    """How many examples a loader's sampler draws from had to be guessed."""


def drawn_from(loader: DataLoader[Any]) -> int:
    """Return how many examples a loader's sampler draws from: the data set of the objective.

    Samplers that draw from all rows say so by their kind, however many they draw in an epoch; any other one's rows
    are as many as it has.
    """
    try:
        count = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise StfsebError(
            "the DataLoader's data set has no length: the objective needs it; give a map-style data set"
        ) from error
    sampler: Any = loader.sampler
    if isinstance(sampler, WeightedRandomSampler):
        return min(count, int((sampler.weights > 0).sum()))  # the others are never drawn
    if isinstance(sampler, RandomSampler) or hasattr(sampler, "num_replicas"):  # the latter, one process's share
        return count
    length = count
    with suppress(TypeError):  # a sampler without a length
        length = len(sampler) or count  # 0: one whose length is known once it has drawn
    if length < count and not isinstance(sampler, _OF_THEIR_ROWS):
        warnings.warn(
            f"{type(sampler).__name__} has {length} of the data set's {count} rows, taken for all that it draws from: "
            "if others come in other epochs, the prior is too strong; then use RandomSampler(data, num_samples=...)",
            SamplerWarning,
            stacklevel=5,
        )
    return min(count, length)


def sent(part: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, without waiting for what the device still has to do."""
    if device.type == "cuda" and part.device.type == "cpu":
        with suppress(RuntimeError):  # no such memory is left: the copy is the same, and the host waits for it
            part = part.pin_memory()  # torch keeps it until the copy is done
    return part.to(device, non_blocking=True)


def check_data(data: Any, what: str) -> None:
    """Raise for what is not data: names of folders above all."""
    if isinstance(data, str | PathLike):
        raise StfsebError(
            f"{what}={str(data)!r} is a name, not data: give (x, y), an image set, a Dataset or a DataLoader; folders "
            "of pictures are read by load_task('task.yaml').load() and by 'stfseb train'"
        )
    if isinstance(data, IterableDataset):
        raise StfsebError(f"{what} is an IterableDataset, which has no length: the objective needs it")
    if not (isinstance(data, Sequence | Dataset | DataLoader) or hasattr(data, "images")):
        raise StfsebError(f"{what} is a {type(data).__name__}: give (x, y), an image set, a Dataset or a DataLoader")


def as_pair(data: Any, what: str) -> Batch | None:
    """Return (x, y) tensors if `data` is tensors, arrays, an image set or a TensorDataset, else None."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if hasattr(data, "images") and hasattr(data, "labels"):
        data = (data.images, data.labels)
    if isinstance(data, Sequence) and not isinstance(data, str):
        if len(data) != 2 or data[1] is None or data[0] is None:
            raise StfsebError(f"{what} must be a pair (x, y), not {len(data)} things or one without labels")
        x, y = as_tensor(data[0], f"{what} x"), as_tensor(data[1], f"{what} y")
        if len(x) != len(y):
            raise StfsebError(f"{what} has {len(x)} examples but {len(y)} labels")
        check_pixels(x, f"{what} x")
        return x, y if y.is_floating_point() else y.long()
    return None


def make_batches(
    data: Any,
    batch_size: int,
    seed: int,
    device: torch.device,
    augment: Augment | None = None,
    what: str = "train",
) -> Batches:
    """Return the minibatches of `data`, resident where it is tensors that fit on the device, streamed otherwise."""
    check_data(data, what)
    pair = as_pair(data, what)
    if pair is not None:
        if fits(pair, device):
            return ResidentBatches(*pair, batch_size, seed, device, augment)
        log.warning("%s does not fit into the memory of %s: its minibatches are sent there one by one", what, device)
        return HostBatches(*pair, batch_size, seed, device, augment)
    if isinstance(data, DataLoader):
        return LoaderBatches(data, device, augment, what)
    if isinstance(data, Dataset):
        shuffle = hasattr(data, "__len__") and len(data) > 0  # else torch's sampler has an error of its own
        return LoaderBatches(DataLoader(data, batch_size, shuffle=shuffle), device, augment, what)
    raise StfsebError(f"{what} is a {type(data).__name__}: give (x, y), an image set, a Dataset or a DataLoader")


def fits(parts: Sequence[Tensor], device: torch.device) -> bool:
    """Tell whether a device has room for these examples and a share of its memory left to train with."""
    if device.type != "cuda":
        return True
    wanted = sum(part.numel() * part.element_size() for part in parts if part.device != device)
    free = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return wanted <= _ROOM * (free + unused)


def split_off(data: Any, fraction: float) -> tuple[Any, Any]:
    """Hold out a fraction for validation, the same rows whatever the run's seed (seed 0)."""
    check_data(data, "train")
    pair = as_pair(data, "train")
    if pair is None and not hasattr(data, "__len__"):
        raise StfsebError("train has no length, so that nothing can be held out of it: give validation=(x, y)")
    count = len(data) if pair is None else len(pair[0])
    held = max(1, round(count * fraction))
    if count - held < 1:
        found = "1 example" if count == 1 else f"{count} examples"
        raise StfsebError(f"train has {found}: too few to hold out {fraction:.0%}; give validation=(x, y)")
    order = torch.randperm(count, generator=generator(0, 5, 0))
    if pair is None:
        subset = torch.utils.data.Subset
        return subset(data, order[held:].tolist()), subset(data, order[:held].tolist())
    x, y = pair
    return (x[order[held:]], y[order[held:]]), (x[order[:held]], y[order[:held]])
