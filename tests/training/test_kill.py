"""kill -9 at random moments of `stfseb train`: every run goes on and ends with the numbers of an undisturbed one.

Twenty runs are killed at moments spread over the whole of a run: the start, training with checkpoints at epochs or
every 0.1 s (so in the middle of epochs and of writing one), evaluation, and the last files; some are killed twice.
A helper process imports the library once and forks a child for each command, so that the moments fall into the
run itself; the child is killed by its number.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stfseb.data.embedded import read
from stfseb.methods.saving import load
from stfseb.training import checkpoint

KILLS = 20
TASK = """
train: {array: train.npz}
validation: {fraction: 0.1}
test: {array: test.npz}
context: {array: other.npy}
ood: {strange: {array: strange.npy}}
channels: 1
image_size: 28
classes: 10
network: {name: small, hidden: 32}
dropout: 0.5
augment: true
training: {epochs: 6, batch_size: 32, lr: 0.003, patience: 20, train_samples: 2, test_samples: 4}
presets:
  stfseb: {num_context: 16}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for name, part, count in (("train", "train", 500), ("test", "test", 100)):
        images = read(part).take(slice(0, count))
        np.savez(folder / f"{name}.npz", images=images.images.numpy(), labels=images.labels.numpy())
    np.save(folder / "other.npy", read("kmnist").images[:100].numpy())
    np.save(folder / "strange.npy", read("mnist").images[:100].numpy())
    (folder / "task.yaml").write_text(TASK)
    return folder / "task.yaml"


def numbers(folder):
    """Return what must not depend on kills: metrics, history without seconds, the weights' bytes, calibration."""
    record = json.loads((folder / "record.json").read_text())
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in record["history"]]
    (weights,) = (folder / "model").glob("weights-*.safetensors")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return {
        "history": history,
        "weights": digest,
        **{name: record[name] for name in ("metrics", "best_epoch", "stopped", "calibration", "settings", "training")},
    }


def check_files(folder):
    """Whatever has its final name is complete, at any moment; return whether there is a checkpoint, and its state."""
    if (folder / "run.json").exists():
        json.loads((folder / "run.json").read_text())
    if (folder / "record.json").exists():
        json.loads((folder / "record.json").read_text())
        load(folder / "model")
    if (folder / "model" / "model.json").exists():
        load(folder / "model")
    found = checkpoint.read(folder / "checkpoint")  # raises if it is cut short or its checksum differs
    return None if found is None else found[1]


@pytest.mark.slow
def test_twenty_kills(task, nursery, tmp_path):
    words = ["train", task, "--method", "stfseb", "--device", "cpu", "--quiet"]
    code, _ = nursery.run(*words, "--out", tmp_path / "first")  # the first fills the disk's caches
    code, whole = nursery.run(*words, "--out", tmp_path / "undisturbed")
    assert code == 0, nursery.log.read_text()
    (folder,) = (tmp_path / "undisturbed").iterdir()
    expected = numbers(folder)
    assert expected["history"][-1]["validation_accuracy"] > 0.3
    moments = random.Random(20261115)
    seen = {"nothing yet": 0, "at an epoch": 0, "in an epoch": 0, "trained": 0, "complete": 0}
    leftovers = number = 0
    # Moments are shares of the time of one run: where the machine's speed changes meanwhile, it takes a few more.
    while number < KILLS or (number < 3 * KILLS and min(seen["in an epoch"], seen["at an epoch"]) < 3):
        often = [] if number % 2 else ["--checkpoint-minutes", 0.1 / 60]
        out = tmp_path / f"run{number}"
        start = [*words, "--out", out, *often]
        kills = 2 if number % 5 == 4 else 1
        at = moments.uniform(0, whole)
        for _ in range(kills):
            found = list(out.iterdir()) if out.exists() else []
            known = bool(found) and (found[0] / "run.json").exists()
            again = ["train", "--resume", found[0], "--quiet", *often] if known else start
            code, _ = nursery.run(*again, kill_after=at)
            assert code in (-9, 0), nursery.log.read_text()
            for one in out.iterdir() if out.exists() else ():
                state = check_files(one)
                leftovers += sum(1 for _ in one.rglob(".*.part"))
                key = "nothing yet"
                if (one / "record.json").exists():
                    key = "complete"
                elif state is not None:
                    place = "in an epoch" if state["steps"] else "at an epoch"
                    key = "trained" if state["result"]["stopped"] else place
                seen[key] += 1
            at = moments.uniform(0, whole / 2)
        found = [one for one in out.iterdir() if (one / "run.json").exists()] if out.exists() else []
        again = ["train", "--resume", found[-1], "--quiet"] if found else start
        code, _ = nursery.run(*again)
        assert code == 0, nursery.log.read_text()
        (folder,) = [one for one in out.iterdir() if (one / "record.json").exists()]
        assert numbers(folder) == expected, f"run {number} ends otherwise"
        assert sorted(p.name for p in folder.iterdir()) == ["images.json", "model", "record.json", "run.json"]
        assert not list(folder.rglob(".*.part"))
        number += 1
    print(f"undisturbed {whole:.1f} s; killed when the folder had: {seen}; {leftovers} unfinished files, none read")
    assert seen["in an epoch"] >= 3
    assert seen["at an epoch"] >= 3


