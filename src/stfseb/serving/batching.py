"""Requests that arrive together go through the network together.

One worker takes what waits, up to `most` rows, and waits `wait` seconds for company when it found less. While the
network runs, the next requests gather by themselves, so that under load batches are full and nobody waits in vain.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class BusyError(Exception):
    """More rows wait than the service takes on."""


@dataclass
class _Request:
    rows: Tensor
    answer: asyncio.Future[list[Any]]


class Batcher:
    """Runs `function` (rows -> one result a row) on gathered requests, in one thread of its own.

    Args:
        function: from rows (N, ...) to N results, which must not depend on the other rows.
        most: rows in one call.
        wait: seconds to wait for company.
        capacity: rows that may wait before requests are turned away.
        observe: called with the number of rows of each batch.
    """

    def __init__(
        self,
        function: Callable[[Tensor], list[Any]],
        most: int = 64,
        wait: float = 0.003,
        capacity: int = 1024,
        observe: Callable[[int], None] | None = None,
    ) -> None:
        self.function, self.most, self.wait, self.capacity = function, most, wait, capacity
        self.observe = observe or (lambda _: None)
        self.waiting = 0
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._held: _Request | None = None
        self._pool = ThreadPoolExecutor(1, "stfseb-model")
        self._worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker in the running event loop."""
        self._worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop the worker; requests that still wait are cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait().answer.cancel()
        self._pool.shutdown(wait=True)

    async def submit(self, rows: Tensor) -> list[Any]:
        """Return the results of these rows; raise `BusyError` where too many wait already."""
        count = len(rows)
        if self.waiting + count > self.capacity:
            raise BusyError
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self.waiting += count
        try:
            self._queue.put_nowait(request)
            return await request.answer
        finally:
            self.waiting -= count

    async def _gather(self) -> list[_Request]:
        """Return the requests of the next batch: at least one, and more while they fit and time is left."""
        first = self._held or await self._queue.get()
        self._held = None
        batch, rows = [first], len(first.rows)
        deadline = asyncio.get_running_loop().time() + self.wait
        while rows < self.most:
            try:
                if not self._queue.empty():
                    request = self._queue.get_nowait()
                else:
                    async with asyncio.timeout_at(deadline):
                        request = await self._queue.get()
            except TimeoutError:
                break
            if rows + len(request.rows) > self.most:
                self._held = request
                break
            batch.append(request)
            rows += len(request.rows)
        return batch

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Whoever has given up (a timeout, a closed connection) is not computed for.
            batch = [request for request in await self._gather() if not request.answer.done()]
            if not batch:
                continue
            try:
                results = await loop.run_in_executor(
                    self._pool, self.function, torch.cat([request.rows for request in batch])
                )
            except Exception as error:  # the worker must outlive a batch that failed
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            self.observe(len(results))
            start = 0
            for request in batch:
                if not request.answer.done():
                    request.answer.set_result(results[start : start + len(request.rows)])
                start += len(request.rows)
