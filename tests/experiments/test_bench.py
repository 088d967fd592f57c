"""`stfseb bench` in small: its rows, table, JSON and plot, and what it refuses."""

import io
import json
import sys

import pytest
import torch
from rich.console import Console

from stfseb.errors import StfsebError
from stfseb.experiments import bench as module
from stfseb.experiments.bench import Shape, Sizes, bench, default_ways, make, measure
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.report.bench import bench_table, write_bench

RATES = {"operations": 1e10, "bytes": 1e9}
SMALL = Sizes(samples=2, batch_size=16, num_context=4, classes=3)
METHODS = ("stfseb", "mcdropout", "outlierexposure", "mfvi", "fseb", "gfsvi", "map")


@pytest.fixture
def small(monkeypatch):
    """Make both tasks so small that an epoch ends within a few steps."""
    shapes = {"mnist": Shape(40, 1, 8, SmallCNN, 0.5, False), "cifar10": Shape(40, 3, 8, DeepCNN, 0.1, True)}
    monkeypatch.setattr(module, "SHAPES", shapes)
    monkeypatch.setattr(module, "Sizes", lambda **sizes: Sizes(**{**SMALL.__dict__, **sizes}))
    module.Sizes.__dataclass_fields__ = Sizes.__dataclass_fields__
    monkeypatch.setattr(module, "GROWTH", {"samples": (1, 2), "batch_size": (8, 16)})
    monkeypatch.setattr(module, "rates", lambda _: RATES)
    monkeypatch.setattr("stfseb.report.bench.STANDARD", SMALL.__dict__)


def run(tasks=("mnist",), methods=("map",), ways=("eager",), **rest):
    said = []
    found = bench(list(tasks), list(methods), list(ways), device="cpu", seconds=0.0, announce=said.append, **rest)
    return found, said


@pytest.mark.parametrize("key", METHODS)
@pytest.mark.parametrize("way", ["naive", "fit"])
def test_every_method_is_measured_both_ways(small, key, way):
    found, said = run(tasks=("mnist", "cifar10"), methods=(key,), ways=(way,))
    assert [row.get("error") for row in found["rows"]] == [None, None]
    for row in found["rows"]:
        assert (row["method"], row["way"]) == (key, way)
        assert row["steps_timed"] >= 3
        assert row["seconds_per_epoch"] * row["steps_per_second"] == pytest.approx(40 / 16)
        assert row["floor_seconds"] == pytest.approx(max(row["flops"] / 1e10, row["bytes"] / 1e9))
        assert row["times_floor"] == pytest.approx(row["seconds_per_epoch"] / row["floor_seconds"])
    assert f"{found['rows'][0]['steps_timed']} steps timed" in said[0]
    assert "times its floor" in said[0]


def test_timing_goes_on_where_an_epoch_ends(small, monkeypatch):
    """40 images are two full minibatches of 16: 25 steps need a dozen epochs, and smaller last ones are not timed."""
    sizes = []

    def timed(step, device, seconds):
        for _ in range(25):
            step()
        return 0.5, 25

    step = module.make_engine

    def watched(*args, **settings):
        engine = step(*args, **settings)
        inner = engine.step
        monkeypatch.setattr(engine, "step", lambda x, y: sizes.append(len(x)) or inner(x, y))
        return engine

    monkeypatch.setattr(module, "_time_steps", timed)
    monkeypatch.setattr(module, "make_engine", watched)
    row = measure("mnist", "map", "eager", SMALL)
    assert sizes == [16] * 25
    assert (row["steps_timed"], row["seconds_per_epoch"]) == (25, 0.5 * 40 / 16)


def test_an_epoch_that_ends_within_the_time_does_not_end_the_measurement(small):
    row = measure("mnist", "map", "eager", SMALL, seconds=0.2)
    assert row["steps_timed"] > 2  # all that one epoch has


