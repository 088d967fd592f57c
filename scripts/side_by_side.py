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
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 300.0  # seconds for a first process under MPS
_FIRST = "import torch; torch.ones(1, device='cuda').item()"  # a process that can use the card ends with 0


def lists_of(given: list[Path]) -> list[Path]:
    """Return the lists, of a folder those in it, or end where there is nothing to do."""
    found: list[Path] = []
    for one in given:
        inside = sorted(one.glob("*.txt")) if one.is_dir() else [one]
        if not one.exists() or not inside:
            raise SystemExit(
                f"error: {one} {'has no lists' if one.exists() else 'does not exist'}: give lists, or a folder of them"
            )
        found += inside
    names = [path.stem for path in found]
    if len(set(names)) < len(names):
        raise SystemExit(f"error: {len(names)} lists, {len(set(names))} names: give lists with names of their own")
    return found


class Stop:
    """Who asks to stop is heard from the beginning on: signals are passed on to those running, later ones not begun."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._former = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}

    def _heard(self, number: int, frame: object) -> None:
        del frame
        self.asked = number
        self.pass_on(number)

    def pass_on(self, number: int) -> None:
        """Send a signal to all that are running."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(number)

    def close(self) -> None:
        """Leave nothing running, and signals as they were."""
        self.pass_on(signal.SIGTERM)
        for process in self.running.values():
            process.wait()
        for number, handler in self._former.items():
            signal.signal(number, handler)


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
            yield settings if _works(python, settings) else dict(os.environ)
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([CONTROL], input=b"quit\n", env=settings, check=False, capture_output=True, timeout=60)


def _works(python: str, settings: dict[str, str]) -> bool:
    """Tell whether a process can use the card under MPS, and say so where it cannot."""
    try:
        subprocess.run([python, "-c", _FIRST], env=settings, check=True, capture_output=True, timeout=PATIENCE)
    except subprocess.SubprocessError:
        print("note: without MPS, as a process under it cannot use the card", flush=True)
        return False
    return True


def run(lists: list[Path], out: Path, end: float, settings: dict[str, str], stop: Stop) -> int:
    """Start a process for each list and wait for all; return how many did not do all of theirs."""
    began, codes, logs = time.monotonic(), dict[str, int](), out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for path in lists:
        words = [sys.executable, str(HERE / "long_runs.py"), str(path), "--out", str(out)]
        words += ["--seconds", f"{max(1.0, end - time.monotonic()):.0f}"]
        with (logs / f"{path.stem}.log").open("ab") as log:
            if stop.asked is None:  # a session of its own: Ctrl-C reaches it once, by us
                stop.running[path.stem] = subprocess.Popen(
                    words, stdout=log, stderr=subprocess.STDOUT, env=settings, start_new_session=True
                )
    if stop.asked is not None:  # heard while the last one was being started
        stop.pass_on(stop.asked)
    while len(codes) < len(stop.running):
        for name, process in stop.running.items():
            if name not in codes and (code := process.poll()) is not None:
                codes[name] = code
                said = "done" if code == 0 else f"not all done (exit {code})"
                print(f"{time.monotonic() - began:6.0f} s: {name}: {said}; {logs / name}.log", flush=True)
        time.sleep(0.05)
    done = sum(code == 0 for code in codes.values())
    more = "" if done == len(lists) else "; the same command goes on with the others"
    print(f"{done} of {len(lists)} lists done; results in {out}{more}", flush=True)
    return len(lists) - done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", metavar="LIST", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=7 * 24 * 3600.0)
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's multi-process service")
    given = parser.parse_args()
    lists, end = lists_of(given.lists), time.monotonic() + given.seconds
    stop = Stop()
    try:
        with multi_process_service() if given.mps else nullcontext(dict(os.environ)) as settings:
            try:
                return 1 if run(lists, given.out, end, settings, stop) else 0
            finally:
                stop.close()
    except OSError as error:
        print(f"error: {error}: give another --out", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
