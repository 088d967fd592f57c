"""The claims of runs that a cluster has, and what its workers say of them: who began which, and who was lost.

Workers tell by events of the scheduler, so that `stfseb status` need not take the time in the queue for training.
Nothing depends on an event's arrival.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.experiments.claims import Claim

Event = tuple[float, dict[str, Any]]  # when, by the scheduler's clock, and what
QUEUED, BEGUN = "queued", "begun"  # what a claim says of its run, under "state"


class Held:
    """Claims by the names of their runs. Events arrive in the client's thread, all else in the driver's."""

    def __init__(self, lost: Callable[[str, str], None]) -> None:
        self.lost = lost  # is told a run and how its worker was lost
        self.claims: dict[str, Claim] = {}
        self.at: dict[str, dict[str, Any]] = {}  # by run: the worker that began it
        self.guard = threading.Lock()  # a released claim's handle may be another file's by now
        self.heard: set[str] = set()  # topics

    def listen(self, client: Any, topic: str) -> None:
        """Hear what workers begin; of those that have begun something, whether they are lost."""
        self.client = client
        self._hear(topic, self._began)

    def leave(self) -> None:
        """Give up the claims of runs that are not done, and hear no more: the scheduler goes on telling the dead."""
        for name in list(self.claims):
            self.release(name)
        for topic in list(self.heard):
            with suppress(Exception):  # the scheduler may be gone
                self.client.unsubscribe_topic(topic)

    def take(self, name: str, claim: Claim) -> None:
        """Keep a run's claim until it is released."""
        with self.guard:
            self.claims[name] = claim

    def release(self, name: str) -> None:
        """Give up a run's claim."""
        with self.guard:
            self.at.pop(name, None)
            self.claims.pop(name).release()

    def _hear(self, topic: str, handler: Callable[[Event], None]) -> None:
        if topic not in self.heard:
            self.heard.add(topic)
            self.client.subscribe_topic(topic, handler)

    def _began(self, event: Event) -> None:
        said = dict(event[1])
        name = str(said.pop("run", ""))
        with self.guard:
            if name in self.claims:
                self.at[name] = said
                self.claims[name].say(**said, state=BEGUN, since=round(time.time(), 1))
        worker = str(said["worker"])
        self._hear(worker, partial(self._removed, worker))  # the scheduler's own topic of this worker

    def _removed(self, worker: str, event: Event) -> None:
        if event[1].get("action") != "remove-worker":
            return
        with self.guard:
            gone = [name for name, said in self.at.items() if said["worker"] == worker]
            for name in gone:
                self.claims[name].say(state=QUEUED)
                del self.at[name]
        for name in gone:
            self.lost(name, f"its Dask worker, {worker}, was lost")


def tell_begun(topic: str, run: str, process: int, checkpoint: str) -> None:
    """Tell the driver, from within a task, that a run is begun."""
    import socket

    from distributed import get_worker

    with suppress(Exception):  # it is only news
        worker = get_worker()
        about = {"host": socket.gethostname(), "worker": worker.address, "process": process}
        worker.log_event(topic, {**about, "run": run, "checkpoint": checkpoint})
