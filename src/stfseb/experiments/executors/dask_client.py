"""Reaching a Dask scheduler: a wrong address is said at once, silence at the other end after a while, in one line."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from stfseb.errors import StfsebError

PATIENCE = 15.0  # seconds for a scheduler's first answer
_REMEDY = "give that of a scheduler, --address tcp://HOST:8786"


def dask_modules() -> tuple[Any, Any]:
    """Return dask and distributed, or say that they are an extra."""
    try:
        import dask
        import distributed
    except ImportError as error:
        raise StfsebError("--executor dask needs Dask: pip install 'stfseb[dask]'") from error
    return dask, distributed


def check_address(address: str) -> None:
    """Raise where no scheduler can have such an address; nobody is asked."""
    dask_modules()
    from distributed.comm.addressing import get_address_host_port

    try:
        host, port = get_address_host_port(address)
    except ValueError as error:
        if isinstance(error.__context__, NotImplementedError):
            return  # of a kind without ports: inproc, ucx
        raise StfsebError(f"--address {address} cannot be used ({error}): {_REMEDY}") from error
    if not host or not 0 < port < 1 << 16:
        wrong = f"port {port} is not from 1 to 65535" if host else "the host is missing"
        raise StfsebError(f"--address {address} cannot be used ({wrong}): {_REMEDY}")


def connect(target: Any) -> Any:
    """Return a client of the scheduler at an address, or of a cluster on this machine."""
    _, distributed = dask_modules()
    try:
        if isinstance(target, str):
            _listen(target)
        return _client(distributed, target)
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # a TimeoutError is an OSError
        why = str(error) or f"no answer within {PATIENCE:g} s"
        raise StfsebError(f"no Dask scheduler answers at {target} ({why}): is it running?") from error


def leave(client: Any) -> None:
    """Close a client, whether or not its scheduler is still there."""
    with suppress(Exception):
        client.close(timeout=2)


def _client(distributed: Any, target: Any) -> Any:
    """Make a client; one that fails is closed here, as its own end would wait 30 s and print a traceback."""
    client = distributed.Client.__new__(distributed.Client)
    try:
        client.__init__(target, set_as_default=False, timeout=PATIENCE)
    except BaseException:
        leave(client)
        raise
    return client


def _listen(address: str) -> None:
    """Raise where nobody at an address speaks as a scheduler does: a Client waits for its first word for ever."""
    dask, distributed = dask_modules()
    if dask.config.get("distributed.client.security-loader", None):
        return  # only a Client knows how to introduce itself

    async def first_words() -> None:
        known = distributed.Security().get_connection_args("client")
        connecting = distributed.comm.connect(address, timeout=PATIENCE, **known)
        (await asyncio.wait_for(connecting, PATIENCE)).abort()

    distributed.utils.LoopRunner(asynchronous=False).run_sync(first_words)
