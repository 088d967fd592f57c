"""Fifty clients at once: no error, and batching pays."""

import pytest

from repository_scripts import script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    return script("serving", "benchmarks")


def test_fifty_clients_get_no_error_and_batching_helps(benchmark, tmp_path):
    model = benchmark.make_model(tmp_path)
    batched, alone = [], []
    for _ in range(2):  # in turn, and by the service's own time: other work may share the machine, and not evenly
        batched.append(benchmark.measure(model, 64, clients=50, seconds=5.0, samples=10))
        alone.append(benchmark.measure(model, 1, clients=50, seconds=5.0, samples=10))
    assert [found["errors"] for found in batched + alone] == [[], [], [], []]
    assert sum(found["requests"] for found in batched) > 500
    assert all(found["requests"] > 100 for found in batched)  # nobody was answered once and then left waiting
    assert min(found["cpu_ms"] for found in batched) < min(found["cpu_ms"] for found in alone)
    assert all(found["together"] > 2 * one["together"] for found, one in zip(batched, alone, strict=True))
