"""A process that imports the library once and forks a child for each command, so that kills fall into the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

NURSERY = '''
import itertools, json, os, pathlib, signal, sys
import torch
torch.set_num_threads(1)
from stfseb import cli
import stfseb.experiments.resume, stfseb.report.tables, stfseb.data.loading, stfseb.data.augmentation
import stfseb.commands_paper, stfseb.report.reproduce, stfseb.experiments.executors.local

def die_at(file):
    """Kill this process when it has written its `file`-th file and not yet given it its name."""
    real, written = pathlib.Path.replace, itertools.count(1)

    def replace(path, target):
        if path.suffix == ".part" and next(written) == file:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, target)

    pathlib.Path.replace = replace

for line in sys.stdin:
    words, log, file = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.argv = ["stfseb", *words]
        if file:
            die_at(file)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''


class Nursery:
    """Runs commands in children of one helper process, and kills them."""

    def __init__(self, folder):
        script = folder / "nursery.py"
        script.write_text(NURSERY)
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings
        )
        self.log = folder / "log"

    def run(self, *words, kill_after=None, kill_at_file=0):
        """Run a command; return its exit code (-9: killed) and the seconds it took.

        Args:
            words: of the command, after `stfseb`.
            kill_after: seconds after which it is killed.
            kill_at_file: which file of those it writes is left unfinished by its death, from 1; 0: none.
        """
        self.process.stdin.write(json.dumps([[str(word) for word in words], str(self.log), kill_at_file]) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        began = time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it had ended
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()), time.perf_counter() - began

    def close(self):
        """End the helper process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(120)
