"""A convolution with weights of its own for every sample: the ways to compute it, forward and backward, microseconds.

    python benchmarks/convolutions.py [--only streams,ours] [--out convolutions.json]

Ten samples of 128 rows in bf16 for the 3x3 layers of both networks that have 32 channels or more; the mean of 30
replays of one captured graph. The ways: one grouped convolution, channels first (`nchw`) or last (`nhwc`); one
convolution a sample on five streams (`streams`); patches and batched products, compiled (`im2col`); and the library's
`stacked_conv` (`ours`). Without a card everything is cut down and timed eagerly in float32, so that it can be tried.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.experiments.machine import origin, script_command
from stfseb.networks.stacked_conv import stacked_conv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# side, inputs, outputs
LAYERS = {
    "mnist2": (14, 32, 64),
    "cifar2": (32, 32, 32),
    "cifar3": (16, 32, 64),
    "cifar4": (16, 64, 64),
    "cifar5": (8, 64, 128),
    "cifar6": (8, 128, 128),
}
REPLAYS, STREAMS = 30, 5
LAST = torch.channels_last


class Part(NamedTuple):
    """A forward pass and what it is differentiated by; parts may run at once."""

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, Tensor]


def grouped(x: Tensor, weight: Tensor, layout: torch.memory_format) -> list[Part]:
    """One convolution with a group for each sample; its channels are those of all samples."""
    samples, rows, side, _, channels = x.shape
    one = x.permute(1, 0, 4, 2, 3).reshape(rows, samples * channels, side, side)
    one = one.contiguous(memory_format=layout).requires_grad_()
    kernels = weight.flatten(0, 1).contiguous(memory_format=layout).requires_grad_()
    return [Part(lambda: F.conv2d(one, kernels, padding=1, groups=samples), (one, kernels))]


def streams(x: Tensor, weight: Tensor) -> list[Part]:
    """One convolution a sample."""
    rows = [part.permute(0, 3, 1, 2).detach().requires_grad_() for part in x]  # lies channels last already
    kernels = [part.contiguous(memory_format=LAST).requires_grad_() for part in weight]
    return [Part(lambda r=r, k=k: F.conv2d(r, k, padding=1), (r, k)) for r, k in zip(rows, kernels, strict=True)]


def im2col(x: Tensor, weight: Tensor) -> list[Part]:
    """Patches times weights, all samples in one batched product."""
    x = x.clone().requires_grad_()
    samples, outputs = weight.shape[:2]
    matrix = weight.permute(0, 3, 4, 2, 1).reshape(samples, -1, outputs).contiguous().requires_grad_()

    def product(x: Tensor, matrix: Tensor) -> Tensor:
        padded, side = F.pad(x, (0, 0, 1, 1, 1, 1)), x.shape[2]
        patches = [padded[:, :, i : i + side, j : j + side] for i in range(3) for j in range(3)]
        return torch.cat(patches, -1).flatten(1, 3) @ matrix

    run = torch.compile(product, dynamic=False) if x.device.type == "cuda" else product
    return [Part(lambda: run(x, matrix), (x, matrix))]


def ours(x: Tensor, weight: Tensor) -> list[Part]:
    """The library's `stacked_conv`."""
    x = x.clone().requires_grad_()
    kernels = weight.permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous().requires_grad_()
    return [Part(lambda: stacked_conv(x, kernels, 3, 3), (x, kernels))]


WAYS: dict[str, Callable[[Tensor, Tensor], list[Part]]] = {
    "nchw": lambda x, weight: grouped(x, weight, torch.contiguous_format),
    "nhwc": lambda x, weight: grouped(x, weight, LAST),
    "streams": streams,
    "im2col": im2col,
    "ours": ours,
}


def microseconds(parts: list[Part], device: torch.device) -> float:
    """Return the time of a forward and a backward pass of all parts."""
    slopes = [torch.randn_like(part.forward()) for part in parts]

    def both(number: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(parts[number].forward(), parts[number].inputs, slopes[number])

    if device.type == "cuda":
        return _replayed(both, len(parts))
    for number in range(len(parts)):
        both(number)
    started = time.perf_counter()
    for number in range(len(parts)):
        both(number)
    return (time.perf_counter() - started) * 1e6


def _replayed(both: Callable[[int], tuple[Tensor, ...]], count: int) -> float:
    """Capture all parts in one graph, several of them on a few streams, and return the mean time of a replay."""
    places = [torch.cuda.Stream() for _ in range(min(STREAMS, count))]

    def everything() -> list[Any]:
        now = torch.cuda.current_stream()
        kept = []
        for first, place in enumerate(places):
            place.wait_stream(now)
            with torch.cuda.stream(place):
                kept += [both(number) for number in range(first, count, len(places))]
        for place in places:
            now.wait_stream(place)
        return kept

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            everything()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = everything()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    del kept
    return start.elapsed_time(end) / REPLAYS * 1000


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WAYS), help="of these ways, with commas")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args(words)
    wanted = args.only.split(",")
    for way in wanted:
        if way not in WAYS:
            parser.error(f"unknown way '{way}': known are {', '.join(WAYS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samples, rows = (10, 128) if device.type == "cuda" else (2, 4)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for layer, (side, channels, outputs) in LAYERS.items():
        torch.manual_seed(0)
        x = torch.randn(samples, rows, side, side, channels, device=device, dtype=dtype)
        weight = torch.randn(samples, outputs, channels, 3, 3, device=device, dtype=dtype) / 10
        for way in wanted:
            row: dict[str, Any] = {"layer": layer, "way": way, "samples": samples, "rows": rows}
            try:
                row["microseconds"] = microseconds(WAYS[way](x, weight), device)
            except RuntimeError as error:  # such as a card without the memory, or a build without Triton
                row["error"] = str(error).splitlines()[0]
            found.append(row)
            print(json.dumps(row), flush=True)
    if args.out is not None:
        made = origin(device, script_command("convolutions", vars(args)))
        args.out.write_text(json.dumps(made | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
