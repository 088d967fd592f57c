"""Counters and latencies, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The service's own registry: two services in one process do not share numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "stfseb_requests", "Requests by path and status.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "stfseb_request_seconds",
            "Time to answer a prediction.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
            registry=self.registry,
        )
        self.batch = Histogram(
            "stfseb_batch_images",
            "Images that went through the network together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.images = Counter("stfseb_images", "Images predicted.", registry=self.registry)
        self.unfamiliar = Counter("stfseb_unfamiliar_images", "Images that looked unfamiliar.", registry=self.registry)
        self.waiting = Gauge("stfseb_waiting_images", "Images that wait for the network.", registry=self.registry)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
