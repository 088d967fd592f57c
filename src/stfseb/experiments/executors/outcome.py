"""What became of a list of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What became of the jobs, by name; each is in exactly one of the four."""

    done: list[str] = field(default_factory=list)  # ran now, or had only their parts measured now
    skipped: list[str] = field(default_factory=list)  # were there already
    failed: dict[str, str] = field(default_factory=dict)  # with the last error in a line, earlier ones included
    elsewhere: list[str] = field(default_factory=list)  # done meanwhile by another process
    measured: list[str] = field(default_factory=list)  # of those done: trained before, and measured now
    before: list[str] = field(default_factory=list)  # of those failed: not tried now
    seconds: float = 0.0
    driver_cpu_seconds: float = 0.0  # of this process, the runs themselves not counted

    @property
    def complete(self) -> bool:
        """Whether every job has its results."""
        return not self.failed
