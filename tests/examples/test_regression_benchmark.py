"""The regression benchmark's data: what is on disk is used, what is not is left out and said."""

import math

import joblib
import numpy as np
import pytest

from repository_scripts import script


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("gpytorch")
    return script("regression", "benchmarks")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder where scikit-learn looks for its downloads."""
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    return tmp_path


def test_california_housing_is_left_out_in_words_where_it_is_not_on_disk(benchmark, home, capsys):
    assert set(benchmark.data_sets()) == {"diabetes"}
    said = capsys.readouterr().out
    assert str(home) in said
    assert "left out" in said
    assert "fetch_california_housing()" in said
    assert not any(home.iterdir())  # nothing was downloaded


def test_california_housing_is_used_where_it_is(benchmark, home, capsys):
    """A file in scikit-learn's format, whose columns are: value, income, age, rooms, bedrooms, people, homes, place."""
    random = np.random.default_rng(0)
    raw = random.uniform(1.0, 10.0, (2500, 9))
    raw[:, 6] = 2.0  # two households in every block
    raw[:, 0] = 1e5 * (raw[:, 1] + random.normal(0.0, 0.1, 2500))
    joblib.dump(raw, home / "cal_housing_py3.pkz")
    found = benchmark.data_sets()
    assert capsys.readouterr().out == ""
    x, y = found["california"]
    assert x.shape == (2000, 8)  # MOST_ROWS of a random order
    order = np.random.default_rng(0).permutation(2500)[:2000]
    np.testing.assert_allclose(y, raw[order, 0] / 1e5)
    np.testing.assert_allclose(x[:, 0], raw[order, 1])
    np.testing.assert_allclose(x[:, 2], raw[order, 3] / 2.0)  # rooms a household
    for name in ("MAP", "Gaussian process"):
        scores = benchmark.METHODS[name](x[:150], y[:150], x[150:250], y[150:250], 0)
        assert scores["rmse"] < 0.5 * y.std(), name
        assert all(math.isfinite(value) for value in scores.values())
