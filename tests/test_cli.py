"""The command line as a person uses it: in a process of its own, from input to files, and wrong input."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from stfseb.data.embedded import read

pytestmark = pytest.mark.xdist_group("cli")  # one worker: what they share is trained once


def stfseb(*words, cwd=None, timeout=300, **environment):
    command = [sys.executable, "-m", "stfseb.cli", *map(str, words)]
    settings = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=settings, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two methods trained for an epoch and compared."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["compare", "mini", "--methods", "map,mcdropout", "--epochs", 1, "--set", "mcdropout.samples=2"]
    done = stfseb(*words, "--out", folder, "--quiet")
    assert done.returncode == 0, done.stderr
    (job,) = folder.iterdir()
    return job, done


def test_compare_prints_the_table_and_writes_everything(trained):
    job, done = trained
    assert "MC Dropout" in done.stdout
    assert "Accuracy" in done.stdout
    assert str(job / "report.html") in done.stdout.replace("\n", "")
    assert (job / "report.html").stat().st_size > 50_000
    assert list((job / "plots").glob("*.png"))
    records = [json.loads(p.read_text()) for p in sorted(job.glob("*/record.json"))]
    assert [r["method"] for r in records] == ["map", "mcdropout"]
    for record in records:
        assert record["data"]["train"]["fingerprint"] == read("train").fingerprint
        assert record["settings"]["sigma"] == 1.0
        assert 0.2 < record["metrics"]["acc"] < 1.0
        assert record["history"][0]["validation_nll"] > 0
        assert record["code"]["version"]
    assert records[1]["settings"]["samples"] == 2


def test_a_comparison_goes_on_where_it_was(trained):
    job, _ = trained
    words = ["compare", "mini", "--methods", "map,mcdropout", "--epochs", 1, "--resume", job]
    done = stfseb(*words, "--set", "mcdropout.samples=2")
    assert done.returncode == 0, done.stderr
    assert "map (seed 0) is there already" in done.stderr
    assert "mcdropout (seed 0) is there already" in done.stderr
    other = stfseb(*words, "--set", "mcdropout.samples=3")
    assert other.returncode == 2
    assert "was run with samples=2, not 3" in other.stderr
    nowhere = stfseb("compare", "mini", "--resume", job / "nothing")
    assert nowhere.returncode == 2
    assert "there is no such folder" in nowhere.stderr


@pytest.mark.slow
def test_all_six_methods_side_by_side_with_their_cost(tmp_path):
    methods = ["stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map"]
    words = ["compare", "mini", "--methods", ",".join(methods), "--epochs", 1, "--out", tmp_path, "--quiet"]
    done = stfseb(*words, timeout=1500)
    assert done.returncode == 0, done.stderr
    records = {r["method"]: r for r in (json.loads(p.read_text()) for p in tmp_path.glob("*/*/record.json"))}
    assert sorted(records) == sorted(methods)
    for record in records.values():
        assert not record["collapsed"]
        assert record["metrics"]["nll"] < 1.6  # a constant prediction has log 10 = 2.30
        assert record["metrics"]["acc"] > 0.4
        assert record["seconds_per_epoch"] > 0
        assert record["peak_memory_mb"] > 50
    (page,) = tmp_path.glob("*/report.html")
    text = page.read_text("utf-8")
    for said in ("An epoch", "Peak memory", "GFSVI (last layer, 60 kernel steps on 256 points)"):
        assert said in text


def test_report_is_made_anew(trained):
    job, _ = trained
    before = (job / "report.html").read_text()
    done = stfseb("report", job, "--title", "Once more")
    assert done.returncode == 0
    count = len(list(job.glob("*/record.json")))
    assert f"(runs: {count}, searches: 0)" in done.stderr  # before the page, which may take a minute
    assert done.stdout.startswith("Report: ")
    assert "Once more" in (job / "report.html").read_text()
    assert (job / "report.html").read_text() != before


def test_evaluate_repeats_the_record(trained):
    job, _ = trained
    run = job / "mini-mcdropout-seed0"
    done = stfseb("evaluate", run / "model", "--json")
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), json.loads((run / "record.json").read_text())["metrics"]
    assert found == pytest.approx(expected, abs=1e-6)


def test_predict_takes_pictures_and_arrays(trained, tmp_path):
    job, _ = trained
    model = job / "mini-map-seed0" / "model"
    images = read("test").images[:3, 0].numpy()
    Image.fromarray(images[0]).save(tmp_path / "one.png")
    Image.fromarray(np.kron(images[1], np.ones((4, 4), np.uint8))).convert("RGB").save(tmp_path / "two.jpg")
    np.save(tmp_path / "three.npy", images)
    words = [tmp_path / "one.png", tmp_path / "two.jpg", tmp_path / "three.npy"]
    rows = json.loads(stfseb("predict", model, *words, "--json").stdout)
    assert len(rows) == 5
    assert rows[0]["class"] == rows[2]["class"]
    assert rows[0]["probability"] == pytest.approx(rows[2]["probability"], abs=1e-6)
    assert all(row["class"] in read("test").classes for row in rows)
    table = stfseb("predict", model, *words, COLUMNS="300")
    assert table.returncode == 0
    assert "one.png" in table.stdout


def test_predict_flags_the_stated_share_of_familiar_images(trained, tmp_path):
    """The threshold was set so that 5 % of the validation images look unfamiliar."""
    job, _ = trained
    np.save(tmp_path / "validation.npy", read("validation").images.numpy())
    rows = json.loads(stfseb("predict", job / "mini-map-seed0" / "model", tmp_path / "validation.npy", "--json").stdout)
    share = sum(row["unfamiliar"] for row in rows) / len(rows)
    assert 0.03 <= share <= 0.07


def test_calibrate_takes_the_embedded_images(trained, tmp_path):
    """Afterwards the sets of plausible classes hold the true one as often as was asked, on the same images."""
    model = tmp_path / "model"
    shutil.copytree(trained[0] / "mini-map-seed0" / "model", model)
    done = stfseb("calibrate", model, "mini", "--coverage", 0.8)
    assert done.returncode == 0, done.stderr
    test = read("test")
    assert done.stdout.startswith(f"Calibrated on {len(test)} images.")
    np.save(tmp_path / "test.npy", test.images.numpy())
    rows = json.loads(stfseb("predict", model, tmp_path / "test.npy", "--json").stdout)
    held = [test.classes[label] in row["plausible"] for label, row in zip(test.labels.tolist(), rows, strict=True)]
    assert 0.79 < np.mean(held) < 0.82
    for words, said in (
        (["mnii"], "did you mean 'mini'?"),
        (["mini", "--answer", 1.5], "--answer 1.5: give a fraction between 0 and 1"),
        (["mini", "--false-alarms", 0], "--false-alarms 0: give a fraction between 0 and 1"),
    ):
        done = stfseb("calibrate", model, *words)
        assert done.returncode == 2
        assert said in done.stderr


def wrong(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.npy").write_text("not an array")
    np.save(tmp_path / "nan.npy", np.full((2, 28, 28), np.nan, dtype=np.float32))
    np.save(tmp_path / "shape.npy", np.zeros((2, 5, 5), np.uint8))
    np.savez(tmp_path / "objects.npz", images=np.array([{}], dtype=object))
    np.savez_compressed(tmp_path / "bomb.npz", images=np.zeros((200_000, 28, 28), np.uint8))
    np.save(tmp_path / "minus.npy", np.full((2, 28, 28), -5.0, dtype=np.float32))
    (tmp_path / "escape.yaml").write_text("name: ../../escape\ntrain: mnist\n")
    for name, size in (("two", 28), ("small", 8)):
        for label in ("one", "two"):
            (tmp_path / name / label).mkdir(parents=True)
            for index in range(10):
                Image.fromarray(np.full((size, size), index, np.uint8)).save(tmp_path / name / label / f"{index}.png")
        about = f"train: {name}\ntest: {name}\ncontext: train\nchannels: 1\nimage_size: {size}\n"
        (tmp_path / f"{name}.yaml").write_text(about)
    for label in ("one", "two"):
        (tmp_path / "hollow" / label).mkdir(parents=True)
    (tmp_path / "hollow.yaml").write_text((tmp_path / "two.yaml").read_text().replace("two", "hollow"))
    return {
        "unknown task": (["compare", "minni"], "did you mean 'mini'"),
        "unknown method": (["compare", "mini", "--methods", "stfseb,mcdropuot"], "did you mean 'mcdropout'"),
        "unknown setting": (["train", "mini", "--set", "tau3=1"], "tau3"),
        "setting without a value": (["train", "mini", "--set", "tau2"], "--set tau2: write NAME=VALUE, one"),
        "setting of no method": (["compare", "mini", "--set", "tau2=3"], "--set tau2=3: write METHOD.NAME=VALUE"),
        "dof in covariance form": (["train", "mini", "--set", "dof=2"], "dof=2"),
        "tau": (["train", "mini", "--set", "tau2=0"], "tau2=0"),
        "device": (["train", "mini", "--device", "tpu9"], "tpu9"),
        "task file": (["compare", tmp_path / "none.yaml"], "none.yaml"),
        "model": (["evaluate", tmp_path / "none"], "does not exist"),
        "folder without records": (["report", tmp_path], "no record.json"),
        "missing picture": (["predict", "MODEL", tmp_path / "none.png"], "none.png"),
        "empty picture": (["predict", "MODEL", tmp_path / "empty.png"], "empty.png"),
        "text as array": (["predict", "MODEL", tmp_path / "text.npy"], "text.npy"),
        "NaN pixels": (["predict", "MODEL", tmp_path / "nan.npy"], "NaN"),
        "other shape": (["predict", "MODEL", tmp_path / "shape.npy"], "shape"),
        "values out of range": (["predict", "MODEL", tmp_path / "minus.npy"], "-5"),
        "folder as task": (["compare", tmp_path], "is a folder: give a YAML file that names it"),
        "nobody's home as task": (["compare", "~nobody-there"], "task '~nobody-there'"),
        "long name as task": (["compare", "a" * 300], "task 'aaa"),
        "file as model": (
            ["evaluate", tmp_path / "text.npy"],
            "text.npy is a file, not a model folder: give the folder",
        ),
        "folder of runs as model": (["evaluate", "RUNS"], "holds runs, not a model: give "),
        "folder without a model": (["evaluate", tmp_path], "holds no model (model.json is missing): give the folder"),
        "task of another shape": (
            ["evaluate", "MODEL", "--task", tmp_path / "small.yaml"],
            "of 1x8x8, the model takes",
        ),
        "task of other classes": (
            ["evaluate", "MODEL", "--task", tmp_path / "two.yaml"],
            "has the classes one, two, the",
        ),
        "no method": (["compare", "mini", "--methods", ","], "names nothing"),
        "no class of the model": (["calibrate", "MODEL", tmp_path / "two"], "is no class of this task"),
        "class without pictures": (["compare", tmp_path / "hollow.yaml"], "has no PNG, JPEG, WebP"),
        "split of a task": (["data", "show", "mini", "--split", "test"], "leave --split out"),
        "device to serve on": (["serve", "MODEL", "--device", "tpu9"], "device 'tpu9' cannot be used"),
        "address to serve on": (["serve", "MODEL", "--host", "192.0.2.1"], "--host 192.0.2.1"),
        "name to serve on": (["serve", "MODEL", "--host", "a..b"], "--host a..b"),
        "task name": (["compare", tmp_path / "escape.yaml"], "file names"),
        "unreadable value": (["train", "mini", "--set", "tau2=[1"], "--set tau2=[1: the value"),
        "context as a setting": (["train", "mini", "--set", "context=train"], "--context"),
        "members": (["train", "mini", "-m", "ensemble", "--set", "members=abc"], "members=abc"),
        "pickled objects": (["predict", "MODEL", tmp_path / "objects.npz"], "objects.npz"),
    }


CASES = [
    "unknown task", "unknown method", "unknown setting", "setting without a value", "dof in covariance form", "tau",
    "device", "task file", "model", "folder without records", "missing picture", "empty picture", "text as array",
    "NaN pixels", "other shape", "pickled objects", "values out of range", "task name", "unreadable value",
    "context as a setting", "members", "folder as task", "file as model", "folder of runs as model",
    "folder without a model", "task of another shape", "task of other classes", "no method", "no class of the model",
    "class without pictures", "split of a task", "device to serve on", "address to serve on",
    "setting of no method",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_one_line_and_exit_code_two(case, trained, tmp_path, monkeypatch, capsys):
    """In this process: in one of its own each would wait for torch."""
    from stfseb import cli

    inputs = tmp_path / "inputs"
    inputs.mkdir()
    words, match = wrong(inputs)[case]
    model = trained[0] / "mini-map-seed0" / "model"
    out = tmp_path / "out"
    words = [{"MODEL": model, "RUNS": trained[0]}.get(word, word) for word in words]
    words += ["--out", out] if words[0] in ("compare", "train") else []
    monkeypatch.setattr(sys, "argv", ["stfseb", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert match in said
    assert len(said.strip().splitlines()) == 1, said
    assert not out.exists()


def test_an_unwritable_folder_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = stfseb("train", "mini", "--method", "map", "--epochs", 1, "--out", blocked)
    assert done.returncode == 2
    assert str(blocked) in done.stderr


def test_help_is_quick_and_imports_no_torch():
    for _ in range(10):  # the first time it is compiled, and other work may share the machine
        started = time.perf_counter()
        done = stfseb("--help")
        took = time.perf_counter() - started
        if took < 3.0:
            break
    assert done.returncode == 0
    for command in ("compare", "train", "evaluate", "predict", "data", "bench"):
        assert command in done.stdout
    assert took < 3.0  # a tenth of that on an idle machine; importing torch alone takes longer than this allows
    code = "import sys, stfseb.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_card_is_one_line(monkeypatch, capsys):
    from stfseb import cli

    def full(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.61 GiB. GPU 0 has 905.25 MiB free.")

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    line = capsys.readouterr().err
    assert line.startswith("stfseb: error: CUDA out of memory: free the card")
    assert line.count("\n") == 1
