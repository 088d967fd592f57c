"""On a CUDA device: no hidden waits for the host, and one captured graph that serves every setting."""

from __future__ import annotations

import math

import pytest
import torch

from stfseb.function_prior import FunctionPrior
from stfseb.weight_prior import WeightPrior

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own, from the compiler and from the check for hidden waits
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")),
]


def loss(h: torch.Tensor, f: torch.Tensor, theta: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    tau1, tau2, dof, sigma = settings.unbind()
    function = FunctionPrior(h, tau1, tau2, dof)
    weights = WeightPrior(dof, sigma)
    return (
        function.penalty(f).mean() + function.log_prob(f).sum() + weights.penalty([theta]) + weights.log_prob([theta])
    )


@pytest.mark.parametrize("n", [32, 160])
@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_capture_and_replay_with_new_settings(n: int, how: str) -> None:
    torch.manual_seed(0)
    h, f = torch.randn(n, 128, device="cuda"), torch.randn(10, n, 10, device="cuda", requires_grad=True)
    theta = torch.randn(1000, device="cuda", requires_grad=True)
    settings = torch.tensor([1.0, 100.0, 5.0, 1.0], device="cuda")
    step = loss if how == "eager" else torch.compile(loss, fullgraph=True)

    def run() -> tuple[torch.Tensor, ...]:
        value = step(h, f, theta, settings)
        return value, *torch.autograd.grad(value, (f, theta))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for new in ([1.0, 100.0, 5.0, 1.0], [10.0, 1e-3, 2.1, 0.1], [1e-2, 1.0, math.inf, 3.0]):
        settings.copy_(torch.tensor(new))
        graph.replay()
        function = FunctionPrior(h.cpu(), *new[:3])
        weights = WeightPrior(new[2], new[3])
        cpu_f, cpu_theta = (t.detach().cpu().requires_grad_() for t in (f, theta))
        value = function.penalty(cpu_f).mean() + function.log_prob(cpu_f).sum()
        value = value + weights.penalty([cpu_theta]) + weights.log_prob([cpu_theta])
        expected = (value, *torch.autograd.grad(value, (cpu_f, cpu_theta)))
        for ours, theirs in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "p"), [(32, 128), (160, 128), (1024, 128)])
def test_an_epoch_of_factors_agrees_with_the_cpu(n: int, p: int) -> None:
    torch.manual_seed(0)
    h, f = torch.randn(5, n, p), torch.randn(5, 3, n, 4)
    factors = FunctionPrior.factorise(h.cuda(), 1e4)
    cpu = FunctionPrior(h[:, None], 1.0, 1e-4, 5.0).quadratic(f.double())
    for i in range(5):
        prior = FunctionPrior.from_factor(factors[i], 1.0, 1e-4, 5.0, features=h[i].cuda())
        torch.testing.assert_close(prior.quadratic(f[i].cuda().double()).cpu(), cpu[i], rtol=1e-8, atol=0)
