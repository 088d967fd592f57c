"""A small trained classifier, and the service around it on a real socket."""

import asyncio
import io
import socket
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

import stfseb


@pytest.fixture(scope="session")
def classifier():
    """Return a model of 8 x 8 pictures (bright left, bright right, bright centre) with its rules."""
    torch.manual_seed(0)
    x, y = pictures(400)
    net = stfseb.SmallCNN(classes=3, image_size=8, hidden=32, dropout=0.2)
    method = stfseb.STFSEB(net, context=torch.rand(200, 1, 8, 8), samples=3, tau1=0.1, tau2=1.0)
    stfseb.fit(method, (x, y), pictures(200, seed=1), epochs=12, lr=5e-3, batch_size=50, progress=False)
    method.ood_threshold(0.05)
    method.abstain(0.9)
    method.provenance = {"input": [1, 8, 8], "class_names": ["left", "right", "<b>centre</b>"], "task": "bright"}
    return method


def pictures(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 * torch.rand(count, 1, 8, 8, generator=generator)
    y = torch.arange(count) % 3
    x[y == 0, :, :, :3] += 0.7
    x[y == 1, :, :, 5:] += 0.7
    x[y == 2, :, :, 3:5] += 0.7
    return x, y


def png(array, **options):
    """Return an array (H, W) or (H, W, 3) of uint8 as the bytes of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(buffer, "PNG", **options)
    return buffer.getvalue()


class Server:
    """uvicorn in a thread, on a free port of 127.0.0.1."""

    def __init__(self, app):
        import uvicorn

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", access_log=False, proxy_headers=False)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def __enter__(self):
        self.thread.start()
        until = time.monotonic() + 120
        while not self.server.started:
            assert time.monotonic() < until
            assert self.thread.is_alive()
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="session")
def server(classifier):
    from stfseb.serving.app import ServiceLimits, create_app

    with Server(create_app(classifier, ServiceLimits(rate=0))) as running:
        yield running
