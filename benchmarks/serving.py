"""Load on `stfseb serve`: clients that ask again as soon as they are answered, batched and one at a time.

    python benchmarks/serving.py [--clients 50] [--seconds 60] [--samples 10]

The service (uvicorn, one process) and the clients (asyncio, one process) share the machine's cores. Every client
sends one 28 x 28 image as a PNG upload over a connection that stays open. The network is the two-convolution CNN with
random weights: latency does not depend on training. What other programs do meanwhile stretches latencies; the
service's own CPU time for a request, and the images that went through the network together, depend on it less.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np


def body() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    pixels = (np.random.default_rng(0).random((28, 28)) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    head = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    return head + buffer.getvalue() + b"\r\n--cut--\r\n"


async def client(port: int, request: bytes, until: float, times: list[float], errors: list[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while time.monotonic() < until:
            started = time.perf_counter()
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            content = await reader.readexactly(int(length.group(1)) if length else 0)
            times.append(time.perf_counter() - started)
            if not head.startswith(b"HTTP/1.1 200") or not json.loads(content)["predictions"]:
                errors.append(head.split(b"\r\n")[0].decode())
    except (OSError, asyncio.IncompleteReadError) as error:
        errors.append(repr(error))
    finally:
        writer.close()


async def load(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """Return requests a second, latencies in milliseconds and errors."""
    content = body()
    head = (
        "POST /predict/image HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=cut\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    times: list[float] = []
    errors: list[str] = []
    started = time.monotonic()
    until = started + seconds
    await asyncio.gather(*(client(port, head + content, until, times, errors) for _ in range(clients)))
    lasted = time.monotonic() - started
    middle, late, last = (1000 * float(np.quantile(times, q)) for q in (0.5, 0.99, 1.0))
    return {
        "requests": len(times),
        "per_second": len(times) / lasted,
        "p50_ms": middle,
        "p99_ms": late,
        "max_ms": last,
        "errors": errors,
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process up to now (Linux; elsewhere not a number)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return float("nan")
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def batches(port: int) -> tuple[float, float]:
    """Return how many images and how many batches went through the network, by the service's own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    images, count = (re.search(rf"^stfseb_batch_images_{end} (\S+)", text, re.MULTILINE) for end in ("sum", "count"))
    if images is None or count is None:
        raise RuntimeError("the service's metrics do not count batches")
    return float(images.group(1)), float(count.group(1))


def measure(model: Path, batch: int, clients: int, seconds: float, samples: int) -> dict[str, Any]:
    """Start `stfseb serve` as a user would, put load on it, stop it."""
    port = free_port()
    command = [sys.executable, "-m", "stfseb.cli", "serve", str(model), "--port", str(port), "--rate", "0"]
    command += ["--batch", str(batch), "--samples", str(samples)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    raise RuntimeError(process.communicate()[1]) from None
                time.sleep(0.1)
        asyncio.run(load(port, clients, min(2.0, seconds / 5)))  # warm up
        used, (images, count) = cpu_seconds(process.pid), batches(port)
        found = asyncio.run(load(port, clients, seconds))
        found["cpu_ms"] = 1000 * (cpu_seconds(process.pid) - used) / found["requests"]
        more_images, more = batches(port)
        found["together"] = (more_images - images) / (more - count)
        return found
    finally:
        process.terminate()
        process.communicate(timeout=120)


def make_model(folder: Path) -> Path:
    import torch

    import stfseb

    torch.manual_seed(0)
    method = stfseb.MCDropout(stfseb.SmallCNN())
    method.provenance = {"input": [1, 28, 28], "class_names": [str(k) for k in range(10)]}
    return stfseb.save(method, folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=10)
    options = parser.parse_args()
    print(f"{options.clients} clients, {options.seconds:g} s, S = {options.samples}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name, batch in (("batched, up to 64", 64), ("one at a time", 1)):
            before = os.getloadavg()[0]
            found = measure(model, batch, options.clients, options.seconds, options.samples)
            print(
                f"{name:18} {found['per_second']:7.0f} requests/s   p50 {found['p50_ms']:6.1f} ms   "
                f"p99 {found['p99_ms']:6.1f} ms   longest {found['max_ms']:6.0f} ms   errors {len(found['errors'])} "
                f"of {found['requests']}   CPU {found['cpu_ms']:.2f} ms a request   {found['together']:.1f} images "
                f"together   load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            )


if __name__ == "__main__":
    main()
