"""`stfseb serve`: a saved model behind HTTP."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from stfseb.errors import StfsebError


def serve(
    model: Annotated[Path, typer.Argument(help="A model folder that 'train' or 'compare' wrote.")],
    host: Annotated[str, typer.Option(help="The address to listen on; by default this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    samples: Annotated[int | None, typer.Option(min=1, help="Monte Carlo samples; by default the model's.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second and client; 0 is no limit.")] = 20.0,
    batch: Annotated[int, typer.Option(min=1, help="Images that go through the network together.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    network: Annotated[
        Path | None, typer.Option(help="The Python file of the model's network, where that is one of your own.")
    ] = None,
) -> None:
    """Serve a saved classifier over HTTP, with a page where a person drops an image."""
    try:
        import uvicorn

        from stfseb.serving.app import LOOPBACK, ServiceLimits, create_app
    except ImportError as error:
        raise StfsebError(f"{error.name} is not installed: pip install 'stfseb[serve]'") from error
    from stfseb.experiments.models import load_model
    from stfseb.experiments.run import usable_device

    method = load_model(model, network).to(usable_device(device))
    _check_address(host, port)
    local = host in LOOPBACK
    app = create_app(
        method,
        ServiceLimits(rate=rate, batch=batch),
        samples=samples,
        hosts=LOOPBACK if local else ("*",),
    )
    if not local:
        print(f"note: {host} can be reached from other machines, and the service has no passwords")
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        proxy_headers=False,  # a client could otherwise name an address of its own and escape its limit
        timeout_keep_alive=5,
        limit_concurrency=2048,
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run()


def _check_address(host: str, port: int) -> None:
    """Raise an error that names the address unless one can listen there."""
    import socket

    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, UnicodeError) as error:  # a name that cannot be one is an error of its letters
        said = (getattr(error, "strerror", None) or str(error)).lower()
        raise StfsebError(
            f"--host {host} --port {port}: {said}: give another port (0: any free one), or an address of this machine"
        ) from None
