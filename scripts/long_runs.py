"""Carry out a list of commands within a limit of time: `python scripts/long_runs.py LIST --out FOLDER --seconds 1700`.

LIST has one command of `stfseb` a line, without the word itself, and without --out, which is added:

    search fmnist --method map --space extended --trials 40 --epochs 10 --finalists 5
    adopt fmnist map
    [90] paper table1,table2 --tasks fmnist --methods map --seeds 5 --runs-only

`adopt TASK [METHOD ...]` puts what the searches in FOLDER chose into tasks.yaml (scripts/adopt_presets.py), so that the
lines after it run at these settings. A number in brackets is how many seconds a line must have left to be begun. Lines
starting with # are left out.

All lines run in one process, which compiles and captures each kind of step once. At the limit the process is asked to
stop, as by SIGTERM: trainings keep their checkpoints, and the same command goes on where it was. A line that fails is
said and the next one is begun. FOLDER/long_runs.jsonl gets a line for each: what it was, how it ended, how long.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))


@dataclass(frozen=True)
class Line:
    """A command, and the seconds without which it is not begun."""

    words: tuple[str, ...]
    needs: float = 0.0


def read_lines(text: str) -> list[Line]:
    """Read a list of commands."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        needs, words = re.fullmatch(r"\s*(?:\[(\d+(?:\.\d+)?)\])?\s*(.*)", line).groups()  # type: ignore[union-attr]
        parts = tuple(shlex.split(words))
        if not parts or parts[0] not in ("search", "paper", "adopt") or len(parts) < 2:
            raise SystemExit(f"error: line {number}, '{line.strip()}': begin with search, paper or adopt")
        found.append(Line(parts, float(needs or 0)))
    if not found:
        raise SystemExit("error: the list has no commands")
    return found


def carry_out(line: Line, out: Path) -> str:
    """Do one line in this process and return how it ended."""
    if line.words[0] == "adopt":
        import adopt_presets

        print("\n".join(adopt_presets.adopt(out, line.words[1], line.words[2:])), flush=True)
        return "done"
    from stfseb.cli import app

    code = app([*line.words, "--out", str(out)], prog_name="stfseb", standalone_mode=False)
    return "done" if code in (None, 0) else f"exit {code}"


def ask_to_stop(seconds: float) -> threading.Timer:
    """Send this process SIGTERM after some seconds."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


def run(lines: list[Line], out: Path, seconds: float) -> int:
    """Carry out the lines one after the other; return how many were not done."""
    from stfseb.training.interrupts import Interrupted

    def stop(number: int, _: object) -> None:
        raise Interrupted(number, "between commands", "the same command goes on from there")

    began, missing, stopped = time.monotonic(), 0, False
    signal.signal(signal.SIGTERM, stop)
    timer = ask_to_stop(seconds)
    out.mkdir(parents=True, exist_ok=True)
    for line in lines:
        at = time.monotonic() - began
        text, ended = shlex.join(line.words), "not begun"
        if not stopped and seconds - at > line.needs:
            print(f"{at:6.0f} s: {text}", flush=True)
            try:
                ended = carry_out(line, out)
            except Interrupted as end:
                ended, stopped = f"stopped: {end}", True
            except Exception as error:
                traceback.print_exc()
                ended = f"failed: {type(error).__name__}: {error}"
        missing += ended != "done"
        took = time.monotonic() - began - at
        entry = {"command": text, "ended": ended, "at": round(at, 1), "seconds": round(took, 1)}
        with (out / "long_runs.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        print(f"{at + took:6.0f} s: {text}: {ended} ({took:.0f} s)", flush=True)
    timer.cancel()
    print(f"{len(lines) - missing} of {len(lines)} commands done; results in {out}", flush=True)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", metavar="LIST", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float(7 * 24 * 3600))
    given = parser.parse_args()
    return 1 if run(read_lines(given.list.read_text(encoding="utf-8")), given.out, given.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
