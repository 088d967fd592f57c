"""What the whole paper costs on 1, 8, 64 and more cards, by simulation; and, measured here, what the executor costs.

    python benchmarks/scaling.py                      # the simulation: seconds, needs no card
    python benchmarks/scaling.py --measure start-up   # also the time until a first step
    python benchmarks/scaling.py --measure executor   # also the driver's own CPU time (minutes)

The costs of runs are those of `stfseb.experiments.cost`; conditions and tables in words are in `docs/scaling.md`.
What is not measured anew keeps its place in the results file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from stfseb.experiments.cost import (
    EPOCH,
    MEASURED_ON,
    PREDICTION,
    SET_UP,
    SHAPES,
    CostModel,
    at_speeds,
    by_task_and_method,
    paper_phases,
    search_phase,
)
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.executors.log import read_log
from stfseb.experiments.jobs import make_job
from stfseb.experiments.machine import machine
from stfseb.experiments.paper.plan import METHODS, TASKS
from stfseb.experiments.simulate import Phase, simulate
from stfseb.files import write_json

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "scaling.json"
CARDS = (1, 8, 16, 32, 64, 128, 256, 1024)
# What could be otherwise: the compiled step kept between chunks of a process; batches that do not wait for each other.
WAYS = {"as it is": (1.0, False), "steps kept": (0.0, False), "no waiting": (1.0, True)}
HOUR = 3600.0


def jobs_of(model: CostModel, ours: CostModel) -> dict[str, list[Phase]]:
    """Return what is simulated, by name."""
    paper = paper_phases(model, Path("results"))
    thirty = search_phase(model, 300)
    forty = search_phase(ours, 40, "extended")
    return {
        "paper all --retuned": paper,
        "searches of 300 trials": [thirty],
        "searches of 40 trials": [forty],
        "300 trials, then paper": [thirty, *paper],
        "40 trials, then paper": [forty, *paper],
    }


def simulated(work: dict[str, list[Phase]]) -> list[dict[str, Any]]:
    """Return a row for every job, number of cards and way."""
    rows = []
    for name, phases in work.items():
        for cards in CARDS:
            for way, (again, merged) in WAYS.items():
                found = simulate(without_waiting(phases) if merged else phases, cards, again=again)
                rows.append(
                    {
                        "job": name,
                        "cards": cards,
                        "way": way,
                        "makespan_hours": found.makespan / HOUR,
                        "card_hours_held": cards * found.makespan / HOUR,
                        "card_hours_of_runs": found.work / HOUR,
                        "card_hours_of_set_up": found.set_up / HOUR,
                        "efficiency": found.efficiency,
                        "phase_ends_hours": {phase: end / HOUR for phase, end in found.ends.items()},
                        "longest_seconds": found.longest,
                    }
                )
    return rows


def sensitivity() -> dict[str, dict[str, dict[int, float]]]:
    """Return hours under other assumptions: epochs, and a GFSVI twice as fast on the deep network."""
    faster = {**EPOCH, "deep": {**EPOCH["deep"], "gfsvi": EPOCH["deep"]["gfsvi"] / 2}}
    found = {}
    for name, changes in {
        "20 epochs": {"epochs": 20, "trial_epochs": 20},
        "100 epochs": {"epochs": 100, "trial_epochs": 100},
        "GFSVI on six convolutions in half the time": {"table": faster},
    }.items():
        model = CostModel(**changes)  # type: ignore[arg-type]
        work = jobs_of(model, replace(model, trial_epochs=30))
        found[name] = {
            job: {cards: simulate(phases, cards).makespan / HOUR for cards in (1, 8, 64)}
            for job, phases in work.items()
        }
    return found


def printed_speeds() -> dict[str, dict[str, float]]:
    """Return the paper's seconds an epoch, by task and method."""
    text = files("stfseb.report").joinpath("paper_numbers.json").read_text()
    table = json.loads(text)["tables"]["efficiency"]
    return {task: {m: row[0] for m, row in table[task]["seconds_per_epoch"].items()} for task in TASKS}


def naive_speeds() -> dict[str, dict[str, float]]:
    """Return the naive way's seconds an epoch on the H200, scaled to the tasks; GFSVI's was not measured: left out."""
    rows = json.loads((HERE / "h200" / "training.json").read_text())["rows"]
    naive = {(row["task"], row["method"]): row["seconds_per_epoch"] for row in rows if row["way"] == "naive"}
    found: dict[str, dict[str, float]] = {}
    for task, shape in SHAPES.items():
        base = SHAPES[MEASURED_ON[shape.network]]
        scale = shape.images * shape.side**2 / (base.images * base.side**2)
        found[task] = {m: scale * naive.get((MEASURED_ON[shape.network], m), 0.0) for m in METHODS}
    return found


def without_waiting(phases: list[Phase]) -> list[Phase]:
    """Return the phases with runs that do not depend on each other in one; searches and retuning keep their place."""
    found: list[Phase] = []
    for phase in phases:
        last = found[-1] if found else phase
        kind = (phase.claims, phase.width, phase.name.startswith("dof retuned"))
        if found and kind == (last.claims, last.width, last.name.startswith("dof retuned")):
            more = {f"{name}, {phase.name}": runs for name, runs in phase.groups.items()}
            found[-1] = Phase(last.name, last.groups | more, last.width, last.claims)
        else:
            found.append(phase)
    return found


def without(phases: list[Phase], method: str) -> list[Phase]:
    """Return the phases without a method's groups."""
    return [replace(p, groups={n: g for n, g in p.groups.items() if n.split()[1] != method}) for p in phases]


