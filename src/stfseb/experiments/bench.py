"""Seconds an epoch, peak memory and how close to the floor, every way against the naive one in the same run.

Images are random bytes of the data sets' shapes: speed does not depend on what they show. A row's `flops`, `bytes`,
`floor_seconds` and `times_floor` are of an epoch (see `floor`); `steps_timed` says of how many steps its time is the
median, or, on CUDA, how many the timed epochs had.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError, unknown
from stfseb.experiments.floor import floor_seconds, rates, step_count
from stfseb.experiments.machine import PeakMemory, origin
from stfseb.experiments.naive import METHODS, NaiveTraining
from stfseb.inputs import scaled
from stfseb.methods.registry import key_of, method_class
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import make_engine, make_optimiser
from stfseb.training.loop import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stfseb.methods.base import Method
    from stfseb.training.batches import Batch


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
WAYS: dict[str, tuple[str, bool | None, bool | None]] = {
    "fit": ("auto", None, None),  # what `fit` chooses for a run of its default length; a row's `engine` says what
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
    shape = SHAPES[_known("task", task, SHAPES)]
    if sizes.batch_size > shape.images:
        raise StfsebError(f"batch_size={sizes.batch_size} exceeds the {shape.images} images: lower it")
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
        settings |= {"kernel_steps": 5, "cache": False}  # the fit of its kernel is not part of an epoch
    method = cls(net, **settings).to(device)
    return method, x, y


def measure(
    task: str,
    method_name: str,
    way: str,
    sizes: Sizes = Sizes(),  # frozen
    *,
    device: str = "cpu",
    seconds: float = 5.0,
    epochs: int = 3,
) -> dict[str, Any]:
    """Time one way of training; on CUDA whole epochs, else as many steps as fit in `seconds`."""
    key, place = _key(method_name), torch.device(device)
    _check_way(way, device)
    method, x, y = make(task, key, sizes, place)
    method.prepare(x[:1024], y[:1024])
    steps = len(x) / sizes.batch_size
    row: dict[str, Any] = {"task": task, "method": key, "way": way, **sizes.__dict__}
    augment = _augment(task)
    if way == "naive":
        naive = NaiveTraining(method, x, y, sizes.batch_size, augment=augment)
        with PeakMemory(place) as memory:
            per_step, timed = _time_steps(naive.step, place, seconds)
        row |= {"seconds_per_epoch": per_step * steps, "steps_timed": timed, "engine": "naive, float32"}
    else:
        precision, capture, compiled = WAYS[way]
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
                capture=capture,
                compiled=compiled,
                epochs=Protocol.epochs,
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
                per_epoch, timed = statistics.median(times[1:]), epochs * math.ceil(steps)
            else:
                stream = _full_batches(batches)
                eager: Any = engine

                def step() -> None:
                    eager.step(*next(stream))
                    optimiser.step()

                per_step, timed = _time_steps(step, place, seconds)
                per_epoch = per_step * steps
        row |= {"seconds_per_epoch": per_epoch, "steps_timed": timed, "engine": engine.description}
    row["steps_per_second"] = steps / row["seconds_per_epoch"]
    row["peak_memory_mb"] = memory.megabytes
    return row


def against_floor(row: dict[str, Any], measured: dict[str, float]) -> dict[str, Any]:
    """Return what an epoch of a measured row needs at least, and how many times that it took."""
    sizes = Sizes(**{name: row[name] for name in Sizes.__dataclass_fields__})
    method, x, _ = make(row["task"], row["method"], sizes, torch.device("cpu"))
    step = step_count(method, scaled(x[: sizes.batch_size], method.like))
    if step is None:
        return {"floor_why_not": f"the step of {row['method']} has not been counted"}
    epoch = step * (len(x) / sizes.batch_size)
    least = floor_seconds(epoch, measured)
    return {
        "flops": epoch.flops,
        "bytes": epoch.bytes,
        "floor_seconds": least,
        "times_floor": row["seconds_per_epoch"] / least,
    }


_TOGETHER = 10  # steps timed at once on CUDA

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
    """Measure every combination; one that fails is reported with its error, not left out.

    How the cost grows (`grow`) is measured on the first method, trained as `fit` would.
    """
    place = torch.device(device)
    tasks = [_known("task", task, SHAPES) for task in tasks]
    methods = [_key(name) for name in methods]
    for way in ways:
        _check_way(way, device)
    plan: list[tuple[str, str, str, Sizes]] = [(t, m, w, Sizes()) for t in tasks for m in methods for w in ways]
    if grow:
        grown = [
            (task, methods[0], "fit", replace(Sizes(), **{name: value}))
            for task in tasks
            for name, values in GROWTH.items()
            for value in values
        ]
        plan += [case for case in dict.fromkeys(grown) if case not in plan]
    measured = rates(place)
    rows: list[dict[str, Any]] = []
    for task, method, way, sizes in plan:
        try:
            row = measure(task, method, way, sizes, device=device, seconds=seconds)
            row |= against_floor(row, measured)
        except (torch.OutOfMemoryError, RuntimeError, StfsebError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
            row = {"task": task, "method": method, "way": way, **sizes.__dict__, "error": said}
        rows.append(row)
        figure = row.get("seconds_per_epoch")
        told = f"failed: {row['error']}" if figure is None else _told(row)
        announce(f"{task} {method} {way}, {_words(sizes)}: {told}")
        if place.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    return origin(place, _command(tasks, methods, ways, device, grow, seconds)) | {"rates": measured, "rows": rows}


def _command(tasks: list[str], methods: list[str], ways: list[str], device: str, grow: bool, seconds: float) -> str:
    """Return the command that measures the same again, defaults written out."""
    lists = f"--tasks {','.join(tasks)} --methods {','.join(methods)} --ways {','.join(ways)}"
    return f"stfseb bench {lists} --device {device} --seconds {seconds:g}" + " --grow" * grow


def _told(row: dict[str, Any]) -> str:
    floor = f", {row['times_floor']:.1f} times its floor" if "times_floor" in row else ""
    return f"{row['seconds_per_epoch']:.3f} s an epoch ({row['engine']}; {row['steps_timed']} steps timed{floor})"


def _key(name: str) -> str:
    """Return the key of a method that has steps of its own: an ensemble has its members'."""
    try:
        key = key_of(name)
    except StfsebError:
        raise unknown("method", name, METHODS) from None
    return _known("method", key, METHODS)


