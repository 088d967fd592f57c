"""The figure of docs/variational.md: its sampler against a posterior in closed form, and the script in small."""

import math
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from torch import nn

from repository_scripts import ROOT
from repository_scripts import script as script_called

SCRIPT = ROOT / "scripts" / "hmc_figure.py"


@pytest.fixture(scope="module")
def script():
    return script_called("hmc_figure")


def test_the_sampler_finds_the_posterior_of_a_linear_regression(script, monkeypatch):
    """Mean to 0.1 standard deviations, covariance to a tenth: seven times the Monte Carlo error of 4,800 draws."""
    monkeypatch.setattr(script, "LEAPFROG", 12)
    generator = torch.Generator().manual_seed(5)
    net = nn.Linear(3, 1).double()
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.3, 2.0])
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.4
    noise = 0.5

    def log_posterior(theta):
        rest = script.functions(net, theta, x) - y
        return -rest.square().sum() / (2 * noise**2) - theta.square().sum() / (2 * script.SIGMA**2)

    theta, accepted = script.hmc(net, log_posterior, 300)
    assert theta.shape == (300, script.CHAINS, 4)
    design = torch.cat([x, torch.ones(12, 1, dtype=torch.float64)], dim=1)  # weights, then the bias
    covariance = (design.T @ design / noise**2 + torch.eye(4, dtype=torch.float64) / script.SIGMA**2).inverse()
    mean = covariance @ design.T @ y / noise**2
    spread = covariance.diagonal().sqrt()
    assert spread.max() / spread.min() > 2  # directions of unlike width
    drawn = theta.flatten(0, 1)
    assert float(((drawn.mean(0) - mean) / spread).abs().max()) < 0.1
    error = (drawn.T.cov() - covariance) / spread[:, None] / spread
    assert float(error.abs().max()) < 0.1
    assert 0.5 < accepted < 0.99
    assert script.r_hat(theta) < 1.02
    assert script.r_hat(theta + 3 * spread * (torch.arange(script.CHAINS) % 2)[:, None]) > 1.5  # chains apart


def test_the_functions_are_the_networks(script):
    net = script.network()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    x = script.data()[0]
    both = script.functions(net, torch.stack([flat, torch.zeros_like(flat)]), x)
    assert both[0].numpy() == pytest.approx(net(x)[:, 0].detach().numpy(), abs=1e-12)
    assert not both[1].any()


@pytest.mark.slow
def test_the_script_draws_its_figure_and_table_in_small(tmp_path):
    target = tmp_path / "pictures" / "hmc.png"
    words = [sys.executable, str(SCRIPT), "--draws", "12", "--steps", "40", "--out", str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["MFVI", "FS-EB"]
    for row in rows:
        numbers = [float(word) for word in row[1:]]
        assert len(numbers) == 5
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
    with Image.open(target) as picture:
        assert picture.size == (1300, 507)
        assert len(picture.getcolors(10**6)) > 50
