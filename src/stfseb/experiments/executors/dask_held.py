"""The claims of runs that a cluster has, and what its workers say of them: who began which, and who was lost.

Workers tell by events of the scheduler, so that `stfseb status` need not take the time in the queue for training.
Nothing depends on an event's arrival.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.experiments.claims import Claim

QUEUED, BEGUN = "queued", "begun"  # what a claim says of its run, under "state"
_OF_ALL = "all"  # the scheduler's own topic


class Held:
    """Claims by the names of their runs. Events arrive in the client's thread, all else in the driver's."""

    def __init__(self, lost: Callable[[str, str], None]) -> None:
        self.lost = lost  # is told a run and how its worker was lost
        self.claims: dict[str, Claim] = {}
        self.at: dict[str, dict[str, Any]] = {}  # by run: the worker that began it
        self.guard = threading.Lock()  # a released claim's handle may be another file's by now

    def listen(self, client: Any, topic: str) -> None:
        """Hear what workers begin, and which are lost."""
        client.subscribe_topic(topic, self._began)
        client.subscribe_topic(_OF_ALL, self._removed)

    def take(self, name: str, claim: Claim) -> None:
        """Keep a run's claim until it is released."""
        with self.guard:
            self.claims[name] = claim

    def release(self, name: str) -> None:
        """Give up a run's claim."""
        with self.guard:
            self.at.pop(name, None)
            self.claims.pop(name).release()

    def release_all(self) -> None:
        """Give up the claims of runs that are not done."""
        for name in list(self.claims):
            self.release(name)

    def _began(self, event: tuple[float, dict[str, Any]]) -> None:
        said = dict(event[1])
        name = str(said.pop("run", ""))
        with self.guard:
            if name in self.claims:
                self.at[name] = said
                self.claims[name].say(**said, state=BEGUN, since=round(time.time(), 1))

    def _removed(self, event: tuple[float, dict[str, Any]]) -> None:
        if event[1].get("action") != "remove-worker":
            return
        with self.guard:
            gone = [name for name, said in self.at.items() if said.get("worker") == event[1].get("worker")]
            for name in gone:
                self.claims[name].say(state=QUEUED)
                del self.at[name]
        for name in gone:
            self.lost(name, f"its Dask worker, {event[1]['worker']}, was lost")


def tell_begun(topic: str, run: str, process: int, checkpoint: str) -> None:
    """Tell the driver, from within a task, that a run is begun."""
    import socket

    from distributed import get_worker

    with suppress(Exception):  # it is only news
        worker = get_worker()
        about = {"host": socket.gethostname(), "worker": worker.address, "process": process}
        worker.log_event(topic, {**about, "run": run, "checkpoint": checkpoint})
