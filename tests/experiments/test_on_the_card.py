"""Whole jobs on a CUDA device: as a population in this process, and in several processes that share the card."""

import pytest
import torch

from stfseb.experiments.executors import run_jobs
from stfseb.experiments.jobs import make_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def nlls(jobs, results):
    return [job.record(results)["metrics"]["nll"] for job in jobs]


def test_runs_as_a_population_end_with_the_numbers_of_runs_alone(tmp_path):
    jobs = [make_job("mini", method, seed, training={"epochs": 3}) for method in ("map", "stfseb") for seed in range(4)]
    said = []
    together = run_jobs(jobs, tmp_path / "together", device="cuda", width=3, announce=said.append, progress=False)
    alone = run_jobs(jobs, tmp_path / "alone", device="cuda", width=1, announce=said.append, progress=False)
    assert len(together.done) == len(alone.done) == 8, said
    assert nlls(jobs, tmp_path / "together") == pytest.approx(nlls(jobs, tmp_path / "alone"), rel=0.05)
    again = run_jobs(jobs, tmp_path / "together", device="cuda", announce=said.append, progress=False)
    assert not again.done
    assert len(again.skipped) == 8


def test_processes_share_a_card(tmp_path):
    jobs = [
        make_job("mini", method, seed, training={"epochs": 2}) for method in ("map", "mcdropout") for seed in (0, 1)
    ]
    said = []
    found = run_jobs(jobs, tmp_path, device="cuda", processes=2, announce=said.append, progress=False)
    assert len(found.done) == 4, said
    machines = [job.record(tmp_path)["machine"] for job in jobs]
    assert all("cuda" in str(machine).lower() or "nvidia" in str(machine).lower() for machine in machines)
