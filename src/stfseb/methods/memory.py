"""How much memory is free, so that a step that cannot fit is refused with a number and not by a crash."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on `device`, or None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [value for value in (_meminfo(), _control_group()) if value is not None]
    return min(known) if known else None


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _control_group() -> int | None:
    """Return what a container's limit leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
