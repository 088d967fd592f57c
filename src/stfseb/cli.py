"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from stfseb.commands_evaluate import evaluate
from stfseb.commands_predict import predict
from stfseb.errors import StfsebError

app = typer.Typer(
    name="stfseb",
    help="Neural networks that know what they do not know: train, compare and use methods for uncertainty.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

TaskArgument = Annotated[str, typer.Argument(help="A task: mini, mnist, fmnist, cifar10, ... or your own YAML file.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="At most this many epochs; by default the task's own.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows of a minibatch; by default the task's own.")]
Out = Annotated[Path, typer.Option(help="Where the folder of results is made.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
Context = Annotated[
    str | None,
    typer.Option(help="A data set, 'train' (training images) or 'distorted' (copies of these) as context."),
]
Network = Annotated[
    Path | None, typer.Option(help="The Python file of the model's network, where that is one of your own.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def _print_version(asked: bool) -> None:
    if asked:
        from stfseb._version import __version__

        print(f"stfseb {__version__}")
        raise typer.Exit


@app.callback()
def _every(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command()
def compare(
    task: TaskArgument = "mini",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "stfseb,mcdropout,map",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ..., each method once with each.")] = 1,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of a method, METHOD.NAME=VALUE (stfseb.tau2=10); repeatable."),
    ] = None,
    context: Context = None,
    device: Device = None,
    out: Out = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Go on in this folder of a comparison that was stopped.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train several methods on a task and set them side by side: table, plots and a page.

    `stfseb compare` alone takes the embedded task `mini`: real Fashion-MNIST images in small, handwritten
    digits and printed letters as the unfamiliar ones. It takes a few minutes on two CPU cores.
    """
    from rich.console import Console

    from stfseb.commands_paper import words
    from stfseb.data.tasks import load_task
    from stfseb.experiments import compare as comparison
    from stfseb.experiments.records import new_folder
    from stfseb.report.page import write_report
    from stfseb.report.tables import cost_table, main_table

    console = Console(stderr=True)
    data = load_task(task).load(context=context)
    overrides = _assignments(set_ or [])
    base = _config("", 0, {}, device, epochs=epochs, batch_size=batch_size)
    runs = comparison.plan(list(words(methods)), range(seeds), overrides, base)
    notes = comparison.check(data, runs)
    for note in (*data.notes, *notes):
        console.print(f"note: {note}", style="dim", highlight=False)
    if resume is not None and not resume.is_dir():
        raise StfsebError(f"--resume {resume}: there is no such folder; leave it out to start a new comparison")
    folder = resume or new_folder(out, data.task.name)

    def announce(text: str) -> None:
        if not quiet:
            console.print(text, highlight=False, soft_wrap=True)

    records = comparison.compare(data, runs, folder, announce=announce, progress=not quiet)
    page = write_report(records, folder, f"{data.task.title}: {len(runs)} runs")
    screen = Console()
    screen.print(main_table(records).to_rich(screen.width))
    screen.print(cost_table(records).to_rich(screen.width))
    screen.print(f"Report: {page}", highlight=False, soft_wrap=True)
    screen.print(f"Plots, tables, models and records: {folder}", highlight=False, soft_wrap=True)


@app.command()
def train(
    given: typer.Context,
    task: TaskArgument = "mini",
    method: Annotated[str, typer.Option("--method", "-m", help="The method to train.")] = "stfseb",
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of weights, order, masks and context.")] = 0,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method, NAME=VALUE (tau2=10); repeatable.")
    ] = None,
    context: Context = None,
    device: Device = None,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder; it knows its task, method and settings.")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(min=0, help="Keep the run on disk this often; by default after every epoch.")
    ] = None,
) -> None:
    """Train one method on a task; save the model and a record of the run.

    The run is kept on disk while it trains: after Ctrl-C, SIGTERM or a crash, `stfseb train --resume FOLDER` goes on
    from there and ends with the numbers of a run that was never stopped.
    """
    from rich.console import Console

    from stfseb.experiments.resume import ResumableRun
    from stfseb.report.tables import main_table

    if resume is None:
        settings = settings_from(method, set_)
        config = _config(method, seed, settings, device, epochs=epochs, batch_size=batch_size)
        run = ResumableRun.new(out, task, config, context)
    else:
        _check_alone_with_resume(given)
        run = ResumableRun.of(resume, None if device is None else _device(device))
    record = run.go_on(
        progress=not quiet, checkpoint_every=None if checkpoint_minutes is None else 60 * checkpoint_minutes
    )
    screen = Console()
    screen.print(main_table([record]).to_rich(screen.width))
    for note in record["notes"]:
        screen.print(f"note: {note}", style="dim", highlight=False)
    screen.print(f"Model: {run.folder / 'model'}", highlight=False, soft_wrap=True)
    screen.print(f"Record: {run.folder / 'record.json'}", highlight=False, soft_wrap=True)


app.command()(evaluate)


app.command()(predict)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="A model folder that 'train' or 'compare' wrote; it is changed.")],
    images: Annotated[
        str, typer.Argument(help="Labelled images training has not seen: a folder per class, an .npz, or a set's name.")
    ],
    coverage: Annotated[float, typer.Option(help="How often the set of plausible classes holds the true one.")] = 0.95,
    answer: Annotated[
        float, typer.Option(help="The fraction of familiar images to answer; abstain from others.")
    ] = 0.9,
    false_alarms: Annotated[float, typer.Option(help="The fraction of familiar images called unfamiliar.")] = 0.05,
    probabilities: Annotated[
        str | None, typer.Option(help="Also calibrate the probabilities: temperature or isotonic.")
    ] = None,
    network: Network = None,
) -> None:
    """Set up when a model abstains, and its sets of plausible classes, on labelled images of your own."""
    for option, value in (("--coverage", coverage), ("--answer", answer), ("--false-alarms", false_alarms)):
        _check_fraction(option, value)
    from stfseb.experiments.calibrate import calibrate_model
    from stfseb.experiments.models import chance_in_words
    from stfseb.experiments.predict import rules_in_words

    method, count = calibrate_model(
        model,
        images,
        coverage=coverage,
        answer=answer,
        false_alarms=false_alarms,
        probabilities=probabilities,
        network=network,
    )
    if note := chance_in_words(method, model):
        print(f"note: {note}", file=sys.stderr)
    print(f"Calibrated on {count} images. {rules_in_words(method)}")


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder of results that 'compare', 'train', 'paper' or 'search' wrote.")
    ],
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
) -> None:
    """Make the page, plots and tables of a folder of results anew from its records and searches."""
    from stfseb.report.page import title_for, write_report
    from stfseb.report.reading import read_folder

    records, searches = read_folder(folder)
    counts = f"runs: {len(records)}, searches: {len(searches.found)}"  # of hundreds it takes most of a minute
    print(f"writing tables, figures and the page ({counts})", file=sys.stderr, flush=True)
    print(f"Report: {write_report(records, folder, title or title_for(folder), searches=searches)}")


def _mount() -> None:
    from stfseb.commands_bench import bench
    from stfseb.commands_export import export
    from stfseb.commands_paper import paper
    from stfseb.commands_search import search
    from stfseb.commands_status import status
    from stfseb.data.commands import app as data_app
    from stfseb.serving.commands import serve

    app.add_typer(data_app, name="data")
    app.command()(bench)
    app.command()(export)
    app.command()(search)
    app.command()(paper)
    app.command()(serve)
    app.command()(status)


_mount()


def settings_from(method: str, items: list[str] | None) -> dict[str, Any]:
    """Turn NAME=VALUE of one method into {name: value}."""
    found: dict[str, Any] = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not (equals and name):
            raise StfsebError(f"--set {item}: write NAME=VALUE, one setting of {method}")
        found[name] = _value(item, value)
    return found


def _assignments(items: list[str]) -> dict[str, dict[str, Any]]:
    """Turn METHOD.NAME=VALUE into {method: {name: value}}."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        left, equals, value = item.partition("=")
        method, dot, name = left.partition(".")
        if not (equals and dot and method and name):
            raise StfsebError(f"--set {item}: write METHOD.NAME=VALUE, a setting of one of the methods")
        found.setdefault(method, {})[name] = _value(item, value)
    return found


def _value(item: str, text: str) -> Any:
    """Read a setting's value as YAML (numbers, inf, words)."""
    import yaml

    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise StfsebError(f"--set {item}: the value cannot be read") from error
    if isinstance(read, str):
        with suppress(ValueError):
            return float(text)  # inf, and 1e-3, which YAML takes for words
    return read


def _check_alone_with_resume(given: typer.Context) -> None:
    """Raise if an option that defines a run was given beside --resume, whose run has its own."""
    for parameter in given.command.params:
        source = given.get_parameter_source(parameter.name or "")
        own = parameter.name not in ("resume", "device", "quiet", "checkpoint_minutes")
        if own and source is not None and source.name == "COMMANDLINE":
            name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
            raise StfsebError(
                f"{name} cannot be given with --resume: the run in that folder has its own; leave {name} out"
            )


def _check_fraction(option: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise StfsebError(f"{option} {value:g}: give a fraction between 0 and 1")


def _device(name: str | None) -> str:
    from stfseb.experiments.run import default_device, usable_device

    return usable_device(name or default_device())


def _config(method: str, seed: int, settings: dict[str, Any], device: str | None, **training: int | None) -> Any:
    """Return a run's config; of its training what was given, over the task's own."""
    from stfseb.experiments.run import RunConfig

    training = {name: value for name, value in training.items() if value is not None}
    return RunConfig(method=method, seed=seed, settings=settings, training=training, device=_device(device))


_format_others = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return our own warnings as a line without the place in the code, others as ever."""
    if category.__module__.startswith("stfseb."):
        return f"stfseb: warning: {message}\n"
    return _format_others(message, category, filename, lineno, line)


def main() -> None:
    """Run the command line; the user's own mistakes end in one line and exit code 2, signals in 130 or 143."""
    warnings.formatwarning = _format_warning
    try:
        code = app(prog_name="stfseb", standalone_mode=False)
    except Exception as error:
        from stfseb.usage import ending

        code, line = ending(error, lambda: typer.main.get_command(app), sys.argv[1:])
        if code is None:
            raise
        if line:
            print(f"stfseb: {line}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
