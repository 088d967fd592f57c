"""Memory that stays with the process while passes run: page faults and resident pages, counted by the kernel."""

import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import stfseb
from stfseb.networks import memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
BLOCK = 12_000_000  # float32: 48 MB, above the 32 MiB from which glibc maps every block anew
HEADER = Path("/usr/include/malloc.h")
PAGES = 4 * BLOCK // resource.getpagesize()


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    for key in ("GLIBC_TUNABLES", *(key for key in os.environ if key.startswith("MALLOC_"))):
        monkeypatch.delenv(key, raising=False)
    memory._glibc.cache_clear()
    yield
    memory._glibc.cache_clear()
    assert memory._holders == 0


COUNT = f"""
import json, resource
from pathlib import Path
import torch
from stfseb.networks.memory import memory_kept

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty({BLOCK}).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

found = {{"plain": faults(5), "before": resident()}}
with memory_kept():
    faults(20)  # aligned blocks leave gaps at first
    found |= {{"kept": faults(20), "during": resident()}}
print(json.dumps(found | {{"after": resident(), "anew": faults(5)}}))
"""


def huge_pages():
    state = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return state.is_file() and "[always]" in state.read_text()


@pytest.mark.skipif(huge_pages(), reason="huge pages are counted as one")
def test_pages_are_brought_once_while_memory_is_kept_and_go_back_in_the_end():
    """In a process of its own: what other tests have left in the heap would serve as well."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["plain"] > 4 * PAGES  # every block anew
    assert found["kept"] < PAGES  # of 20 blocks not even one
    assert found["during"] > found["before"] + PAGES // 2
    assert found["after"] < found["before"] + PAGES // 2
    assert found["anew"] >= PAGES


def test_the_last_holder_gives_back(monkeypatch):
    calls = []

    class Library:
        def mallopt(self, parameter, value):
            calls.append((parameter, value))

        def malloc_trim(self, pad):
            calls.append("trim")

    monkeypatch.setattr(memory, "_glibc", lambda: Library())
    monkeypatch.setattr(memory._glibc, "cache_clear", lambda: None, raising=False)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with memory.memory_kept():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)

    def fails():
        with memory.memory_kept(), memory.memory_kept():
            thread.start()
            assert inside.wait(30)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert calls == [(-4, 0), (-1, -1)]  # M_MMAP_MAX, M_TRIM_THRESHOLD: set once, and the thread still holds
    leave.set()
    thread.join()
    assert calls[2:] == [(-4, 65536), (-3, 32 << 20), (-1, 64 << 20), "trim"]
    with memory.memory_kept(worth=False):
        assert len(calls) == 6


@pytest.mark.skipif(not HEADER.is_file(), reason="the C library's headers are not installed")
def test_parameters_are_those_of_the_systems_header():
    """ctypes knows no macros, so the numbers are written out in Python."""
    text = HEADER.read_text()
    for name in ("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD", "M_MMAP_MAX"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"#define {name} ")]
        assert int(line.split()[2]) == getattr(memory, name.removeprefix("M"))
    assert all(ctypes.CDLL(None).mallopt(*pair) == 1 for pair in memory._GLIBCS_OWN.items())  # glibc takes them


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("MALLOC_ARENA_MAX", "2", False),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1", False),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F", True),
    ],
)
def test_a_malloc_that_the_user_has_tuned_is_left_alone(name, value, used):
    code = "from stfseb.networks.memory import _glibc; print(_glibc() is not None)"
    environment = os.environ | {name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(used)


def held(method, monkeypatch, call):
    """Return how many hold memory in each pass of the method's network that a call makes."""
    found = []
    original = method._draw
    with monkeypatch.context() as patched:
        patched.setattr(method, "_draw", lambda *given: found.append(memory._holders) or original(*given))
        call()
    return found


def test_training_and_predictions_of_several_passes_keep_memory(monkeypatch):
    method = stfseb.MCDropout(stfseb.SmallCNN(), samples=2)
    seen = []
    x, y = torch.rand(12, 1, 28, 28), torch.arange(12) % 10

    def watched(images, generator):
        seen.append(memory._holders)
        return images

    stfseb.fit(method, (x, y), (x, y), epochs=1, batch_size=4, augment=watched, progress=False)
    assert seen
    assert min(seen) == 1
    predict = {"samples": 2, "batch_size": 4}
    assert held(method, monkeypatch, lambda: method.predict_proba(x[:8], **predict)) == [1, 1]
    assert held(method, monkeypatch, lambda: method.sample_logits(x[:8], **predict)) == [1, 1]
    assert held(method, monkeypatch, lambda: method.predict_proba(x[:4], **predict)) == [0]  # one pass: no need
    assert held(method, monkeypatch, lambda: stfseb.evaluate(method, (x, y), samples=2))[0] == 1
    assert held(method, monkeypatch, lambda: stfseb.calibrate(method, (x, y), samples=2))[0] == 1
    assert held(method, monkeypatch, lambda: stfseb.selective(method, (x, y), x, samples=2))[0] == 1


FORKED = """
import json, multiprocessing, os, threading
import torch, stfseb
from stfseb.networks import memory

method, x = stfseb.MAP(stfseb.MLP(8, 3)), torch.rand(40, 8)

def predicts(queue):
    torch.set_num_threads(1)
    method.predict_proba(x, batch_size=10)
    queue.put(memory._holders)

queue = multiprocessing.get_context("fork").Queue()
found = []
with memory.memory_kept():
    with memory._lock:  # as where another thread is about to give memory back
        child = multiprocessing.get_context("fork").Process(target=predicts, args=(queue,), daemon=True)
        child.start()
    found.append(queue.get(timeout=60))
    pid = os.fork()
    if not pid:
        code = 1 if memory._holders else 0
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
if not pid:
    os._exit(code + 2 * (memory._holders != 0))
print(json.dumps([*found, code, memory._holders]))
"""


def test_a_forked_process_begins_anew():
    """It neither waits for a lock that its parent had, nor keeps memory for its parent, nor gives back twice."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == [0, 0, 0]