@pytest.mark.parametrize(("device", "expected"), [("cpu", (1.0, 3)), ("cuda", (1.0, 30))])
def test_on_the_card_steps_are_not_waited_for_one_by_one(monkeypatch, device, expected):
    """By a clock that steps alone move."""
    now, done = [0.0], []

    def passes(name, seconds):
        done.append(name)
        now[0] += seconds

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "_wait", lambda _: passes("wait", 0.0))
    assert module._time_steps(lambda: passes("step", 1.0), torch.device(device), 0.0) == expected
    assert done.count("wait") == 4  # before the first and after each of three
    assert done.count("step") == 2 + expected[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"methods": ("mapp",)}, "unknown method 'mapp': did you mean 'map'?"),
        ({"methods": ("map", "ensemble")}, "unknown method 'ensemble'"),
        ({"tasks": ("mnst",)}, "unknown task 'mnst': did you mean 'mnist'?"),
        ({"ways": ("naive", "eagre")}, "unknown way 'eagre': did you mean 'eager'?"),
        ({"ways": ("graph-bf16",)}, "way 'graph-bf16' needs a CUDA card and the device is cpu"),
    ],
)
def test_wrong_words_end_before_anything_is_measured(small, monkeypatch, words, message):
    monkeypatch.setattr(module, "rates", lambda _: pytest.fail("measured"))
    with pytest.raises(StfsebError, match=message.replace("?", r"\?")):
        run(**words)


@pytest.mark.parametrize(("option", "word"), [("--methods", "mapp"), ("--tasks", "mnst"), ("--ways", "eagre")])
def test_wrong_words_are_one_line_and_exit_2(monkeypatch, capsys, option, word):
    from stfseb import cli

    monkeypatch.setattr(sys, "argv", ["stfseb", "bench", "--device", "cpu", option, word])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert f"'{word}'" in said.err
    assert "did you mean" in said.err
    assert "ensemble" not in said.err  # it has no step of its own


