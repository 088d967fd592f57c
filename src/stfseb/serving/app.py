"""The application: `create_app(method)` is ASGI, `stfseb serve` runs it under uvicorn."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, HTTPException, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from stfseb._version import __version__
from stfseb.data.pictures import decode_picture
from stfseb.errors import StfsebError
from stfseb.serving.answers import Answers
from stfseb.serving.batching import Batcher, BusyError
from stfseb.serving.limits import Guard, RateLimiter
from stfseb.serving.metrics import Metrics
from stfseb.serving.schema import Health, Predictions, Problem, request_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stfseb.methods.base import Method

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_PATHS = ("/", "/predict", "/predict/image", "/health", "/metrics", "/openapi.json")
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "not JSON, or not a form"},
    408: {"model": Problem, "description": "arrived too slowly"},
    413: {"model": Problem, "description": "too large"},
    422: {"model": Problem, "description": "not an image of this model's"},
    429: {"model": Problem, "description": "too many requests of this client"},
    503: {"model": Problem, "description": "too many requests wait"},
    504: {"model": Problem, "description": "took too long"},
}
# The page runs its own inline script and style and talks to this service; nothing else.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class ServiceLimits:
    """What the service takes on."""

    most_bytes: int = 8_000_000
    most_pixels: int = 16_000_000
    most_images: int = 64
    rate: float = 20.0  # requests a second and client; 0 is no limit
    seconds: float = 30.0
    waiting: int = 1024
    batch: int = 64
    company: float = 0.003  # seconds that a batch waits to fill


def create_app(
    method: Method,
    limits: ServiceLimits | None = None,
    *,
    samples: int | None = None,
    hosts: tuple[str, ...] = LOOPBACK,
) -> FastAPI:
    """Return the service of a classifier.

    Args:
        method: a classifier that `stfseb train` or `compare` saved (it must know its input's shape).
        limits: what the service takes on.
        samples: Monte Carlo samples; by default those of the model's rules.
        hosts: names under which it may be called ("*": any). A web page elsewhere cannot make a browser call a
            service on the same machine by another name.
    """
    limits = limits or ServiceLimits()
    answers, metrics = Answers(method, samples), Metrics()
    batcher = Batcher(answers, limits.batch, limits.company, limits.waiting, metrics.batch.observe)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(answers.warm_up)
        await batcher.start()
        try:
            yield
        finally:
            await batcher.stop()

    app = FastAPI(title="stfseb", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.batcher, app.state.metrics = batcher, metrics

    async def answer(x: torch.Tensor) -> JSONResponse:
        started = time.perf_counter()
        metrics.waiting.set(batcher.waiting)
        try:
            async with asyncio.timeout(limits.seconds):
                found = await batcher.submit(x)
        except BusyError:
            raise HTTPException(503, "too many requests wait: try again", {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"no answer within {limits.seconds:g} seconds") from None
        metrics.seconds.observe(time.perf_counter() - started)
        metrics.images.inc(len(found))
        metrics.unfamiliar.inc(sum(row["unfamiliar"] for row in found))
        return JSONResponse({"predictions": found})

    async def predict(body: Any) -> JSONResponse:
        """Predict images given as numbers."""
        return await answer(torch.tensor(body.images, dtype=torch.float32))

    predict.__annotations__["body"] = request_model(answers.shape, limits.most_images)
    app.post("/predict", responses={200: {"model": Predictions}, **_PROBLEMS}, response_model=None)(predict)

    @app.post("/predict/image", responses={200: {"model": Predictions}, **_PROBLEMS}, response_model=None)
    async def predict_image(file: UploadFile) -> JSONResponse:
        """Predict one PNG or JPEG file."""
        channels, size, _ = answers.shape
        try:
            picture = await run_in_threadpool(
                decode_picture, file.file, "file", channels, size, most_pixels=limits.most_pixels
            )
        except StfsebError as error:
            raise HTTPException(422, str(error)) from None
        return await answer(picture[None].float() / 255.0)

    @app.get("/health", responses={200: {"model": Health}}, response_model=None)
    async def health() -> JSONResponse:
        """Say what is served."""
        return JSONResponse({"status": "ready", **answers.about()})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def numbers() -> Response:
        """Return counters and latencies for Prometheus."""
        metrics.waiting.set(batcher.waiting)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    page = resources.files("stfseb.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def home() -> HTMLResponse:
        """Return the page for people."""
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Never the input itself: it may be large, and may hold numbers that JSON cannot.
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:6]))
        status = 400 if first["type"] == "json_invalid" else 422
        return JSONResponse({"detail": f"{where}: {first['msg']}"[:300]}, status)

    @app.exception_handler(500)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the model failed: see the service's log"}, 500)

    def count(path: str, status: int) -> None:
        metrics.requests.labels(path if path in _PATHS else "other", str(status)).inc()

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    app.add_middleware(
        Guard, limiter=RateLimiter(limits.rate), most_bytes=limits.most_bytes, seconds=limits.seconds, count=count
    )
    return app
