"""A task that trains in a fraction of a second, for tests of what is around the runs; the command line."""

import sys

import numpy as np
import pytest

from stfseb import cli

TASK = """
train: {array: train.npz}
test: {array: test.npz}
ood: {other: {array: other.npy}}
validation: {fraction: 0.2}
context: train
network: {name: small, hidden: 8}
channels: 1
image_size: 16
classes: 4
training: {epochs: 1, patience: 1000, batch_size: 32, train_samples: 2, test_samples: 2}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the path of a task file: four classes, stripes in four places."""
    folder = tmp_path_factory.mktemp("tiny")
    random = np.random.default_rng(0)
    labels = np.arange(160) % 4
    images = random.integers(0, 80, (160, 1, 16, 16), dtype=np.uint8)
    for c in range(4):
        images[labels == c, :, 4 * c : 4 * c + 4] += 120
    np.savez(folder / "train.npz", images=images[:120], labels=labels[:120])
    np.savez(folder / "test.npz", images=images[120:], labels=labels[120:])
    np.save(folder / "other.npy", 255 - images[120:])
    (folder / "tiny.yaml").write_text(TASK)
    return str(folder / "tiny.yaml")


@pytest.fixture
def stfseb(monkeypatch, capsys):
    """Return a function that runs the command line in this process: exit code, output, errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["stfseb", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "80")
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
