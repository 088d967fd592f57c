"""A run as plain data: the same run has the same name everywhere, another run another."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import Job, make_job, perform, perform_together
from stfseb.experiments.paper.plan import KINDS, Asked, make_plan
from stfseb.experiments.records import write_record
from stfseb.experiments.run import RunConfig, make_method
from stfseb.experiments.search.plan import make_plan as make_plan_of_search
from stfseb.methods.saving import load


def test_a_job_holds_the_preset_and_what_is_laid_over_it(tiny):
    job = make_job(tiny, "ST-FS-EB", 3, settings={"tau2": 7.0}, training={"epochs": 2})
    assert (job.method, job.seed, job.settings["tau2"]) == ("stfseb", 3, 7.0)
    assert job.training["epochs"] == 2
    assert job.training["batch_size"] == 32


@pytest.mark.parametrize("name", ["stfseb", "fseb", "gfsvi"])
def test_what_a_job_leaves_out_is_not_taken_from_the_preset(tiny, tmp_path, name):
    text = Path(tiny).read_text().replace("array: ", f"array: {Path(tiny).parent}/")
    file = tmp_path / "tiny.yaml"
    file.write_text(f"{text}presets: {{{name}: {{num_context: 4, context_copies: 2}}}}\n")
    with_copies, without = (make_job(str(file), name, settings=s) for s in ({}, {"context_copies": 0}))
    data = with_copies.load()
    assert make_method(data, with_copies.config("cpu")).settings.context_copies == 2
    assert make_method(data, without.config("cpu")).settings.context_copies == 0
    assert make_method(data, RunConfig(name)).settings.context_copies == 2  # laid over the preset, as by the user
    search = make_plan_of_search(str(file), name, "extended", settings={"context_copies": 0})
    assert make_method(data, search.job(search.draws(1)[0]).config("cpu")).settings.context_copies == 0
    member = {"of": name, "members": 2, "settings": {"context_copies": 0}}
    ensemble = make_method(data, make_job(str(file), "ensemble", settings=member).config("cpu"))
    assert ensemble.members[0].settings.context_copies == 0
    record = perform(without, tmp_path, data, device="cpu")
    assert record["settings"]["context_copies"] == 0
    assert not [note for note in record["notes"] if "widened" in note]


def test_names_tell_runs_apart_and_do_not_depend_on_where_the_task_lies(tiny, tmp_path):
    jobs = [
        make_job(tiny, "map", 0),
        make_job(tiny, "map", 1),
        make_job(tiny, "map", 0, settings={"sigma": 2.0}),
        make_job(tiny, "map", 0, training={"epochs": 2}),
        make_job(tiny, "map", 0, context="train"),
        make_job("mini", "map", 0),
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    copied = Job(**json.loads(json.dumps(jobs[0].__dict__)))
    assert copied.name == jobs[0].name
    assert copied.folder(tmp_path) == tmp_path / "runs" / "tiny" / copied.name


def test_an_edited_task_file_is_another_task(tiny, tmp_path):
    text = Path(tiny).read_text().replace("array: ", f"array: {Path(tiny).parent}/")
    file = tmp_path / "tiny.yaml"
    file.write_text(text)
    job = make_job(str(file), "map")
    file.write_text(f"title: Other words\n# and a remark\n{text}presets: {{mfvi: {{sigma: 2.0}}}}\n")
    assert make_job(str(file), "map").name == job.name
    file.write_text(text.replace("hidden: 8", "hidden: 16"))
    edited = make_job(str(file), "map")
    assert edited.name != job.name
    assert edited.load().task.network_settings == {"hidden": 16}
    with pytest.raises(StfsebError, match="has changed since the run was planned"):
        job.load()
    assert "definition" not in make_job("mini", "map").identity  # names of built-in tasks' runs stay


def test_an_ensemble_is_defined_by_its_members_preset(tiny, tmp_path):
    text = Path(tiny).read_text().replace("array: ", f"array: {Path(tiny).parent}/")
    names = []
    for sigma in ("1.0", "1.0", "2.0"):
        file = tmp_path / "tiny.yaml"
        file.write_text(f"{text}presets: {{map: {{sigma: {sigma}}}}}\n")
        names.append(make_job(str(file), "ensemble", settings={"members": 2}).name)
    assert names[0] == names[1] != names[2]
    job = make_job(tiny, "ensemble", settings={"members": 2, "settings": {"sigma": 3.0}})
    made = make_method(job.load(), job.config("cpu"))
    assert [member.settings.sigma for member in made.members] == [3.0, 3.0]


def test_unknown_names_are_refused(tiny):
    with pytest.raises(StfsebError, match="unknown task"):
        make_job("no-such-task", "map")
    with pytest.raises(StfsebError, match="unknown method"):
        make_job(tiny, "no-such-method")
    with pytest.raises(StfsebError, match=r"unknown setting 'sigmas': did you mean 'sigma'\?"):
        make_job(tiny, "map", settings={"sigmas": 1.0})
    with pytest.raises(StfsebError, match="unknown setting 'tau1'"):  # it is another method's
        make_job(tiny, "mcdropout", settings={"tau1": 1.0})
    with pytest.raises(StfsebError, match="unknown setting 'sigma': known are members, of, settings"):
        make_job(tiny, "ensemble", settings={"sigma": 1.0})
    with pytest.raises(StfsebError, match="unknown setting 'strength'"):
        make_job(tiny, "ensemble", settings={"settings": {"strength": 1.0}})
    with pytest.raises(StfsebError, match="unknown learnable setting 'nu'"):
        make_job(tiny, "stfseb", settings={"learn": ["nu"]})
    with pytest.raises(StfsebError, match="choose the context with --context"):
        make_job(tiny, "stfseb", settings={"context": "train"})


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        ("stfseb", {"dof_function": 3}, {"dof_function": 3.0}),
        ("stfseb", {"dof": 7}, {"dof": np.float64(7)}),
        ("stfseb", {"functional_scale": 0}, {"functional_scale": 0.0}),
        ("stfseb", {"prior_weight": 1}, {"prior_weight": 1.0}),
        ("stfseb", {"num_context": 16}, {"num_context": np.int64(16)}),
        ("stfseb", {"dof": math.inf}, {"dof": "inf"}),
        ("stfseb", {"learn": ["sigma", "dof"]}, {"learn": ("dof", "sigma")}),
        ("stfseb", {"learn": "tau, dof"}, {"learn": ["dof", "tau", "dof"]}),
        ("fseb", {"bias_variance": 1, "tau1": 2.0}, {"tau1": 2, "bias_variance": 1.0}),
        ("ensemble", {"settings": {"sigma": 2}}, {"of": "MAP", "settings": {"sigma": 2.0}}),
    ],
)
def test_equal_settings_are_one_run_however_they_are_written(tiny, method, one, other):
    jobs = [make_job(tiny, method, settings=settings) for settings in (one, other)]
    assert jobs[0].name == jobs[1].name
    assert jobs[0].name != make_job(tiny, method).name
    assert Job(**json.loads(json.dumps(jobs[0].__dict__))) == jobs[0]


def test_settings_in_normal_form_are_left_as_they_are():
    """So the names of runs that were done before settings had a normal form are theirs still."""
    tasks = {what: make_plan(what, Asked(seeds=(0,))).tasks for what in KINDS}
    # Task by task: a row may have other settings in each, as what a search chose.
    planned = [make_plan(what, Asked((task,), seeds=(0,))) for what in KINDS for task in tasks[what]]
    count = 0
    for plan in planned:
        variants = {v.key: v for v in plan.variants}
        for (task, key), (job,) in plan.jobs.items():
            if job.method == "ensemble":
                continue
            laid = {**load_task(task).presets.get(job.method, {}), **variants[key].settings}
            written = {k: "inf" if v == math.inf else v for k, v in laid.items()}
            if written.get("context_copies") == 0:  # no run from before there were copies has such an entry
                del written["context_copies"]
            assert json.dumps(job.settings, sort_keys=True) == json.dumps(written, sort_keys=True)
            count += 1
    assert count > 200


def test_values_are_judged_where_they_are_used(tiny):
    job = make_job(tiny, "stfseb", settings={"dof": -math.inf, "learn": None})
    with pytest.raises(StfsebError):
        make_method(job.load(), job.config("cpu"))


def test_a_run_alone_and_in_a_population_gives_the_same_numbers(tiny, tmp_path):
    jobs = [make_job(tiny, "mcdropout", seed, training={"epochs": 3}) for seed in (0, 1)]
    data = jobs[0].load()
    seen = []
    alone = [
        perform(job, tmp_path / "alone", data, device="cpu", after=lambda j, m: seen.append(m.key)) for job in jobs
    ]
    done = perform_together(jobs, tmp_path / "together", data, device="cpu", after=lambda j, m: seen.append(j.seed))
    together = {job.seed: record for job, record in done}
    assert seen == ["mcdropout", "mcdropout", 0, 1]
    for record in alone:
        other = together[record["seed"]]
        assert record["metrics"] == other["metrics"]
        assert record["job"] == other["job"]
    assert alone[0]["metrics"] != alone[1]["metrics"]
    for job in jobs:
        assert job.done(tmp_path / "alone")
        assert job.record(tmp_path / "together")["job"] == job.identity
        assert not (job.folder(tmp_path / "together") / "checkpoint").exists()


def test_records_are_small_and_what_is_large_lies_beside_them(tiny, tmp_path):
    job = make_job(tiny, "mcdropout", 0, training={"epochs": 2})
    record = perform(job, tmp_path, job.load(), device="cpu")
    folder = job.folder(tmp_path)
    written = json.loads((folder / "record.json").read_text())
    assert "images" not in written
    assert "held_out" not in written["calibration"]
    assert load(folder / "model").calibration["held_out"]["uncertainty"]  # other thresholds can still be asked for
    assert job.record(tmp_path) == {**written, "images": record["images"]}
    assert len(record["images"]["test"]["most"]) == 8
    assert (folder / "record.json").stat().st_size < 30_000
    # 100 epochs, the most that a run of the paper has, with as many digits as these.
    longest = {**written, "history": written["history"] * 50}
    assert write_record(tmp_path / "longest", longest).stat().st_size < 30_000
    (folder / "images.json").unlink()
    assert job.record(tmp_path) == written


def test_the_record_is_written_last(tmp_path, monkeypatch):
    from stfseb.experiments import records

    def full(path, text):
        raise StfsebError("cannot write: no space left on device")

    monkeypatch.setattr(records, "write_text", full)
    with pytest.raises(StfsebError, match="no space"):
        write_record(tmp_path, {"id": "a", "images": {"test": {}}})
    assert [path.name for path in tmp_path.iterdir()] == ["images.json"]


def test_a_run_that_was_broken_off_goes_on_to_the_same_numbers(tiny, tmp_path, monkeypatch):
    from stfseb.training.loop import Training

    job = make_job(tiny, "mcdropout", 0, training={"epochs": 6})
    data = job.load()
    whole = perform(job, tmp_path / "whole", data, device="cpu")
    real = Training.begin

    def begin(self, number, *more):
        if number == 4:
            raise RuntimeError("power cut")
        return real(self, number, *more)

    monkeypatch.setattr(Training, "begin", begin)
    with pytest.raises(RuntimeError, match="power cut"):
        perform(job, tmp_path / "broken", data, device="cpu")
    assert not job.done(tmp_path / "broken")
    monkeypatch.setattr(Training, "begin", real)
    resumed = perform(job, tmp_path / "broken", data, device="cpu")
    assert resumed["metrics"] == whole["metrics"]
