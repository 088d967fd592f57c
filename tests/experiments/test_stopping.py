"""SIGTERM and Ctrl-C in the evaluation of a run: one line that says what is kept, and going on does not train again."""

import json
import os
import signal

import pytest

from stfseb.experiments import run
from stfseb.experiments.resume import ResumableRun
from stfseb.experiments.run import RunConfig
from stfseb.methods.map import MAP
from stfseb.training import checkpoint, fit

TRAIN = ("-m", "map", "--device", "cpu", "--quiet", "--epochs", "2")
CODES = [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")]
# The pass over the validation images after the last epoch, the one over the test images, and the last file.
MOMENTS = [(fit, "held_out_scores"), (run, "assess"), (run, "write_record")]


def stopping(number):
    def stop(*_, **__):
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not heard")

    return stop


def untrained(*_):
    pytest.fail("trained again")


def of(folder):
    record = json.loads((folder / "record.json").read_text())
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in record["history"]]
    return history, record["metrics"], record["calibration"]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Return the folder of a run that was never stopped."""
    config = RunConfig("map", training={"epochs": 2})
    started = ResumableRun.new(tmp_path_factory.mktemp("whole"), tiny, config, None)
    started.go_on(progress=False)
    return started.folder


@pytest.mark.parametrize(("number", "code", "name"), CODES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_train(stfseb, tiny, whole, tmp_path, monkeypatch, number, code, name, moment):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(*moment, stopping(number))
        found, out, said = stfseb("train", tiny, *TRAIN, "--out", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (found, out) == (code, "")
    assert said == (
        f"stfseb: stopped by {name} in the evaluation, after 2 epochs of training: saved in {folder / 'checkpoint'}, "
        f"with all of the training; to go on: stfseb train --resume {folder}\n"
    )
    assert not (folder / "record.json").exists()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    with monkeypatch.context() as patch:
        patch.setattr(MAP, "objective", untrained)
        found, _, said = stfseb("train", "--resume", folder, "--quiet")
    assert found == 0, said
    assert of(folder) == of(whole)
    assert not (folder / "checkpoint").exists()


def test_compare(stfseb, tiny, tmp_path, monkeypatch):
    words = ["compare", tiny, "--methods", "map", "--device", "cpu", "--quiet", "--epochs", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "assess", stopping(signal.SIGTERM))
        code, _, said = stfseb(*words, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert code == 143
    assert said.splitlines()[-1] == (
        "stfseb: stopped by SIGTERM in the evaluation, after 2 epochs of training: start the same command with "
        f"--resume {folder} to go on"
    )
    monkeypatch.setattr(MAP, "objective", untrained)
    monkeypatch.setattr("stfseb.report.page.write_report", lambda *_: "page")  # seconds of plots
    code, _, said = stfseb(*words, "--resume", folder)
    assert code == 0, said


def test_before_the_first_epoch_there_is_nothing_to_keep(stfseb, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(MAP, "prepare", stopping(signal.SIGTERM))
    code, _, said = stfseb("train", tiny, *TRAIN, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert code == 143
    assert said.strip() == (
        "stfseb: stopped by SIGTERM outside of its epochs: nothing is saved yet, and it begins anew; to go on: "
        f"stfseb train --resume {folder}"
    )


def test_a_stop_after_the_record_is_written_leaves_a_complete_run(stfseb, tiny, tmp_path, monkeypatch):
    write = run.write_record

    def written(*arguments, **options):
        write(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_record", written)
        code, _, said = stfseb("train", tiny, *TRAIN, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert code == 143
    assert said.strip() == (
        f"stfseb: stopped by SIGTERM after its evaluation: its record is written, in {folder}; to go on: "
        f"stfseb train --resume {folder}"
    )
    assert (folder / "checkpoint").exists()
    monkeypatch.setattr(run, "make_method", untrained)
    assert stfseb("train", "--resume", folder, "--quiet")[0] == 0
    assert not (folder / "checkpoint").exists()


def test_with_a_checkpoint_of_an_unfinished_training(stfseb, tiny, tmp_path, monkeypatch):
    """Stopped once in its training, and once more while it was being taken up again."""
    inner, made = MAP.objective, []

    def objective(self, *arguments):
        made.append(1)
        if len(made) == 5:  # of three steps an epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MAP, "objective", objective)
        assert stfseb("train", tiny, *TRAIN, "--out", tmp_path)[0] == 143
    (folder,) = tmp_path.iterdir()
    before = checkpoint.read(folder / "checkpoint")[1]
    with monkeypatch.context() as patch:
        patch.setattr(MAP, "prepare", stopping(signal.SIGINT))
        code, _, said = stfseb("train", "--resume", folder, "--quiet")
    assert code == 130
    assert said.startswith("stfseb: stopped by Ctrl-C outside of its epochs, after 1 epoch and 2 steps: saved in ")
    assert checkpoint.read(folder / "checkpoint")[1] == before
    (folder / "checkpoint").write_text("no checkpoint")  # the message must not fail over it
    monkeypatch.setattr(run, "make_method", stopping(signal.SIGINT))
    code, _, said = stfseb("train", "--resume", folder, "--quiet")
    assert code == 130
    assert f"outside of its epochs: the checkpoint {folder / 'checkpoint'} cannot be read, remove it; to go" in said
