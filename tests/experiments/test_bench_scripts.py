"""The scripts of benchmarks/ that need a card, tried in small without one."""

import json
import subprocess

import pytest
import torch

from repository_scripts import ROOT, script

FOLDER = ROOT / "benchmarks"


def test_all_ways_are_the_same_convolution():
    convolutions = script("convolutions", "benchmarks")
    torch.manual_seed(0)
    samples, rows, side, channels, outputs = 3, 2, 4, 16, 32
    x = torch.randn(samples, rows, side, side, channels, dtype=torch.float64)
    weight = torch.randn(samples, outputs, channels, 3, 3, dtype=torch.float64)
    expected = torch.stack(
        [torch.nn.functional.conv2d(r.permute(0, 3, 1, 2), w, padding=1) for r, w in zip(x, weight, strict=True)]
    )
    last = expected.permute(0, 1, 3, 4, 2)
    shapes = {
        "nchw": expected.permute(1, 0, 2, 3, 4).flatten(1, 2),
        "nhwc": expected.permute(1, 0, 2, 3, 4).flatten(1, 2),
        "streams": expected,
        "im2col": last.flatten(1, 3),
        "ours": last,
    }
    assert set(shapes) == set(convolutions.WAYS)
    for way, found in shapes.items():
        parts = convolutions.WAYS[way](x, weight)
        out = [part.forward() for part in parts]
        torch.testing.assert_close(torch.stack(out) if way == "streams" else out[0], found)
        sizes = [sum(part.inputs[i].numel() for part in parts) for i in (0, 1)]
        assert sizes == [x.numel(), weight.numel()]
        assert all(tensor.requires_grad for part in parts for tensor in part.inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole of it, with a card")
def test_convolutions_are_timed_and_written(tmp_path, monkeypatch, capsys):
    convolutions = script("convolutions", "benchmarks")
    monkeypatch.setattr(convolutions, "LAYERS", {"small": (4, 16, 16)})
    convolutions.main(["--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(convolutions.WAYS)
    assert all(row["microseconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    with pytest.raises(SystemExit):
        convolutions.main(["--only", "magic"])
    assert "unknown way 'magic'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole of it, with a card")
def test_the_throughput_of_a_population_is_written(tmp_path, monkeypatch, capsys):
    populations = script("populations", "benchmarks")
    monkeypatch.setattr(populations, "CUT", 128)
    words = ["--tasks", "mnist", "--widths", "1,2", "--method", "mcdropout", "--epochs", "4"]
    populations.main([*words, "--out", str(tmp_path / "found.json")])
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["command"] == (
        "python benchmarks/populations.py --tasks=mnist --widths=1,2 --method=mcdropout --epochs=4"
    )
    assert written["machine"]["torch"] == torch.__version__
    assert "commit" in written["code"]
    rows = written["rows"]
    # Of four epochs the first and the last are not marked; between marks lie the others of all runs.
    assert [(row["width"], row["epochs_timed"]) for row in rows] == [(1, 1), (2, 3)]
    assert rows[0]["over_first"] == 1.0
    assert rows[1]["over_first"] == pytest.approx(rows[1]["epochs_per_second"] / rows[0]["epochs_per_second"])
    with pytest.raises(SystemExit):
        populations.main(["--epochs", "3"])
    assert "--epochs 3: give at least 4" in capsys.readouterr().err


def test_the_loop_and_the_engine_are_timed_alternately_and_written(tmp_path, monkeypatch, capsys):
    folding = script("folding", "benchmarks")
    made = []
    naive, engine = folding.naive_step, folding.engine_step
    monkeypatch.setattr(folding, "naive_step", lambda *given: made.append("loop, float32") or naive(*given))

    def watched(*given):
        step = engine(*given)
        return lambda: made.append(f"engine, {given[-1]}") or step()

    monkeypatch.setattr(folding, "engine_step", watched)
    folding.main(["--samples", "2", "--steps", "2", "--batch", "4", "--out", str(tmp_path / "found.json")])
    written = json.loads((tmp_path / "found.json").read_text())
    ways = [row["way"] for row in written["rows"]]
    assert ways[:2] == ["loop, float32", "engine, float32"]
    assert made == [way for way in ways for _ in range(2)] * 3  # of which the first warms up
    assert written["command"] == "python benchmarks/folding.py --samples=2 --steps=2 --batch=4"
    loop = written["rows"][0]["step_s"]
    for row in written["rows"]:
        assert row["over_loop"] == pytest.approx(loop * row["steps_per_second"])
    assert len(capsys.readouterr().out.splitlines()) == len(ways)


def test_memory_given_back_and_kept_take_turns_in_fresh_processes(tmp_path, monkeypatch, capsys):
    memory = script("memory", "benchmarks")
    asked = []

    def run(command, **given):
        asked.append(command[-3:])
        found = {"step_s": len(asked) / 10, "prediction_s": 1.0, "peak_mb": 100.0}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(found))

    monkeypatch.setattr(memory.subprocess, "run", run)
    memory.main(["--rounds", "3", "--out", str(tmp_path / "found.json")])
    assert asked[:6] == [["small", "stfseb", way] for _ in range(3) for way in ("given back", "kept")]
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["command"] == "python benchmarks/memory.py --rounds=3 --steps=12"
    assert [row["step_s"] for row in written["rows"][:2]] == pytest.approx(
        [0.3, 0.4]
    )  # medians of turns 1, 3, 5 and 2, 4, 6
    assert len(capsys.readouterr().out.splitlines()) == len(written["rows"]) == 8


def test_memory_is_measured_in_both_ways(monkeypatch):
    memory = script("memory", "benchmarks")
    held = []
    kept = memory.memory_kept
    monkeypatch.setattr(memory, "memory_kept", lambda: held.append(1) or kept())
    for way in memory.WAYS:
        found = memory.measure("small", "stfseb", way, steps=1, images=8)
        assert found["step_s"] > 0
        assert found["prediction_s"] > 0
    assert held == [1]
