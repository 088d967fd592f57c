"""What several rooms' tests use."""

import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from torch import nn

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine that has no more than the library needs, for the tests on its card
    pass
else:  # the same examples on every day and every machine, however slow it is
    settings.register_profile(
        "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")

# Colours that a service forces upon its jobs, and a width, would be in what commands print.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# A job that a shell has put in the background ignores Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(config, val, argname):
    """Name bytes by their argument: a gzip header holds the time, so two workers would collect different names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Draw the same numbers in a test whichever tests came before it: workers share them out differently each time."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


class Block(nn.Module):
    """A residual block with batch norm and dropout."""

    def __init__(self, width, rate):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(rate)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        out = self.drop(torch.relu(self.norm1(self.first(x))))
        return torch.relu(x + self.norm2(self.second(out)))


class ResNet(nn.Module):
    """A small residual network as a user might bring it."""

    def __init__(self, classes=10, width=8, rate=0.2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, rate), nn.MaxPool2d(2), Block(width, rate))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture
def resnet():
    return ResNet


@pytest.fixture(scope="session")
def mini():
    """Return a function that gives the first rows of a part of the embedded task."""
    from stfseb.data.embedded import read

    return lambda part, count: read(part).take(slice(0, count))


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    """Run commands of the command line in children that can be killed."""
    from nursery import Nursery

    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture(scope="module")
def browser():
    """Start Debian's chromium, headless, driven by playwright."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed: `apt-get install chromium`, or set CHROMIUM to its path")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed: `pip install -e '.[browser]'`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS, timeout=180_000)
        yield started
        started.close()
