"""A search as a person runs it, on a task of a few real images; what its trials see; what they are measured by."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from search_helpers import plan, tiny_task, trial
from sklearn.metrics import log_loss, roc_auc_score

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.machine import code_version
from stfseb.experiments.run import make_method
from stfseb.experiments.search import Pruning, make_plan, read_search, search
from stfseb.experiments.search.outcome import outcome_of, preset
from stfseb.experiments.search.rules import Images
from stfseb.experiments.search.store import Claim
from stfseb.experiments.search.trials import Trainer, measure, search_data
from stfseb.report.search import search_figure, search_in_words, search_table


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return str(tiny_task(tmp_path_factory.mktemp("task"), train=96, validation=64, context=80, epochs=1))


def test_a_search_from_the_command_to_the_files_and_again(task, stfseb, tmp_path):
    words = ["search", task, "--trials", 3, "--space", "extended", "--out", tmp_path, "--device", "cpu"]
    code, out, err = stfseb(*words)
    assert code == 0, err
    folder = tmp_path / "searches" / "tiny-stfseb-extended"
    assert f"Written to {folder}: search.json, preset.yaml, search.png, search.pdf" in out
    assert "3 trials finished (3 complete)" in out
    assert "…" not in out  # the table has room on a narrow screen
    assert err.count("best so far: ") == 3
    assert "1/3 · #0 dof=" in err
    assert " left\n" in err

    assert list((folder / "trials").iterdir()) == []  # checkpoints go when their trials are done
    found = read_search(folder)
    assert found == read_search(folder / "search.json")
    assert found["counts"] == {"complete": 3, "pruned": 0, "diverged": 0, "failed": 0, "repeats": 0}
    plan = make_plan(task, "stfseb", "extended")
    assert [t["params"] for t in found["trials"]] == plan.draws(3)
    lowest = min(found["trials"], key=lambda t: t["nll"])
    assert found["choices"]["paper"]["trial"] == lowest["index"]
    assert found["choices"]["paper"]["settings"] == {"num_context": 32, **lowest["params"]}
    for one in found["trials"]:
        assert one["nll"] == pytest.approx(min(one["history"]["nll"]), abs=1e-6)
        assert len(one["history"]["nll"]) == one["epochs"] == 1
        assert 0 <= one["metrics"]["tempered_auroc"] <= 1
        assert one["code"] == code_version()  # of the worker that trained it, not of the one that wrote the file
        assert one["device"].startswith("cpu: ")

    # What was found can be put into a task file, and is then what runs use.
    presets = yaml.safe_load((folder / "preset.yaml").read_text())["paper"]["presets"]
    assert presets["stfseb"] == found["choices"]["paper"]["settings"]
    assert all(isinstance(v, int | float) for v in presets["stfseb"].values())

    code, out, err = stfseb(*words)  # nothing is trained twice
    assert code == 0
    assert "3 of 3 trials are finished already" in err
    assert "best so far" not in err
    assert read_search(folder)["trials"] == found["trials"]
    code, shown, _ = stfseb("search", "--show", folder)
    assert code == 0
    assert shown == out[: out.index("Written to")]


def test_what_a_trial_may_see(task):
    data = load_task(task).load()
    material = search_data(data)
    assert material.data.ood == {}
    assert material.data.test is material.data.validation
    back, rest = material.held_back, material.data.context
    assert (len(back), len(rest)) == (40, 40)  # half of so few; of many a tenth, and 500 at least
    rows = {image.numpy().tobytes() for image in rest.images}
    assert not any(image.numpy().tobytes() in rows for image in back.images)
    assert rows | {image.numpy().tobytes() for image in back.images} == {
        image.numpy().tobytes() for image in data.context.images
    }
    # Methods with context images train on the rest, and the same images are held back from all others.
    method = make_method(material.data, make_plan(task, "stfseb").job({}).config("cpu"))
    assert len(method.context.images) == 40
    assert search_data(load_task(task).load()).held_back.fingerprint == back.fingerprint
    assert set(material.facts()) == {"train", "validation", "context", "held_back"}


def test_how_many_context_images_are_held_back(mini, task):
    data = load_task(task).load()

    def held(count):
        from dataclasses import replace

        pool = mini("kmnist", 100)
        images = pool.take(torch.arange(count) % 100)
        return len(search_data(replace(data, context=images)).held_back)

    assert [held(count) for count in (80, 2000, 10_000)] == [40, 500, 1000]
    with pytest.raises(StfsebError, match="1 images are too few"):
        held(1)


def test_with_train_context_nothing_is_held_back_and_the_search_says_so(task, stfseb, tmp_path):
    words = ["search", task, "--method", "mcdropout", "--trials", 1, "--context", "train", "--out", tmp_path, "-q"]
    code, out, err = stfseb(*words)
    assert code == 0
    assert not err
    assert "no held-back context images" in out
    (folder,) = (tmp_path / "searches").iterdir()
    assert "search.png" not in out
    (one,) = read_search(folder)["trials"]
    assert one["metrics"]["tempered_auroc"] is None


def test_measures_against_scikit_learn(task):
    material = search_data(load_task(task).load())
    method = make_method(material.data, make_plan(task, "mcdropout").job({}).config("cpu"))
    with torch.no_grad():
        method.net(torch.zeros(1, 1, 28, 28))
        for parameter in method.net.parameters():
            parameter.mul_(1.5)  # farther from chance
    validation, back = material.data.validation, material.held_back
    found = measure(method, validation, back, 4)

    raw = {id(images): method.sample_logits(images.images, 4, seed=0).double().numpy() for images in (validation, back)}

    def probabilities(images, temperature):
        values = np.exp(raw[id(images)])
        powers = (values / values.sum(-1, keepdims=True)).mean(0) ** (1 / temperature)
        return powers / powers.sum(-1, keepdims=True)

    labels = validation.labels.numpy()
    grid = np.exp(np.linspace(-5, 5, 1001))
    losses = [log_loss(labels, probabilities(validation, t), labels=range(10)) for t in grid]
    assert found["tempered_nll"] == pytest.approx(min(losses), rel=1e-5)
    for prefix, temperature in (("", 1.0), ("tempered_", found["temperature"])):
        inside, outside = (probabilities(images, temperature) for images in (validation, back))
        assert found[f"{prefix}nll"] == pytest.approx(log_loss(labels, inside, labels=range(10)), rel=1e-9)
        each = -np.log(inside[np.arange(len(labels)), labels])
        assert found[f"{prefix}nll_se"] == pytest.approx(each.std(ddof=1) / math.sqrt(len(labels)), rel=1e-9)
        scores = -np.concatenate([inside.max(1), outside.max(1)])
        is_outside = np.arange(len(scores)) >= len(inside)
        assert found[f"{prefix}auroc"] == pytest.approx(roc_auc_score(is_outside, scores), abs=1e-12)
        assert found[f"{prefix}accuracy"] == (inside.argmax(1) == labels).mean()


def run_one(task, pruning=None, **training):
    plan = make_plan(task, "mcdropout", training={"epochs": 3, **training})
    trainer = Trainer(plan, search_data(load_task(task).load()), pruning=pruning or Pruning())
    ((_, result),) = trainer([Claim(0, {"sigma": 1.0}, 0, 0)])
    return result


def test_a_hopeless_trial_ends_early_with_its_reason(task):
    result = run_one(task, Pruning(warmup=1, collapse_epochs=1, collapse_margin=10.0))
    assert (result["outcome"], result["epochs"]) == ("pruned", 1)
    assert result["reason"].startswith("collapsed: validation NLL 2.")
    assert "metrics" not in result


def test_a_trial_that_diverges_is_told_with_its_reason(task):
    result = run_one(task, lr=1e30)
    assert result["outcome"] == "diverged"
    assert "nan" in result["reason"] or "inf" in result["reason"] or "finite" in result["reason"]
    json.dumps(result, allow_nan=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trials_as_a_population_on_the_card(task, tmp_path):
    plan = make_plan(task, "stfseb", "extended", training={"epochs": 2})
    found = search(plan, 5, tmp_path, device="cuda", width=2)
    assert found["counts"]["complete"] + found["counts"]["diverged"] == 5
    alone = search(plan, 5, tmp_path / "alone", device="cuda", width=1)
    for one, other in zip(found["trials"], alone["trials"], strict=True):
        assert one["params"] == other["params"]
        assert one["nll"] == pytest.approx(other["nll"], rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "stfse"], "unknown method 'stfse': did you mean 'stfseb'?"),
        (["--method", "ensemble"], "an ensemble has no settings of its own to search"),
        (["--space", "wide"], "unknown search space 'wide'"),
        (["--trials", 0], "--trials 0: give at least 1"),
        (["--storage", "study.db"], "storage 'study.db' is not a URL: write sqlite:///FILE"),
        (["--storage", "postgresql://me:hunter2@127.0.0.1:9/x"], "check that it runs"),
        (["--show", "nowhere"], "search nowhere does not exist: give the folder that 'stfseb search' named"),
        (["--show", "."], f"folder {Path.cwd()} holds no search.json: give the folder that 'stfseb search' named"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(task, stfseb, tmp_path, words, message):
    code, out, err = stfseb("search", task, "--out", tmp_path, *words)
    assert code == 2
    assert not out
    assert message in err
    assert err.count("\n") == 1
    assert "hunter2" not in err


def test_a_file_that_is_not_a_search(tmp_path):
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(StfsebError, match="is not a search"):
        read_search(tmp_path)
    (tmp_path / "search.json").write_text('{"format": 99, "trials": [], "choices": {}}')
    with pytest.raises(StfsebError, match="newer format"):
        read_search(tmp_path)


def hand_made(*trials, choices):
    return {
        "study": "s",
        "task_title": "Title",
        "plan": {"task": "t", "method": "stfseb", "choices": {"tau2": [1.0]}},
        "asked": len(trials),
        "counts": {"complete": len(trials), "pruned": 0, "diverged": 0, "failed": 0, "repeats": 0},
        "choices": choices,
        "trials": list(trials),
    }


def test_table_words_and_figure_show_the_choices():
    trials = [trial(index, 0.3 + index / 10) for index in range(15)]
    choices = {"paper": {"trial": 0, "why": "low"}, "ours": {"trial": 14, "why": "high"}}
    choices["level"] = {"trial": 0, "why": "both"}
    found = hand_made(*trials, choices=choices)
    table = search_table(found)
    assert table.row_count == 11  # ten of the lowest NLL, and the choice that is not among them
    assert [line.partition(",")[0] for line in search_in_words(found)[1:]] == [
        "paper: trial 0",
        "ours: trial 14",
        "level: trial 0",
    ]
    figure = search_figure(found)
    (ax,), (legend,) = figure.axes, figure.legends
    assert len(ax.collections[0].get_offsets()) == 15
    assert [text.get_text() for text in legend.get_texts()][-3:] == ["paper", "ours", "level"]
    assert search_figure(hand_made(trial(0, 0.3, auroc=None), choices={})) is None


@pytest.mark.parametrize("width", [60, 79, 80, 101, 102, 140])
def test_no_number_of_the_table_is_cut(width):
    found = hand_made(trial(123456, 0.3), choices={"paper": {"trial": 123456, "why": ""}})
    screen = Console(width=width, file=io.StringIO())
    screen.print(search_table(found, width))
    text = screen.file.getvalue()
    assert "…" not in text
    assert ("ECE" in text) == (width >= 80)  # the widths of the columns and what stands between them


def test_a_search_in_which_nothing_ended_well():
    lost = {"index": 0, "params": {"tau2": 1.0}, "outcome": "diverged", "reason": "nan", "epochs": 0, "seconds": 0.0}
    nothing = {"trial": None, "why": "no trial was trained to its end"}
    found = hand_made(lost, choices={"paper": nothing, "ours": nothing})
    found["counts"] |= {"complete": 0, "diverged": 1}
    assert search_figure(found) is None
    assert search_table(found).row_count == 0
    assert "1 trial finished (1 diverged)" in search_in_words(found)[0]
    assert yaml.safe_load(preset(found)) is None


def test_a_search_in_which_all_is_at_chance_says_that_its_choices_mean_nothing():
    about = {"title": "T", "classes": 10, "images": Images(10, 10), "notes": ["a note"], "more": {}}
    chance = math.log(10)
    for nlls, said in (((chance, chance - 0.009, 2.5), 1), ((chance, chance - 0.011), 0), ((), 0)):
        trials = [trial(index, nll) for index, nll in enumerate(nlls)]
        first, *more = outcome_of(plan(), trials, 3, **about)["notes"]
        assert first == "a note"
        assert len(more) == said
        assert all(
            line.startswith("no trial did better than chance (validation NLL of ln 10 = 2.303)") for line in more
        )


def test_presets_are_numbers_to_yaml():
    settings = {"sigma": 1e-06, "tau1": 1e22, "dof": math.inf, "num_context": 32, "kernel": "rbf", "tau2": 0.5}
    choices = {"paper": {"trial": 0, "why": "low", "settings": settings}}
    text = preset(hand_made(trial(0, 0.3), choices=choices))
    assert yaml.safe_load(text)["paper"]["presets"]["stfseb"] == settings
