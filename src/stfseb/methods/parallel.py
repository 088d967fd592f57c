"""Processes that train one network together agree on what its prior looks at.

`DistributedDataParallel` gives all processes the first one's weights, but knows nothing of a context's seed and of its
frozen extractor, which are every process's own where their generators were seeded differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn


def processes() -> Any | None:
    """Return the group of the `DistributedDataParallel` whose forward pass this is, None outside of one.

    Not every process group trains one network: members of an ensemble, each with a process of its own, are to differ.
    And inside of such a pass all processes are sure to come by.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # No public name tells; without this one every process keeps its own.
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    group = getattr(active, "process_group", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # happens once
@torch.no_grad()
def agree(group: Any, numbers: list[int], module: nn.Module | None, device: torch.device) -> list[int]:
    """Return the first process's numbers, and fill the module (on `device`, as nccl wants it) with its weights."""
    source = dist.get_global_rank(group, 0)
    sent = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.broadcast(sent, source, group)
    for value in [] if module is None else [*module.parameters(), *module.buffers()]:
        if value.numel():
            flat = value.detach().contiguous().reshape(-1)
            dist.broadcast(flat.view(torch.uint8), source, group)  # bytes: backends do not know every type
            value.copy_(flat.view_as(value))
    found: list[int] = sent.tolist()
    return found
