"""Mistyped command lines: one line on standard error, with the remedy, and exit code 2, whatever the command."""

import sys

import pytest
import typer

from stfseb import cli
from stfseb.ranges import RangeWarning


def leaves(command, path=()):
    """Yield every command that does something, with its path."""
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, command


ROOT = typer.main.get_command(cli.app)
COMMANDS = dict(leaves(ROOT))
NAMES = {" ".join(path): (list(path), command) for path, command in COMMANDS.items()}


def options(command):
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def numbers(command):
    """Return the options that take a number with a lower end."""
    low = {p.opts[0]: getattr(p, "min", None) for p in options(command)}
    if not any(value is not None for value in low.values()):
        low = {p.opts[0]: getattr(getattr(p, "type", None), "min", None) for p in options(command)}
    return {name: value for name, value in low.items() if value is not None}


def required(command):
    return [p for p in command.params if p.param_type_name == "argument" and p.required]


@pytest.fixture
def typed(monkeypatch, capsys):
    """Return a function that runs the command line and returns its one line of complaint."""

    monkeypatch.setattr(typer.main, "get_command", lambda _: ROOT)  # made once: it is most of the time

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["anything", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert err.startswith("stfseb: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err.removeprefix("stfseb: error: ").rstrip("\n")

    return run


def test_all_commands_are_in_the_table():
    assert {"compare", "train", "predict", "paper", "search", "serve", "status", "data list", "data show"} < set(NAMES)
    assert len(NAMES) >= 17


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_named_with_the_nearest(name, typed):
    path, command = NAMES[name]
    for option in options(command):
        right = option.opts[0]
        wrong = right[:3] + right[4:] + "q"  # a letter lost, another too many
        line = typed(*path, wrong, "3")
        assert f"'stfseb {name}' has no option {wrong}" in line
        if len(right) > 7:  # of --set, such a mistake leaves nothing
            assert f"did you mean {right}?" in line
    line = typed(*path, "--qqqqqqqqqqq")
    for option in options(command):
        assert option.opts[0] in line
    assert f"'stfseb {name} --help'" in line


@pytest.mark.parametrize("name", [name for name in NAMES if required(NAMES[name][1])])
def test_a_missing_argument_is_named_and_the_command_shown(name, typed):
    path, command = NAMES[name]
    arguments = [p.name.upper() for p in required(command)]
    line = typed(*path)
    assert line.startswith(f"{arguments[0]} is missing (")
    assert f"write stfseb {name} {arguments[0]}" in line


@pytest.mark.parametrize("name", NAMES)
def test_an_option_without_its_value_says_what_it_takes(name, typed):
    path, command = NAMES[name]
    for option in options(command):
        if getattr(option, "is_flag", False):
            if option.opts[0].startswith("--"):
                assert typed(*path, f"{option.opts[0]}=yes") == f"{option.opts[0]} takes no value: write it alone"
        else:
            assert typed(*path, option.opts[0]).startswith(f"{option.opts[0]} has no value: give ")


@pytest.mark.parametrize("name", [name for name in NAMES if numbers(NAMES[name][1])])
def test_a_number_that_is_none_or_too_small_is_quoted(name, typed):
    path, command = NAMES[name]
    words = ["x" for _ in required(command)]
    for option, low in numbers(command).items():
        for value in ("three", str(low - 1)):
            for given in ([option, value], [f"{option}={value}"]):
                line = typed(*path, *words, *given)
                assert line.startswith(f"{option} {value}: give a ")
                assert str(low) in line


@pytest.mark.parametrize("name", [n for n, (_, c) in NAMES.items() if not any(p.nargs == -1 for p in c.params)])
def test_a_word_too_many_is_named(name, typed):
    path, command = NAMES[name]
    words = ["x" for p in command.params if p.param_type_name == "argument"]
    line = typed(*path, *words, "surplus", "more")
    assert line.startswith(f"'surplus' is one word too many: write stfseb {name}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'? known are bench, calibrate"),
        (["data", "lst"], "unknown data command 'lst': did you mean 'list'? known are download, import, list"),
        (["compare", "mini", "--methods", "stfseb,", "map"], "'stfseb, map' has a space: write lists without"),
        (["compare", "-epochs", "3"], "has no option -epochs: did you mean --epochs?"),
        (["--seeds", "3", "compare"], "--seeds belongs after the command: write stfseb compare --seeds ..."),
        (["--versoin"], "'stfseb' has no option --versoin: did you mean --version?"),
        (["compare", "--seeds", "0"], "--seeds 0: give a whole number of at least 1"),
        (["compare", "--seed", "3"], "has no option --seed: did you mean --seeds?"),
        (["train", "--seeds", "3"], "has no option --seeds: did you mean --seed?"),
        (["train", "--seed", str(2**40)], f"--seed {2**40}: give a whole number from 0 to {2**31}"),
        (["train", "--checkpoint-minutes", "soon"], "--checkpoint-minutes soon: give a number of at least 0"),
        (["data", "show", "mini", "--columns", "90"], "--columns 90: give a whole number from 1 to 40"),
    ],
)  # fmt: skip
def test_plausible_mistakes(words, said, typed):
    assert said in typed(*words)


def test_the_version_and_the_short_help(monkeypatch, capsys):
    from stfseb import __version__

    for words, said in ((["--version"], f"stfseb {__version__}\n"), (["data", "show", "-h"], "--columns")):
        monkeypatch.setattr(sys, "argv", ["stfseb", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (PermissionError(13, "Permission denied", "/there/runs"), "/there/runs: permission denied: give another place"),
        (OSError(28, "No space left on device"), "a file: no space left on device: free some space"),
    ],
)
def test_what_the_disk_refuses_is_one_line(raised, said, monkeypatch, typed):
    def refused(**_):
        raise raised

    monkeypatch.setattr(cli, "app", refused)
    assert said in typed("train")


def test_other_errors_keep_their_traceback(monkeypatch):
    def broken(**_):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError, match="a fault of ours"):
        cli.main()


def test_our_warnings_are_one_line_and_others_keep_their_place():
    ours = cli._format_warning(RangeWarning("wide"), RangeWarning, "inside.py", 3)
    assert ours == "stfseb: warning: wide\n"
    theirs = cli._format_warning(UserWarning("theirs"), UserWarning, "theirs.py", 4)
    assert theirs.startswith("theirs.py:4: UserWarning: theirs")
