"""Records as the runs of a plan would leave them, with numbers that are drawn: the paper's, moved a little."""

from __future__ import annotations

import zlib

import numpy as np

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import Asked, label_of, make_plan
from stfseb.experiments.paper.quantities import auroc_keys
from stfseb.report.paper_numbers import printed

KINDS = ("fog", "shear", "stripe")


def asked(*tasks, methods=None, seeds=(0, 1, 2), **more):
    return Asked(tuple(tasks), methods, tuple(seeds), **more)


def record_of(job, parts=("rotation", "corruption")):
    """Return a record for a job: close to the paper's row of its method where there is one."""
    task = load_task(job.task)
    rng = np.random.default_rng(zlib.crc32(job.name.encode()))

    def near(table, key, fallback, scale):
        paper = printed(table, job.task, key, job.method)
        mean, std = (fallback, 0.3) if paper is None else (paper.mean, min(paper.std or 0.01, 1.0))
        return float(mean + std * rng.normal()) / scale

    metrics = {"acc": min(near("table1", "acc", 90.0, 100), 1.0), "ece": abs(near("table1", "ece", 0.03, 1)) + 1e-3}
    metrics |= {"nll": abs(near("table1", "nll", 0.3, 1)) + 1e-3, "brier": 0.2}
    for key in auroc_keys(task):
        if key.removeprefix("auroc/") in task.ood:
            metrics[key] = min(near("table2", key, 90.0, 100), 1.0)
    made = {}
    if "samples" in parts:
        worse = {"1": 0.05, "10": 0.0, "100": -0.01}
        made["samples"] = {"sets": {n: metrics | {"nll": metrics["nll"] + d} for n, d in worse.items()}}
    if "temperature" in parts:
        after = {"acc": metrics["acc"], "ece": metrics["ece"] / 2, "nll": metrics["nll"] - 0.01}
        made["temperature"] = {"temperature": 1.2 + 0.1 * job.seed, "of": "average", "metrics": metrics | after}
    if "rotation" in parts:
        made["rotation"] = {
            "part": "rotation",
            "sets": {
                f"{a:g}": {
                    "acc": metrics["acc"] - 2e-4 * a * a,
                    "nll": metrics["nll"] + 1e-3 * a * a,
                    "ece": metrics["ece"] + 1e-4 * a * a,
                    "confidence": 0.9,
                }
                for a in task.shifts.rotation
            },
        }
    suite = task.shifts.corruption
    if "corruption" in parts and suite is not None:
        made["corruption"] = {
            "part": "corruption",
            "suite": suite.suite,
            "notes": ["generated from the test images"],
            "sets": {
                f"{kind}/{s}": {"acc": 0.8, "nll": 0.6, "ece": 0.1, "confidence": 0.8, "auroc": float(v)}
                for kind in KINDS
                for s in suite.severities or (0,)
                for v in [0.6 + 0.02 * s + 0.02 * rng.random()]
            },
        }
    return {
        "format": 1,
        "id": job.name,
        "task": task.name,
        "task_title": task.title,
        "method": job.method,
        "label": label_of(job.method),
        "seed": job.seed,
        "settings": job.settings,
        "training": job.training,
        "job": job.identity,
        "data": {"test": {"name": task.name, "count": 100, "fingerprint": "aa"}},
        "notes": ["svhn: first 6,000 of 26,032 images"] if job.task == "cifar10" else [],
        "machine": {"device": "cpu: made"},
        "history": [{"epoch": 1, "validation_nll": metrics["nll"], "seconds": 1.0, "data": 1.0, "function": 0.0}],
        "best_epoch": 1,
        "collapsed": False,
        "seconds": 10.0 + rng.random(),
        "seconds_per_epoch": 1.0 + rng.random(),
        "peak_memory_mb": 100.0 + rng.random(),
        "metrics": metrics,
        "parts": made,
    }


def made(*whats, ask, parts=("rotation", "corruption")):
    """Return the plans and the records of all their runs."""
    plans = [make_plan(what, ask) for what in whats]
    jobs = {job.name: job for plan in plans for job in plan.all_jobs}
    return plans, [record_of(job, parts) for job in jobs.values()]
