"""Fifty clients at once: no error, and batching pays."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "serving.py"
    spec = importlib.util.spec_from_file_location("serving_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fifty_clients_get_no_error_and_batching_helps(benchmark, tmp_path):
    model = benchmark.make_model(tmp_path)
    batched = benchmark.measure(model, 64, clients=50, seconds=10.0, samples=10)
    alone = benchmark.measure(model, 1, clients=50, seconds=5.0, samples=10)
    assert batched["errors"] == []
    assert alone["errors"] == []
    assert batched["requests"] > 500
    assert batched["per_second"] > alone["per_second"]
