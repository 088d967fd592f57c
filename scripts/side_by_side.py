"""Carry out several lists of commands at once: `python scripts/side_by_side.py LIST LIST ... --out FOLDER --seconds N`.

Each list (see scripts/long_runs.py; a folder stands for the lists in it) has a process of its own, so that on a card
the set-up, compilation and evaluation of one fall into the training of the others. All write to the same FOLDER; a
run that two lists ask for is done once. --mps: on an NVIDIA card, under its multi-process service (MPS), without which
processes take turns on the card. FOLDER/logs/LIST.log has what each printed. Ctrl-C and SIGTERM are passed on.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
CONTROL = "nvidia-cuda-mps-control"
_FIRST = "import torch; torch.ones(1, device='cuda').item()"  # a process that can use the card ends with 0


def lists_of(given: list[Path]) -> list[Path]:
    """Return the lists, of a folder those in it, or end where there is nothing to do."""
    found = [path for one in given for path in (sorted(one.glob("*.txt")) if one.is_dir() else [one])]
    for path in [*given, *found]:
        if not path.exists():
            raise SystemExit(f"error: {path} does not exist: give lists, or a folder of them")
    names = [path.stem for path in found]
    if len(set(names)) < len(names) or not names:
        raise SystemExit(f"error: {len(names)} lists, {len(set(names))} names: give lists with names of their own")
    return found


@contextmanager
def multi_process_service(python: str = sys.executable) -> Iterator[dict[str, str]]:
    """Start MPS, give the environment that leads to it, and end it; where it cannot be had say so and go on without."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in places.values():
            Path(path).mkdir()
        settings = {**os.environ, **places}
        try:
            subprocess.run([CONTROL, "-d"], env=settings, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"note: without MPS, as {CONTROL} cannot be started ({error})", flush=True)
            yield dict(os.environ)
            return
        try:
            works = subprocess.run([python, "-c", _FIRST], env=settings, check=False, capture_output=True, timeout=300)
            if works.returncode:
                print("note: without MPS, as a process under it cannot use the card", flush=True)
            yield dict(os.environ) if works.returncode else settings
        finally:
            subprocess.run([CONTROL], input=b"quit\n", env=settings, check=False, capture_output=True, timeout=60)


def run(lists: list[Path], out: Path, seconds: float, settings: dict[str, str]) -> int:
    """Start a process for each list and wait for all; return how many did not do all of theirs."""
    began, running = time.monotonic(), {}
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    former = {}

    def pass_on(number: int, frame: object) -> None:
        del frame
        for process, _ in running.values():
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        former[number] = signal.signal(number, pass_on)
    try:
        for path in lists:
            words = [sys.executable, str(HERE / "long_runs.py"), str(path), "--out", str(out)]
            log = (logs / f"{path.stem}.log").open("ab")
            words += ["--seconds", f"{max(1.0, seconds - (time.monotonic() - began)):.0f}"]
            # A session of its own: Ctrl-C reaches it once, by us.
            running[path.stem] = (
                subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=settings, start_new_session=True),
                log,
            )
        missing = 0
        for name, (process, log) in running.items():
            code = process.wait()
            log.close()
            missing += code != 0
            said = "done" if code == 0 else f"not all done (exit {code})"
            print(f"{time.monotonic() - began:6.0f} s: {name}: {said}; {logs / name}.log", flush=True)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    print(f"{len(lists) - missing} of {len(lists)} lists done; results in {out}", flush=True)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", metavar="LIST", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=7 * 24 * 3600.0)
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's multi-process service")
    given = parser.parse_args()
    lists = lists_of(given.lists)
    if not given.mps:
        return 1 if run(lists, given.out, given.seconds, dict(os.environ)) else 0
    with multi_process_service() as settings:
        return 1 if run(lists, given.out, given.seconds, settings) else 0


if __name__ == "__main__":
    sys.exit(main())
