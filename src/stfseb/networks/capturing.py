"""Capture of work on a card as a CUDA graph: alone in its memory, and without a trace where it fails."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_failed: list[torch.cuda.CUDAGraph] = []


def built_into(net: nn.Module) -> tuple[Any, ...]:
    """Return all of a network that a captured step has built in: what its modules are and hold besides their weights.

    Descriptions tell torch's layers apart (dropout rates, strides) but seldom other people's, whose `forward` may read
    any attribute. Tensors that are no buffers are compared as objects: no two networks share those.
    """
    found: list[Any] = [repr(net)]
    known = vars(torch.nn.Module())  # what every module has
    for name, module in net.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in known}
        said = sorted((key, str(id(v)) if isinstance(v, torch.Tensor) else repr(v)) for key, v in held.items())
        found.append((name, type(module).__module__, type(module).__qualname__, *said))
    return tuple(found)


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    stream: torch.cuda.Stream,
    *,
    generator: torch.Generator | None = None,
    pool: Any = None,
) -> Iterator[None]:
    """Capture a block into `graph`; what it draws from the default generator comes from `generator`.

    A graph reads seed and offset from memory of its generator, which runs at once would write for each other, and a
    capture that fails leaves its generator useless. So the default one is never captured.

    Args:
        graph: a new one.
        device: of all the work.
        stream: to capture on; graphs that may be replayed at once need one each.
        generator: stands in for the default one; by default a new one.
        pool: of another graph, whose memory may be used again where the two never run at once.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    place = torch.cuda.current_device() if device.index is None else device.index
    before = torch.cuda.current_stream(device)
    default = torch.cuda.default_generators[place]
    kept = default.graphsafe_get_state()
    default.graphsafe_set_state((generator or torch.Generator(device)).graphsafe_get_state())
    collecting = gc.isenabled()
    gc.disable()  # a graph that nobody needs any more cannot be destroyed while another is captured
    # A matrix product's workspace belongs to its stream, and whoever clears workspaces frees it: a graph that is
    # replayed later needs one in its own memory, which products take at their first call in the capture.
    _forget_workspaces()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        if _abandoned(place, pool):
            _failed.append(graph)  # the host's allocator goes on asking it whether an allocation is its own
        raise
    finally:
        if collecting:
            gc.enable()
        default.graphsafe_set_state(kept)
        torch.cuda.set_stream(before)  # torch stays on the capture's where its end fails
        _forget_workspaces()


def _forget_workspaces() -> None:
    """Have the next matrix products take a workspace of their own."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # no public name yet
    if clear is not None:
        clear()


def _abandoned(place: int, pool: Any) -> bool:
    """Do what torch leaves undone where a capture's end fails; False: it was the block alone that failed.

    Till its allocation has ended torch gives no cached memory back to the card, and may hand out the memory of the
    failed graph to later ones.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # no public names yet
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return True
    try:
        end(place, pool)
    except RuntimeError:  # of a pool that is not being allocated to
        return False
    release(place, pool)
    return True