@pytest.mark.slow
def test_one_training_of_twenty_seconds_killed_twenty_times(task, nursery, tmp_path):
    words = ["train", task, "--method", "stfseb", "--device", "cpu", "--quiet", "--epochs"]
    code, short = nursery.run(*words, 6, "--out", tmp_path / "short")
    assert code == 0, nursery.log.read_text()
    epochs = max(12, round(6 * 20 / short))  # about twenty seconds, evaluation included
    code, whole = nursery.run(*words, epochs, "--out", tmp_path / "undisturbed")
    assert code == 0, nursery.log.read_text()
    (folder,) = (tmp_path / "undisturbed").iterdir()
    expected = numbers(folder)
    moments, kills, trainings = random.Random(7), 0, []
    often = ["--checkpoint-minutes", 0.1 / 60]
    while kills < KILLS:  # in one training, but for a machine that has become faster since the undisturbed one
        assert len(trainings) < 5, "the trainings end before they are killed"
        out, steps = tmp_path / f"killed{len(trainings)}", []
        trainings.append(steps)
        run = None
        for _ in range(KILLS - kills):
            known = run is not None and (run / "run.json").exists()
            again = ["train", "--resume", run, "--quiet", *often] if known else [*words, epochs, "--out", out, *often]
            code, _ = nursery.run(*again, kill_after=moments.uniform(0.4, max(1.5, 0.09 * whole)))
            assert code in (-9, 0), nursery.log.read_text()
            found = sorted(out.iterdir()) if out.exists() else []  # none: killed before it had made its folder
            run = next((one for one in found if (one / "run.json").exists()), None)
            if code == 0:
                break
            kills += 1
            states = [state for one in found if (state := check_files(one)) is not None]
            steps.append((0, 0) if not states else (len(states[0]["result"]["history"]), states[0]["steps"]))
        if run is None:
            continue  # killed at its start, every time
        code, _ = nursery.run("train", "--resume", run, "--quiet")
        assert code == 0, nursery.log.read_text()
        assert numbers(run) == expected
        assert steps == sorted(steps)  # nothing that was saved is lost
    assert any(steps and steps[-1] > steps[0] for steps in trainings)  # a slow machine gets a few steps further
    print(f"undisturbed {whole:.1f} s of {epochs} epochs; after each kill there were (epochs, steps): {trainings}")


WRITER = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from stfseb.training import checkpoint

for turn, line in enumerate(sys.stdin):
    child = os.fork()
    if child == 0:
        number = 10_000 * turn
        while True:
            number += 1
            tensors = {str(i): torch.full((250_000,), float(number)) for i in range(4)}
            checkpoint.write(Path(line.strip()), tensors, {"number": number})
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_kills_in_the_middle_of_writing(tmp_path):
    """A process that does nothing but write: at each of 20 moments there is one complete checkpoint, of one number.

    Every second moment is one at which an unfinished file was seen, of which disks with much to do otherwise leave few.
    """
    file = tmp_path / "run" / "checkpoint"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    moments, halves, seen, longest = random.Random(5), 0, set(), 0.5

    def unfinished():
        return list(file.parent.glob(".checkpoint.*.part")) if file.parent.exists() else []

    with process:
        for turn in range(KILLS):
            process.stdin.write(f"{file}\n")
            process.stdin.flush()
            child, began = int(process.stdout.readline()), time.monotonic()
            while not file.exists() and time.monotonic() < began + 60:  # the first: how long does this disk take?
                time.sleep(0.01)
                longest = max(0.5, 4 * (time.monotonic() - began))
            time.sleep(moments.uniform(0.05, longest))
            while turn % 2 and not unfinished() and time.monotonic() < began + 60:
                pass
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "gone\n"
            halves += len(unfinished())
            found = checkpoint.read(file)
            if found is not None:
                assert {float(value) for tensor in found[0].values() for value in tensor.unique()} == {
                    float(found[1]["number"])
                }
                seen.add(found[1]["number"])
            checkpoint.make_ready(file)
            assert not list(file.parent.glob(".*"))
        process.stdin.close()
    print(f"{halves} of {KILLS} kills left an unfinished file; the checkpoints had the numbers {sorted(seen)}")
    assert halves >= 1
    assert len(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_says_how_to_go_on(signum, code, task, tmp_path):
    """Asked to stop, the command ends with the shell's code and one line, which holds the command that goes on."""
    command = [sys.executable, "-m", "stfseb.cli", "train", task, "--method", "map", "--out", tmp_path, "--quiet"]
    command += ["--epochs", "100"]  # long enough to be stopped in the middle
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=settings)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("*/checkpoint")):
        time.sleep(0.02)
    process.send_signal(signum)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    (folder,) = [Path(p) for p in tmp_path.iterdir()]
    (line,) = said.strip().splitlines()
    assert line.startswith(f"stfseb: stopped by {'SIGTERM' if code == 143 else 'Ctrl-C'} ")
    assert line.endswith(f"to go on: stfseb train --resume {folder}")
    done = subprocess.run(
        [sys.executable, "-m", "stfseb.cli", *line.rpartition("stfseb ")[2].split()],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stderr
    assert (folder / "record.json").exists()
    for words, match in ((["--epochs", "3"], "--epochs cannot"), (["mini"], "TASK cannot")):
        wrong = subprocess.run(
            [sys.executable, "-m", "stfseb.cli", "train", *words, "--resume", str(folder)],
            capture_output=True,
            text=True,
            env=settings,
            check=False,
        )
        assert wrong.returncode == 2
        assert match in wrong.stderr
