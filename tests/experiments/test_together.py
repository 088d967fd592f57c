"""Runs at once on a card: what ends one of them, all of them, or the command."""

import signal

import pytest

from stfseb.experiments import claims
from stfseb.experiments.executors import work
from stfseb.experiments.executors.plan import planned
from stfseb.experiments.executors.work import Workplace
from stfseb.experiments.jobs import make_job
from stfseb.training.interrupts import Interrupted


class Card(Workplace):
    """Does runs at once on the CPU, as on a card."""

    together = True


@pytest.fixture
def jobs(tiny, tmp_path):
    return planned([make_job(tiny, "map", seed) for seed in range(2)], tmp_path)


def ending_with(error):
    def perform_together(*args, **kwargs):
        yield from ()
        raise error

    return perform_together


def test_a_signal_ends_the_command_and_not_only_the_population(jobs, monkeypatch):
    monkeypatch.setattr(work, "perform_together", ending_with(Interrupted(signal.SIGTERM, "at once", "saved")))
    with pytest.raises(Interrupted):
        list(Card("cpu").do(jobs))
    assert not any(entry.recorded for entry in jobs)
    assert all(claims.holder(entry.folder) is None for entry in jobs)


def test_another_error_is_said_and_leaves_the_runs_to_be_done_one_by_one(jobs, monkeypatch, caplog):
    monkeypatch.setattr(work, "perform_together", ending_with(RuntimeError("the card has caught fire")))
    reports = list(Card("cpu").do(jobs))
    assert [r.name for r in reports if r.state == "done"] == [entry.name for entry in jobs]
    assert "the card has caught fire" in caplog.text
