"""Seconds an epoch, peak memory and how close to the floor, every way against the naive one in the same run.

Images are random bytes of the data sets' shapes: speed does not depend on what they show.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError, unknown
from stfseb.experiments.floor import count, floor_seconds, rates
from stfseb.experiments.machine import PeakMemory, machine
from stfseb.experiments.naive import NaiveTraining
from stfseb.methods.registry import key_of, method_class
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import make_engine, make_optimiser

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method


@dataclass(frozen=True)
class Shape:
    """The size of a task: what its speed depends on."""

    images: int
    channels: int
    side: int
    network: type[torch.nn.Module]
    dropout: float
    augment: bool


SHAPES = {
    "mnist": Shape(54_000, 1, 28, SmallCNN, 0.5, False),
    "cifar10": Shape(45_000, 3, 32, DeepCNN, 0.1, True),
}
# name: (precision, capture, compiled); "naive" is apart
WAYS: dict[str, tuple[str, bool, bool]] = {
    "eager": ("float32", False, False),
    "eager-bf16": ("bf16", False, False),
    "graph": ("float32", True, False),
    "graph-tf32": ("tf32", True, False),
    "graph-bf16": ("bf16", True, False),
    "compiled-tf32": ("tf32", True, True),
    "compiled-bf16": ("bf16", True, True),
}


@dataclass(frozen=True)
class Sizes:
    """What the cost grows with."""

    samples: int = 10
    batch_size: int = 128
    num_context: int = 32
    classes: int = 10


def make(task: str, key: str, sizes: Sizes, device: torch.device) -> tuple[Method, torch.Tensor, torch.Tensor]:
    """Return a method on the task's network, and random data of its shape."""
    if task not in SHAPES:
        raise unknown("shape", task, SHAPES)
    shape = SHAPES[task]
    torch.manual_seed(0)
    pixels = (shape.channels, shape.side, shape.side)
    x = torch.randint(256, (shape.images, *pixels), dtype=torch.uint8)
    y = torch.randint(sizes.classes, (shape.images,))
    net = shape.network(shape.channels, sizes.classes, shape.dropout, shape.side)
    cls = method_class(key)
    settings: dict[str, Any] = {}
    names = cls.settings_type.names()
    if "samples" in names:
        settings["samples"] = sizes.samples
    if "num_context" in names:
        settings["num_context"] = sizes.num_context
        settings["context"] = torch.randint(256, (10_000, *pixels), dtype=torch.uint8)
    if key == "gfsvi":
        settings["kernel_steps"] = 5  # the fit of its kernel is not part of an epoch
    method = cls(net, **settings).to(device)
    return method, x, y


def measure(
    task: str,
    method_name: str,
    way: str,
    sizes: Sizes = Sizes(),  # noqa: B008 - frozen
    *,
    device: str = "cpu",
    seconds: float = 5.0,
    epochs: int = 3,
) -> dict[str, Any]:
    """Time one way of training; on CUDA whole epochs, else as many steps as fit in `seconds`."""
    key, place = key_of(method_name), torch.device(device)
    method, x, y = make(task, key, sizes, place)
    steps = len(x) / sizes.batch_size
    row: dict[str, Any] = {"task": task, "method": key, "way": way, **sizes.__dict__}
    augment = _augment(task)
    if way == "naive":
        naive = NaiveTraining(method, x, y, sizes.batch_size, augment=augment)
        with PeakMemory(place) as memory:
            per_step = _time_steps(naive.step, place, seconds)
        row |= {"seconds_per_epoch": per_step * steps, "engine": "naive, float32"}
    else:
        if way not in WAYS:
            raise unknown("way", way, ("naive", *WAYS))
        precision, capture, compiled = WAYS[way]
        method.prepare(x[:1024], y[:1024])
        method.train()
        batches = ResidentBatches(x, y, sizes.batch_size, 0, place, augment)
        with PeakMemory(place) as memory:
            started = time.perf_counter()
            optimiser = make_optimiser(method, lr=5e-4)
            engine = make_engine(
                method,
                batches,
                optimiser,
                precision=precision,
                capture=capture and place.type == "cuda",
                compiled=compiled,
            )
            _wait(place)
            row["set_up_seconds"] = time.perf_counter() - started
            if place.type == "cuda":
                times = []
                for number in range(1, epochs + 2):
                    started = time.perf_counter()
                    engine.epoch(number, lambda _: None, lambda _: None)
                    _wait(place)
                    times.append(time.perf_counter() - started)
                per_epoch = statistics.median(times[1:])
            else:
                stream = batches.epoch(1)
                eager: Any = engine

                def step() -> None:
                    eager.step(*next(stream))
                    optimiser.step()

                per_epoch = _time_steps(step, place, seconds) * steps
        row |= {"seconds_per_epoch": per_epoch, "engine": engine.description}
    row["steps_per_second"] = steps / row["seconds_per_epoch"]
    row["peak_memory_mb"] = memory.megabytes
    return row


