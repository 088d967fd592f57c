"""A process that does runs for another one: requests come as lines of JSON, reports go back the same way.

`python -m stfseb.experiments.executors.child` is started by `WorkerProcess`. When the other end is closed, because
the driver has finished or was killed, the process ends at once, and with it its claims.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> None:
    """Do what is asked on standard input until it ends."""
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as replies:
        os.dup2(2, 1)  # whatever prints must not get among the replies
        asked: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_listen, args=(asked,), daemon=True).start()
        work = _Work()
        while True:
            try:
                for reply in work.do(json.loads(asked.get())):
                    replies.write(json.dumps(reply) + "\n")
            except _interrupted():
                return  # the run has saved itself; whoever asked to stop knows the rest
            replies.write(json.dumps({"state": "end"}) + "\n")


def _interrupted() -> type[Exception]:
    from stfseb.training.interrupts import Interrupted

    return Interrupted


def _listen(asked: queue.Queue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # nobody is there any more to take a result


class _Work:
    def __init__(self) -> None:
        self.place: Any = None

    def do(self, request: dict[str, Any]) -> Any:
        import torch

        from stfseb.experiments.executors.plan import planned
        from stfseb.experiments.executors.work import Workplace
        from stfseb.experiments.jobs import Job
        from stfseb.experiments.run import default_device

        if request["threads"]:
            torch.set_num_threads(request["threads"])
        folder = request["data_folder"]
        device = request["device"] or default_device()
        if self.place is None or self.place.device != device:
            self.place = Workplace(device, None if folder is None else Path(folder))
        self.place.width, self.place.forgiven = request["width"], request["forgiven"]
        self.place.beside = request["beside"]
        jobs = planned([Job(**job) for job in request["jobs"]], Path(request["results"]), request["parts"])
        for report in self.place.do(jobs):
            yield asdict(report)


if __name__ == "__main__":
    main()
