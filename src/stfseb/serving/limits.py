"""What a client may send, how often, and how long it may take: middleware below the application."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLIENTS = 10_000  # remembered at a time; the longest silent one is forgotten first


class RateLimiter:
    """A bucket of tokens for each client: `rate` a second, at most `burst` at once; 0 is no limit."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self.rate = rate
        self.burst = max(1.0, 2 * rate if burst is None else burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, client: str, now: float | None = None) -> bool:
        """Take a token of this client's, if there is one."""
        if self.rate <= 0:
            return True
        now = time.monotonic() if now is None else now
        tokens, then = self._buckets.pop(client, (self.burst, now))
        tokens = min(self.burst, tokens + (now - then) * self.rate)
        allowed = tokens >= 1.0
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return allowed


class _RefusedError(Exception):
    """The request was broken off; the guard answers it."""


class Guard:
    """Refuses requests that are too large, too frequent or too slow to arrive, before anything reads them."""

    def __init__(
        self, app: ASGIApp, limiter: RateLimiter, most_bytes: int, seconds: float, count: Callable[[str, int], None]
    ) -> None:
        self.app, self.limiter, self.most_bytes, self.seconds, self.count = app, limiter, most_bytes, seconds, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within its limits, or answer 408, 413 or 429; count every answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(scope["path"], message["status"])
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            await send(message)

        await self._guarded(scope, receive, counted)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") or ("unknown", 0)
        if scope["path"].startswith("/predict") and not self.limiter.allow(client[0]):
            await refuse(send, 429, "too many requests: wait a second", retry="1")
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.most_bytes:
            await refuse(send, 413, f"the request is larger than the {self.most_bytes:,} bytes that are taken")
            return
        deadline = asyncio.get_running_loop().time() + self.seconds
        read, begun, complete = 0, False, False
        problem: tuple[int, str] | None = None

        async def bounded() -> Message:
            nonlocal read, complete, problem
            if complete:  # the body is there: what may come now is only that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                problem = (408, f"the request did not arrive within {self.seconds:g} seconds")
                raise _RefusedError from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            if read > self.most_bytes:
                problem = (413, f"the request is larger than the {self.most_bytes:,} bytes that are taken")
                raise _RefusedError
            return message

        async def noting(message: Message) -> None:
            nonlocal begun
            if problem is not None and not begun:
                return  # whatever the application made of the broken-off request
            begun = True
            await send(message)

        with suppress(_RefusedError):
            await self.app(scope, bounded, noting)
        if problem is not None and not begun:
            await refuse(send, *problem)


async def refuse(send: Send, status: int, detail: str, retry: str | None = None) -> None:
    """Answer with an error and close the connection, because the rest of the request was not read."""
    body = json.dumps({"detail": detail}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if retry is not None:
        headers.append((b"retry-after", retry.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
