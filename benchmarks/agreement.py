"""Whether the fast engine learns what the plain one learns: the same seeds trained both ways, evaluated the same way.

    python benchmarks/agreement.py [--task fmnist] [--method stfseb] [--seeds 5] [--epochs 10] [--out agreement.json]

The engine that `fit` chooses by itself for a run of its default length (on CUDA: captured, compiled, bf16) against
the eager float32 loop (`capture=False, precision="float32"`). Masks differ between the two, so single runs do; what is
compared are means over seeds: their difference, its 95 % interval from the paired t test, and the seeds' own deviation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from stfseb import evaluate, fit
from stfseb.data.tasks import TaskData, load_task
from stfseb.experiments.jobs import make_job
from stfseb.experiments.machine import origin, script_command
from stfseb.experiments.run import augmentation, make_method

# Short runs are not compiled by default, which they would not earn back; compared is the engine of long ones.
WAYS: dict[str, dict[str, Any]] = {
    "fast": {"compiled": True},
    "plain": {"capture": False, "compiled": False, "precision": "float32"},
}


def one(data: TaskData, task: str, method: str, seed: int, epochs: int, way: str, device: str) -> dict[str, Any]:
    job = make_job(task, method, seed, training={"epochs": epochs})
    made = make_method(data, job.config(device))
    how = {"epochs": epochs, "patience": epochs, "seed": seed, "device": device, "augment": augmentation(data.task)}
    result = fit(made, data.train, data.validation, progress=False, **how, **WAYS[way])
    found = evaluate(made, data.test, data.ood, samples=10, seed=0)
    kept = {name: value for name, value in found.items() if name in ("acc", "nll", "ece") or name.count("/") == 1}
    return {"way": way, "seed": seed, "engine": result.engine, "seconds": result.seconds, "metrics": kept}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a metric: both means, their paired difference with its interval, and the seeds' deviation."""
    table = []
    for name in [n for n in rows[0]["metrics"] if n.split("/")[0] in ("acc", "nll", "ece", "auroc")]:
        fast, plain = (np.array([r["metrics"][name] for r in rows if r["way"] == way]) for way in ("fast", "plain"))
        row = {"metric": name, "fast": fast.mean(), "plain": plain.mean(), "difference": (fast - plain).mean()}
        if len(fast) > 1:
            half = stats.t.ppf(0.975, len(fast) - 1) * stats.sem(fast - plain)
            row |= {"half_width_95": half, "seed_sd": np.sqrt((fast.var(ddof=1) + plain.var(ddof=1)) / 2)}
        table.append({key: value if isinstance(value, str) else float(value) for key, value in row.items()})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fmnist")
    parser.add_argument("--method", default="stfseb")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = load_task(args.task).load()
    rows = []
    for seed in range(args.seeds):
        for way in WAYS:
            rows.append(one(data, args.task, args.method, seed, args.epochs, way, device))
            print(json.dumps(rows[-1]), flush=True)
    table = compared(rows)
    for row in table:
        print("  ".join(v if isinstance(v, str) else f"{k} {v:.4f}" for k, v in row.items()))
    if args.out is not None:
        found = origin(torch.device(device), script_command("agreement", vars(args)))
        args.out.write_text(json.dumps({**found, "table": table, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
