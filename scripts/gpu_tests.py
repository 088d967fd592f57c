"""Run the tests that need a card, in several processes on one: `python scripts/gpu_tests.py [PROCESSES] [--out FILE]`.

Most of their time is compiling on the host. Each process has every n-th test; the end of each log and a count are
printed, and the count is written to FILE as JSON with the code, the machine and the ends of failures. Needs pytest
alone, no xdist.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Without what was logged: compilers log so much that a failure's own words would be cut off.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", "--tb=short")
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *WITHOUT, "-m", "gpu")


def collected(words: list[str]) -> list[str]:
    """Return the names of the tests."""
    done = subprocess.run([*PYTEST, "--collect-only", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names or done.returncode:
        raise SystemExit(f"error: no test could be collected\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return names


def counts(log: str) -> dict[str, int]:
    """Read the counts of pytest's last line."""
    last = next((line for line in reversed(log.splitlines()) if re.search(r"\bin \d", line)), "")
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="?", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tests", nargs="*", default=["tests"], help="folders, files or names")
    given = parser.parse_args()
    began = time.monotonic()
    names = collected(given.tests)
    total: dict[str, int] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for k in range(min(given.processes, len(names))):
            log = Path(folder) / f"{k}.log"
            with log.open("w") as out:
                words = [*PYTEST, "--basetemp", f"{folder}/tmp{k}", *names[k :: given.processes]]
                settings = {**os.environ, "OMP_NUM_THREADS": "2"}
                running.append((subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, env=settings), log))
        for process, log in running:
            process.wait()
            text = log.read_text(encoding="utf-8", errors="replace")
            print(text[-4000:] if process.returncode else text[-200:], flush=True)
            failures += [text[-4000:]] if process.returncode else []
            for kind, number in counts(text).items():
                total[kind] = total.get(kind, 0) + number
    seconds = round(time.monotonic() - began, 1)
    print(f"{len(names)} tests: {total}, {seconds} s in {len(running)} processes")
    if given.out is not None:
        import torch

        from stfseb.experiments.machine import code_version, machine

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = {"tests": len(names), **total, "seconds": seconds, "code": code_version(), "machine": machine(device)}
        found |= {"failures": failures} if failures else {}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if total == {"passed": len(names)} else 1


if __name__ == "__main__":
    sys.exit(main())