def _check_way(way: str, device: str) -> None:
    """Raise for a way that is not known, or not to be had on the device."""
    _known("way", way, ("naive", *WAYS))
    if way != "naive" and WAYS[way][1] and not device.startswith("cuda"):
        raise StfsebError(f"way '{way}' needs a CUDA card and the device is {device}: take naive, eager or fit")


def _known(kind: str, name: str, known: Any) -> str:
    if name not in known:
        raise unknown(kind, name, known)
    return name


def _full_batches(batches: ResidentBatches) -> Iterator[Batch]:
    """Yield the minibatches of one epoch after another, but for smaller last ones, whose steps take less."""
    for number in itertools.count(1):
        for x, y in batches.epoch(number):
            if len(x) == batches.batch_size:
                yield x, y


def _words(sizes: Sizes) -> str:
    return f"S={sizes.samples} B={sizes.batch_size} N_c={sizes.num_context} L={sizes.classes}"


def default_ways(device: str) -> list[str]:
    """Return the ways worth comparing on a device."""
    return (
        ["naive", "eager", "graph-bf16", "compiled-bf16"]
        if device.startswith("cuda")
        else ["naive", "eager", "eager-bf16"]
    )


def _time_steps(step: Callable[[], None], device: torch.device, seconds: float) -> tuple[float, int]:
    """Return the median time of a step, after two that warm up, and of how many (three at least).

    On CUDA steps are timed ten at a time: waiting for each would keep the host from running ahead of the card, which
    no training loop does.
    """
    together = _TOGETHER if device.type == "cuda" else 1
    for _ in range(2):
        step()
    _wait(device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        for _ in range(together):
            step()
        _wait(device)
        times.append((time.perf_counter() - started) / together)
    return statistics.median(times), together * len(times)


def _augment(task: str) -> Any:
    if not SHAPES[task].augment:
        return None
    from stfseb.data.augmentation import flip_and_crop

    return flip_and_crop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
