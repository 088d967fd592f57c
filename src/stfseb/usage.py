"""How a command ends that cannot go on: in one line with the remedy.

Of a usage error everything is read off the command, the words that were typed and the kind of error, so that the
line is the same whichever version of typer raised it.
"""

from __future__ import annotations

import difflib
import errno
import re
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

_RIGHTS = "give another place, or the right to read and write there"
_ROOM = "free some space or give a folder on another disk; what is finished is kept"
_PLACE = "give another name"
_DISK = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.ENOTDIR: _PLACE,
    errno.EISDIR: _PLACE,
    errno.ENAMETOOLONG: _PLACE,
}


def ending(error: Exception, root: Callable[[], Any], words: list[str]) -> tuple[int | None, str]:
    """Return the exit code and the line that a command ends with; no code where the fault is the program's.

    Args:
        error: what was raised.
        root: makes the command that holds all others.
        words: what was typed after the program's name.
    """
    if isinstance(error, StfsebError):
        code = getattr(error, "exit_code", 2)
        return code, f"{'error: ' if code == 2 else ''}{error}"
    if hasattr(error, "format_message"):  # typer's, which is click's own class or typer's copy of it
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `stfseb` has printed its help
            return 2, ""
        return 2, f"error: {usage_line(root(), words, error)}"
    if isinstance(error, OSError) and error.errno in _DISK:
        return 2, f"error: {error.filename or 'a file'}: {(error.strerror or '').lower()}: {_DISK[error.errno]}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        what = str(error).partition(". ")[0]
        remedy = "free the card of other programs, or lower --width or --processes; what is finished is kept"
        return 1, f"error: {what}: {remedy}"
    return (130 if type(error).__name__ == "Abort" else None), ""


def usage_line(root: Any, words: list[str], error: Any) -> str:
    """Return the line for a usage error.

    Args:
        root: the command that holds all others.
        words: what was typed after the program's name.
        error: what typer raised; its class, and the option or parameter that it names, are looked at.
    """
    command, path, rest = _reached(root, words)
    kind = type(error).__name__
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return str(unknown(" ".join([*path[1:], "command"]), rest[0], command.commands))
    if kind == "NoSuchOption":
        return _no_such_option(command, path, rest, error.option_name)
    if kind == "BadOptionUsage":
        option = next((p for p in _options(command) if error.option_name in _names(p)), None)
        if option is not None and getattr(option, "is_flag", False):
            return f"{error.option_name} takes no value: write it alone"
        return f"{error.option_name} has no value: {_wanted(option)}"
    parameter = getattr(error, "param", None)
    if kind == "MissingParameter" and parameter is not None:
        what = (getattr(parameter, "help", None) or "").rstrip(".")
        return f"{_shown(parameter)} is missing{f' ({what})' if what else ''}: write {_usage(command, path)}"
    if kind == "BadParameter" and parameter is not None:
        return f"{_shown(parameter)} {_given(parameter, rest)}: {_wanted(parameter)}"
    if extra := re.search(r"extra argument\S* \((.*)\)", error.format_message()):
        first = _first_of(extra[1], rest)
        before = rest[rest.index(first) - 1] if first in rest[1:] else ""
        if before.endswith(","):
            return f"'{before} {first}' has a space: write lists without, {before}{first}"
        return f"'{first}' is one word too many: write {_usage(command, path)}"
    said = " ".join(error.format_message().split()).rstrip(".")
    return f"{said}: see '{' '.join(path)} --help'"


def _reached(root: Any, words: list[str]) -> tuple[Any, list[str], list[str]]:
    """Return the command that the words lead to, their path, and the words after it."""
    command, path = root, ["stfseb"]
    for index, word in enumerate(words):
        if word not in getattr(command, "commands", {}):
            return command, path, words[index:]
        command = command.commands[word]
        path.append(word)
    return command, path, []


def _no_such_option(command: Any, path: list[str], rest: list[str], name: str) -> str:
    known = {name.lstrip("-"): name for p in _options(command) for name in _names(p) if name.startswith("--")}
    if not name.startswith("--"):  # of '-epochs', typer looks at the first letter alone
        typed = [word for word in rest if word.startswith("-") and not word.startswith("--") and name[1:] in word]
        name = typed[0] if typed else name
    for word in rest if hasattr(command, "commands") else []:  # `stfseb --seeds 3 compare`
        if any(name in _names(p) for p in getattr(command.commands.get(word), "params", ())):
            return f"{name} belongs after the command: write {' '.join([*path, word, name])} ..."
    bare = name.lstrip("-").partition("=")[0].lower()
    near = difflib.get_close_matches(bare, known, n=1) if len(bare) > 1 else []
    remedy = f"did you mean {known[near[0]]}?" if near else f"its options are {', '.join(sorted(known.values()))};"
    return f"'{' '.join(path)}' has no option {name}: {remedy} '{' '.join(path)} --help' explains all"


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option"]


def _names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _shown(parameter: Any) -> str:
    return str(parameter.name).upper() if parameter.param_type_name == "argument" else str(parameter.opts[0])


def _usage(command: Any, path: list[str]) -> str:
    pieces = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = _shown(parameter) + ("..." if parameter.nargs == -1 else "")
            pieces.append(name if parameter.required else f"[{name}]")
    return " ".join([*path, *pieces, "[OPTIONS]"])


def _given(parameter: Any, rest: list[str]) -> str:
    """Return the value that was typed for an option; the last one counts."""
    for index in reversed(range(len(rest))):
        for name in _names(parameter):
            if rest[index] == name and index + 1 < len(rest):
                return rest[index + 1]
            joined = f"{name}=" if name.startswith("--") else name
            if rest[index].startswith(joined):
                return rest[index].removeprefix(joined)
    return ""


def _wanted(parameter: Any) -> str:
    """Say what an option takes."""
    if parameter is None:
        return "give one"
    kind = getattr(parameter, "type", None)
    named = getattr(parameter, "type_descriptor", None)
    annotation = getattr(named, "annotation", getattr(kind, "name", ""))
    low, high = (
        getattr(parameter, end, None) if getattr(parameter, end, None) is not None else getattr(kind, end, None)
        for end in ("min", "max")
    )
    if annotation is int or str(annotation).startswith("int"):
        what = "a whole number"
    elif annotation is float or str(annotation).startswith("float"):
        what = "a number"
    else:
        return f"give one ({(getattr(parameter, 'help', None) or 'see --help').rstrip('.')})"
    if low is not None and high is not None:
        return f"give {what} from {low} to {high}"
    return f"give {what}" + (f" of at least {low}" if low is not None else f" of at most {high}" if high else "")


def _first_of(listed: str, rest: list[str]) -> str:
    """Return the first extra argument of a message that lists them with spaces between."""
    for word in rest:
        if word and (listed == word or listed.startswith(f"{word} ")):
            return word
    return listed
