"""Carry out a list of commands within a limit of time: `python scripts/long_runs.py LIST --out FOLDER --seconds 1700`.

LIST has one command of `stfseb` a line, without the word itself, and without --out, which is added:

    search fmnist --method map --space extended --trials 40 --epochs 10 --finalists 5
    adopt fmnist
    [90] paper table1,table2 --tasks fmnist --methods map --seeds 5 --runs-only

`adopt TASK` puts what the searches of TASK above it in the list chose into tasks.yaml (scripts/adopt_presets.py;
`adopt TASK level` what that rule chose), so that the lines after it run at these settings. Where one of these searches
is not finished nothing is adopted, and of the lines after it none is begun. A number in brackets is how many seconds a
line must have left to be begun. Lines starting with # are left out.

All lines run in one process, which compiles and captures each kind of step once. At the limit the process is asked to
stop, as by SIGTERM, and again each minute: trainings finish their epoch and keep their checkpoints (leave some time for
that), and the same command goes on where it was. A command that fails is said and the next one is begun.
FOLDER/long_runs.jsonl gets a line for each: what it was, how it ended, how long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from stfseb.cli import app
from stfseb.errors import StfsebError
from stfseb.experiments.search.rules import RULES
from stfseb.usage import ending

sys.path.insert(0, str(Path(__file__).resolve().parent))
BEGAN = time.monotonic()  # torch and the like are imported later
AGAIN = 60.0  # seconds after which a process that has not stopped is asked again
DONE, NOT_BEGUN = "done", "not begun"


@dataclass(frozen=True)
class Line:
    """A command, and the seconds without which it is not begun."""

    words: tuple[str, ...]
    needs: float = 0.0


def read_lines(text: str) -> list[Line]:
    """Read a list of commands."""
    found: list[Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        needs, words = re.fullmatch(r"\s*(?:\[(\d+(?:\.\d+)?)\])?\s*(.*)", line).groups()  # type: ignore[union-attr]
        try:
            parts = tuple(shlex.split(words))
        except ValueError as error:
            raise StfsebError(f"line {number}, '{line.strip()}': {error}") from None
        if len(parts) < 2 or parts[0] not in ("search", "paper", "adopt"):
            raise StfsebError(f"line {number}, '{line.strip()}': begin with search, paper or adopt, and say of what")
        if parts[0] == "adopt" and not _can_adopt(parts, [one.words for one in found]):
            raise StfsebError(
                f"line {number}, '{line.strip()}': write adopt, a task that is searched above it, and at most a rule "
                f"({', '.join(RULES)})"
            )
        found.append(Line(parts, float(needs or 0)))
    if not found:
        raise StfsebError("the list has no commands")
    return found


def _can_adopt(words: tuple[str, ...], before: list[tuple[str, ...]]) -> bool:
    return len(words) < 4 and set(words[2:]) <= set(RULES) and bool(studies_of(before, words[1]))


def studies_of(lines: list[tuple[str, ...]], task: str) -> list[str]:
    """Return the names of the studies that the searches of a task choose in: their finals, where they have some."""
    from stfseb.commands_search import plan_of

    command: Any = typer.main.get_command(app)
    found: dict[str, str] = {}
    for words in lines:
        if words[0] != "search":
            continue
        given = command.commands["search"].make_context("search", list(words[1:])).params
        if given["task"] == task:
            options = ("method", "space", "seed", "epochs", "context", "set_")
            name = plan_of(task, **{option: given[option] for option in options}).name
            last = f"-final{given['finalists']}of{given['trials']}" if given["finalists"] else ""
            found[given["method"]] = name + last
    return list(found.values())


class Limit:
    """The end of the time, and whoever else asks to stop: within a command it is interrupted, else only noted."""

    def __init__(self, seconds: float) -> None:
        self.end, self.stopped, self.inside = BEGAN + seconds, False, False
        self._former = {number: signal.signal(number, self._asked) for number in (signal.SIGTERM, signal.SIGINT)}
        self._timer = threading.Thread(target=self._wait, daemon=True)
        self._gone = threading.Event()
        self._timer.start()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def close(self) -> None:
        """Ask no more."""
        self._gone.set()
        self._timer.join()
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: object) -> None:
        del number, frame
        self.stopped = True
        if self.inside:
            raise KeyboardInterrupt

    def _wait(self) -> None:
        pause = max(self.left, 0)
        while not self._gone.wait(pause):
            os.kill(os.getpid(), signal.SIGTERM)
            pause = AGAIN


def carry_out(words: tuple[str, ...], before: list[tuple[str, ...]], out: Path) -> str:
    """Do one line in this process and return how it ended."""
    if words[0] == "adopt":
        import adopt_presets

        searched = [out / "searches" / name for name in studies_of(before, words[1])]
        print("\n".join(adopt_presets.adopt(searched, rule=words[2] if words[2:] else "ours")), flush=True)
        return DONE
    code = app([*words, "--out", str(out)], prog_name="stfseb", standalone_mode=False)
    return DONE if code in (None, 0) else f"exit {code}"


def ended(words: tuple[str, ...], before: list[tuple[str, ...]], out: Path, limit: Limit) -> str:
    """Do one line and return how it ended, whatever happens."""
    try:
        limit.inside = True
        try:
            if limit.stopped:
                return NOT_BEGUN
            said = carry_out(words, before, out)
        finally:
            limit.inside = False
    except KeyboardInterrupt:
        said = "stopped"
    except SystemExit as end:
        said = f"exit {end.code}"
    except Exception as error:
        code, line = ending(error, lambda: typer.main.get_command(app), list(words))
        if code is None:
            traceback.print_exc()
        said = line or f"{type(error).__name__}: {error}"
    if said in ("exit 130", "exit 143", "stopped") or said.startswith("stopped by"):
        limit.stopped = True
    return said


def run(lines: list[Line], out: Path, seconds: float) -> int:
    """Carry out the lines one after the other; return how many were not done."""
    limit, missing, blocked = Limit(seconds), 0, ""
    try:
        for number, line in enumerate(lines):
            began, text, said = time.monotonic(), shlex.join(line.words), NOT_BEGUN
            if blocked:
                said = blocked
            elif not limit.stopped and limit.left > line.needs:
                print(f"{began - BEGAN:6.0f} s: {text}", flush=True)
                said = ended(line.words, [one.words for one in lines[:number]], out, limit)
            if line.words[0] == "adopt" and said != DONE and not blocked:
                blocked = f"{NOT_BEGUN}: {'nothing was adopted' if said == NOT_BEGUN else 'adopt failed'}"
            missing += said != DONE
            now = time.monotonic()
            _log(out, {"command": text, "ended": said, "at": round(began - BEGAN, 1), "seconds": round(now - began, 1)})
            print(f"{now - BEGAN:6.0f} s: {text}: {said}", flush=True)
    finally:
        limit.close()
    print(f"{len(lines) - missing} of {len(lines)} commands done; results in {out}", flush=True)
    return missing


def _log(out: Path, entry: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "long_runs.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
    except OSError as error:  # a full disk must not end the list
        print(f"note: {out / 'long_runs.jsonl'} cannot be written ({error.strerror or error})", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", metavar="LIST", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=7 * 24 * 3600.0)
    given = parser.parse_args()
    try:
        lines = read_lines(given.list.read_text(encoding="utf-8"))
    except (OSError, StfsebError) as error:
        print(f"error: {given.list}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    return 1 if run(lines, given.out, given.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