START = """
import time
wall, cpu = time.perf_counter(), time.process_time()
def lap(name):
    global wall, cpu
    print(name, time.perf_counter() - wall, time.process_time() - cpu)
    wall, cpu = time.perf_counter(), time.process_time()
import torch
lap("torch")
import torch._dynamo
lap("torch_compiler")  # Adam imports it, compiled or not
import stfseb.cli, stfseb.experiments.run, stfseb.data.tasks
lap("stfseb")
from stfseb.data.tasks import load_task
from stfseb.experiments.run import RunConfig, make_method
from stfseb.training.batches import ResidentBatches
from stfseb.training.loop import Protocol, Training
task = load_task("mini")
data = task.load()
wall, cpu = time.perf_counter(), time.process_time()
method = make_method(data, RunConfig("stfseb", 0, dict(task.presets["stfseb"]), dict(task.training), "cpu"))
batches = ResidentBatches(data.train.images, data.train.labels, 128, 0, torch.device("cpu"))
Training(method, batches, batches, Protocol(epochs=1))
lap("method_and_engine")
"""


def start_up(times: int = 5) -> dict[str, Any]:
    """Time `stfseb --help` and, in a fresh process, all that comes before the first step, but for the data."""
    laps: dict[str, tuple[list[float], list[float]]] = {"help": ([], [])}
    for _ in range(times):
        began, used = time.perf_counter(), _used_by_children()
        subprocess.run([sys.executable, "-m", "stfseb.cli", "--help"], check=True, capture_output=True)
        laps["help"][0].append(time.perf_counter() - began)
        laps["help"][1].append(_used_by_children() - used)
        done = subprocess.run([sys.executable, "-c", START], check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            name, wall, cpu = line.split()
            walls, cpus = laps.setdefault(name, ([], []))
            walls.append(float(wall))
            cpus.append(float(cpu))
    return {
        **{name: {"wall": _summary(walls), "cpu": _summary(cpus)} for name, (walls, cpus) in laps.items()},
        "load_average": os.getloadavg(),
    }


def overhead(executor: str, epochs: int, runs: int = 2) -> dict[str, Any]:
    """Do runs, each in a process of its own, and return the driver's CPU seconds beside them."""
    jobs = [make_job("mini", "stfseb", seed, training={"epochs": epochs, "patience": epochs}) for seed in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        found = run_jobs(
            jobs, Path(folder), executor=executor, processes=runs, device="cpu", announce=print, progress=False
        )
        seconds = [line["seconds"] for line in read_log(Path(folder)) if "seconds" in line]
    return {
        "executor": executor,
        "runs": len(found.done),
        "epochs": epochs,
        "run_seconds": seconds,
        "wall_seconds": found.seconds,
        "driver_cpu_seconds": found.driver_cpu_seconds,
        "share_of_wall": found.driver_cpu_seconds / found.seconds,
        "load_average": os.getloadavg(),
    }


def _used_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "times": len(values)}


def main() -> None:
    """Simulate, measure what was asked for, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=40, help="that final runs and the paper's trials train")
    parser.add_argument("--measure", choices=("start-up", "executor"), help="also time this, on this machine")
    parser.add_argument("--run-epochs", type=int, default=2, help="of the measured runs on the task mini")
    arguments = parser.parse_args()
    model = CostModel(epochs=arguments.epochs, trial_epochs=arguments.epochs)
    ours = CostModel(epochs=arguments.epochs, trial_epochs=30)
    work = jobs_of(model, ours)
    rows = simulated(work)
    costs = [
        {"job": name, "task": task, "method": method, "runs": number, "card_seconds": seconds}
        for name, phases in work.items()
        if "then" not in name
        for (task, method), (number, seconds) in by_task_and_method(phases).items()
    ]
    paper, naive = printed_speeds(), naive_speeds()
    others = {
        name: {
            "runs": sum(len(runs) for phase in phases for runs in phase.groups.values()),
            "card_hours_here": sum(phase.seconds for phase in phases) / HOUR,
            "card_hours_at_the_papers_speed": at_speeds(phases, paper) / HOUR,
            "without_gfsvi": {
                "here": sum(phase.seconds for phase in without(phases, "gfsvi")) / HOUR,
                "paper": at_speeds(without(phases, "gfsvi"), paper) / HOUR,
                "naive_on_h200": at_speeds(without(phases, "gfsvi"), naive) / HOUR,
            },
        }
        for name, phases in work.items()
    }
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured = before.get("measured_here", {})
    if arguments.measure is not None:
        measured["machine"] = machine(torch.device("cpu"))
    if arguments.measure == "start-up":
        measured["start_up"] = start_up()
    if arguments.measure == "executor":
        measured["overhead"] = [overhead(name, arguments.run_epochs) for name in ("local", "dask")]
    write_json(
        RESULTS,
        {
            "model": {
                **asdict(model),
                "trial_epochs_of_40": ours.trial_epochs,
                "set_up_seconds": SET_UP,
                "prediction_seconds": PREDICTION,
                "shapes": {task: asdict(shape) for task, shape in SHAPES.items()},
            },
            "per_epoch": {task: {m: model.epoch(task, m) for m in METHODS} for task in TASKS},
            "costs": costs,
            "compared": others,
            "simulated": rows,
            "sensitivity_hours": sensitivity(),
            "measured_here": measured,
        },
    )
    for row in rows:
        print(
            f"{row['job']:26} {row['cards']:5} cards, {row['way']:10}: {row['makespan_hours']:8.2f} h, "
            f"{row['card_hours_held']:8.1f} card hours held, {row['card_hours_of_set_up']:6.2f} of set-up, "
            f"{100 * row['efficiency']:4.0f} %"
        )
    print(json.dumps({"compared": others, "measured_here": measured}, indent=1))


if __name__ == "__main__":
    main()