def test_the_command_writes_table_json_and_plot(small, monkeypatch, capsys, tmp_path):
    from stfseb import cli

    words = ["bench", "--device", "cpu", "--methods", "map, ST-FS-EB", "--ways", "naive,fit", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["stfseb", *words, "--out", str(tmp_path / "found")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    said = capsys.readouterr()
    assert "floor" in said.out
    assert len(said.err.splitlines()) == 4
    written = json.loads((tmp_path / "found" / "bench.json").read_text())
    assert [(row["method"], row["way"]) for row in written["rows"]] == [
        (method, way) for method in ("map", "stfseb") for way in ("naive", "fit")
    ]
    fields = {"flops", "bytes", "floor_seconds", "times_floor", "steps_timed", "seconds_per_epoch", "engine"}
    assert all(fields <= set(row) for row in written["rows"])
    assert written["rates"] == RATES
    assert written["machine"]["device"].startswith("cpu")
    assert written["machine"]["processor"]
    assert set(written["code"]) == {"version", "commit", "modified"}
    assert written["command"] == (
        "stfseb bench --tasks mnist --methods map,stfseb --ways naive,fit --device cpu --seconds 0"  # no file of ours
    )
    assert (tmp_path / "found" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_where_everything_fails_the_command_does_too(small, monkeypatch, capsys):
    from stfseb import cli

    def fails(*_, **__):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr(module, "measure", fails)
    monkeypatch.setattr(sys, "argv", ["stfseb", "bench", "--device", "cpu", "--methods", "map", "--ways", "eager"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "failed: no such luck" in capsys.readouterr().err


def test_growth_is_measured_as_fit_trains(small):
    found, _ = run(methods=("map", "mcdropout"), ways=("fit",), grow=True)
    rows = [(row["method"], row["way"], row["samples"], row["batch_size"]) for row in found["rows"]]
    standard = [("map", "fit", 2, 16), ("mcdropout", "fit", 2, 16)]
    assert rows == [*standard, ("map", "fit", 1, 16), ("map", "fit", 2, 8)]  # what is measured already is not again
    assert all("error" not in row for row in found["rows"])


def test_fit_is_what_training_chooses(small, monkeypatch):
    asked = {}
    inner = module.make_engine

    def watched(*args, **settings):
        asked.update(settings)
        return inner(*args, **settings)

    monkeypatch.setattr(module, "make_engine", watched)
    measure("mnist", "map", "fit", SMALL, seconds=0.0)
    assert (asked["precision"], asked["capture"], asked["compiled"], asked["epochs"]) == ("auto", None, None, 100)


def test_a_run_of_fit_at_the_standard_sizes_is_worth_compiling():
    from stfseb.training.engine import worth_compiling

    for shape in module.SHAPES.values():
        assert worth_compiling(module.Protocol.epochs * (shape.images // Sizes().batch_size))


def test_a_batch_larger_than_the_data_is_refused(small):
    with pytest.raises(StfsebError, match="batch_size=41 exceeds the 40 images"):
        make("mnist", "map", Sizes(batch_size=41), torch.device("cpu"))


def test_the_default_ways_can_be_had():
    for device in ("cpu", "cuda"):
        for way in default_ways(device):
            module._check_way(way, device)


def row(way, seconds, **more):
    sizes = {"samples": 10, "batch_size": 128, "num_context": 32, "classes": 10}
    fixed = {"task": "mnist", "method": "map", "way": way, "steps_per_second": 7.0, "engine": "eager, bf16"}
    return {**fixed, "seconds_per_epoch": seconds, "peak_memory_mb": 12.0, **sizes, **more}


ROWS = [
    row("naive", 30.0, floor_seconds=0.5, times_floor=60.0),
    row("fit", 6.0, floor_seconds=0.5, times_floor=12.0),
    row("fit", 18.0, samples=20),
    row("fit", 24.0, num_context=512),
    {**row("eager", 1.0), "error": "the card is full"},
]


def printed(rows):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(bench_table(rows))
    return console.export_text()


def test_the_table_has_speed_up_and_distance_to_the_floor():
    text = printed(ROWS)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "map" in line]
    assert "x floor" in text
    assert cells[0] == ["mnist", "map", "naive", "30.000", "7.0", "1.0", "12", "0.5", "60.0"]
    assert cells[1] == ["mnist", "map", "fit", "6.000", "7.0", "5.0", "12", "0.5", "12.0"]
    assert cells[2] == ["mnist", "map", "fit samples=20", "18.000", "7.0", "", "12", "", ""]
    assert "failed: the card is full" in text
    assert "fit: eager, bf16" in text


def test_the_table_says_of_each_row_what_fit_chose_where_that_differs():
    text = printed([*ROWS, row("fit", 1.0, batch_size=512, engine="captured, bf16")])
    assert "fit (captured, bf16) batch_size=512" in text
    assert "fit (eager, bf16) samples=20" in text


def test_the_plot_has_bars_and_a_curve_for_each_size_that_grew(tmp_path):
    from stfseb.report.bench import _plot

    figure = _plot([row for row in ROWS if "error" not in row])
    bars, *curves = figure.axes
    assert [bar.get_width() for bar in bars.patches] == [30.0, 6.0]
    assert [text.get_text() for text in bars.texts] == ["30", "6"]
    assert list(bars.lines[0].get_xdata()) == [0.5, 0.5]  # the floors
    drawn = {ax.get_xlabel(): [tuple(point) for point in ax.lines[0].get_xydata()] for ax in curves}
    assert drawn == {"samples": [(10, 6), (20, 18)], "num context": [(32, 6), (512, 24)]}
    assert not _plot(ROWS[2:3]).axes[0].patches  # where every measurement at the standard sizes failed
    write_bench({"rows": ROWS[-1:]}, tmp_path)
    assert not (tmp_path / "bench.png").exists()  # nothing to draw
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["error"] == "the card is full"