GROWTH: dict[str, tuple[int, ...]] = {
    "samples": (1, 5, 10, 20),
    "num_context": (32, 128, 512, 1024),
    "classes": (10, 100, 1000),
    "batch_size": (64, 128, 256, 512),
}


def bench(
    tasks: list[str],
    methods: list[str],
    ways: list[str],
    *,
    device: str,
    grow: bool = False,
    seconds: float = 5.0,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every combination; one that fails is reported with its error, not left out."""
    place = torch.device(device)
    plan: list[tuple[str, str, str, Sizes]] = [(t, m, w, Sizes()) for t in tasks for m in methods for w in ways]
    if grow:
        way = next(
            (w for w in ("graph-bf16", "eager") if w in WAYS and (place.type == "cuda" or w == "eager")), ways[0]
        )
        plan += [
            (task, methods[0], way, replace(Sizes(), **{name: value}))
            for task in tasks
            for name, values in GROWTH.items()
            for value in values
        ]
    measured = rates(place)
    rows: list[dict[str, Any]] = []
    for task, method, way, sizes in plan:
        try:
            row = measure(task, method, way, sizes, device=device, seconds=seconds)
            if measured is not None:
                row["floor_seconds"] = _floor(task, method, sizes, place, measured)
        except (torch.OutOfMemoryError, RuntimeError, StfsebError) as error:
            row = {"task": task, "method": method, "way": way, **sizes.__dict__, "error": str(error).splitlines()[0]}
        rows.append(row)
        figure = row.get("seconds_per_epoch")
        told = f"{figure:.3f} s an epoch ({row['engine']})" if figure else f"failed: {row['error']}"
        announce(f"{task} {method} {way}, {_words(sizes)}: {told}")
        if place.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    return {"machine": machine(place), "rates": measured, "rows": rows}


def _words(sizes: Sizes) -> str:
    return f"S={sizes.samples} B={sizes.batch_size} N_c={sizes.num_context} L={sizes.classes}"


def _floor(task: str, key: str, sizes: Sizes, place: torch.device, measured: dict[str, float]) -> float | None:
    if key not in ("stfseb", "mcdropout", "map"):
        return None  # their weight samples and Jacobians have no agreed minimum
    method, x, y = make(task, key, sizes, place)
    size = sizes.batch_size
    operations, moved = count(method, x[:size].to(place), y[:size].to(place))
    return floor_seconds(operations, moved, len(x) / size, measured)


def default_ways(device: str) -> list[str]:
    """Return the ways worth comparing on a device."""
    return (
        ["naive", "eager", "graph-bf16", "compiled-bf16"]
        if device.startswith("cuda")
        else ["naive", "eager", "eager-bf16"]
    )


def _time_steps(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Return the median time of a step, after two that warm up."""
    for _ in range(2):
        step()
    _wait(device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _augment(task: str) -> Any:
    if not SHAPES[task].augment:
        return None
    from stfseb.data.augmentation import flip_and_crop

    return flip_and_crop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
