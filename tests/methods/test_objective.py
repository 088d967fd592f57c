"""The objectives against the paper's formula written out, and against one another in their limits."""

import math

import pytest
import torch
from reference import cross_entropy, function_penalty, weight_penalty
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stfseb import MAP, STFSEB, MCDropout, StfsebError
from stfseb.methods.context import ContextStream, generator
from stfseb.networks.dropout import keep_mask

N, B, L = 1000, 12, 3


def make_net(rate=0.5, hidden=16, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Dropout(rate), nn.Linear(hidden, L)).to(dtype)


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(B, 5, generator=g, dtype=torch.float64)
    y = torch.randint(L, (B,), generator=g)
    context = torch.randn(40, 5, generator=g, dtype=torch.float64)
    return x, y, context


@pytest.mark.parametrize("dof", [2.1, 5.0, math.inf])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_objective_is_the_papers(batch, dof, rate):
    """Every term, with the very masks that were drawn, against dense algebra."""
    x, y, context = batch
    net = make_net(rate)
    sigma, tau1, tau2, S, Nc = 0.7, 2.0, 0.5, 4, 6
    method = STFSEB(net, context, dof, sigma, tau1, tau2, num_context=Nc, samples=S)
    method.reseed(3)
    torch.manual_seed(5)
    terms = method.objective(x, y, N)

    stream = ContextStream(len(context), Nc, 3)
    xc = context[stream.indices(0)]
    torch.manual_seed(5)
    data_masks = keep_mask((S, B, 1, 16), rate, torch.float64, x.device, None)[:, :, 0]
    context_masks = keep_mask((S, 1, 1, 16), rate, torch.float64, x.device, generator(3, 2, 0))[:, :, 0]
    first, last = net[:2], net[3]
    data = sum(cross_entropy(last(first(x) * data_masks[s]), y) for s in range(S)) / S
    h = first(xc)
    function = sum(function_penalty(last(first(xc) * context_masks[s]), h, tau1, tau2, dof) for s in range(S)) / S
    weights = rate * B / N * weight_penalty(net.parameters(), dof, sigma)
    assert terms.data.item() == pytest.approx(data.item(), rel=1e-12)
    assert terms.function.item() == pytest.approx(function, rel=1e-9)
    assert terms.weights.item() == pytest.approx(weights, rel=1e-12, abs=1e-15)
    assert terms.total.item() == pytest.approx(sum(t.item() for t in terms))


def test_infinite_dof_without_function_term_is_mc_dropout(batch):
    x, y, _ = batch
    net = make_net()
    ours = STFSEB(net, dof=math.inf, sigma=0.3, samples=5, functional_scale=0)
    theirs = MCDropout(net, sigma=0.3, samples=5)
    torch.manual_seed(2)
    a = ours.objective(x, y, N)
    torch.manual_seed(2)
    b = theirs.objective(x, y, N)
    assert a.function.item() == 0.0
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left, right)


def test_mc_dropout_without_dropout_and_prior_weight_one_is_map(batch):
    x, y, _ = batch
    net = make_net(0.0)
    a = MCDropout(net, sigma=0.3, samples=5, prior_weight=1.0).objective(x, y, N)
    b = MAP(net, sigma=0.3).objective(x, y, N)
    for left, right in zip(a, b, strict=True):
        assert left.item() == pytest.approx(right.item(), rel=1e-12)


def test_large_dof_approaches_the_gaussian(batch):
    x, y, context = batch
    net = make_net(0.0)
    far = STFSEB(net, context, 1e8, tau2=10.0, num_context=8, samples=1, prior_weight=1.0)
    gauss = STFSEB(net, context, math.inf, tau2=10.0, num_context=8, samples=1, prior_weight=1.0)
    for method in (far, gauss):
        method.reseed(0)
    for left, right in zip(far.objective(x, y, N), gauss.objective(x, y, N), strict=True):
        assert left.item() == pytest.approx(right.item(), rel=1e-6)


def test_scales_of_the_terms(batch):
    x, y, context = batch
    net = make_net(0.0)

    def terms(**settings):
        method = STFSEB(net, context, num_context=8, samples=2, **settings)
        method.reseed(0)
        return method.objective(x, y, N)

    base = terms(functional_scale="batch").function.item()
    assert terms(functional_scale="epoch").function.item() == pytest.approx(base * B / N)
    assert terms(functional_scale=2.5).function.item() == pytest.approx(2.5 * base)
    assert terms(functional_scale=0).function.item() == 0.0
    assert terms(prior_weight="rate").weights.item() == 0.0  # the rate is zero
    assert terms(prior_weight="keep").weights.item() == pytest.approx(terms(prior_weight=1.0).weights.item())


def test_dofs_are_tied_unless_told(batch):
    x, y, context = batch
    net = make_net(0.0)

    def terms(**settings):
        method = STFSEB(net, context, num_context=8, samples=1, prior_weight=1.0, **settings)
        method.reseed(0)
        return method.objective(x, y, N)

    both, function, weights = terms(dof=3.0), terms(dof=5.0, dof_function=3.0), terms(dof=5.0, dof_weights=3.0)
    assert function.function.item() == both.function.item()
    assert function.weights.item() != both.weights.item()
    assert weights.weights.item() == both.weights.item()
    assert weights.function.item() != both.function.item()


def test_parts_of_a_step_add_up_to_the_whole(batch):
    """Gradient accumulation: same context points and masks in every part, terms and gradients add up."""
    x, y, context = batch
    net = make_net(0.0)
    method = STFSEB(net, context, num_context=8, samples=3, prior_weight=1.0)

    def gradient(total):
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(net.parameters()))])

    method.reseed(0)
    whole = method.objective(x, y, N)
    expected = gradient(whole.total)
    method.reseed(0)
    parts = [method.objective(x[i : i + 5], y[i : i + 5], N, batch_size=B) for i in range(0, B, 5)]
    found = gradient(sum(part.total for part in parts))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_the_optimiser_ends_the_draw(batch, fused):
    """The next part belongs to the next step, whichever way the optimiser wrote the weights."""
    x, y, context = batch
    net = make_net(0.0)
    method = STFSEB(net, context, num_context=8, samples=1, prior_weight=1.0)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3, fused=fused)
    steps = []
    for _ in range(3):
        for rows in (slice(0, 6), slice(6, 12)):
            method.objective(x[rows], y[rows], N, batch_size=B).total.backward()
            steps.append(method.context.step)
        optimiser.step()
        optimiser.zero_grad()
    assert steps == [1, 1, 2, 2, 3, 3]


def test_context_masks_agree_over_parts_and_processes(batch):
    x, y, context = batch
    net = make_net(0.5)
    values = []
    for rows in (slice(0, 6), slice(6, 12)):  # two processes, each with its own random state
        method = STFSEB(net, context, num_context=8, samples=3)
        method.reseed(7)
        torch.manual_seed(rows.start)
        values.append(method.objective(x[rows], y[rows], N, batch_size=B).function.item())
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_context_rows_share_masks_unless_told(batch):
    """With one context point repeated, shared masks give the same outputs and a far smaller K-norm than row masks."""
    x, y, _ = batch
    point = torch.randn(1, 5, dtype=torch.float64).expand(8, 5).contiguous()
    net = make_net(0.5)

    def function(mask):
        method = STFSEB(net, point, math.inf, num_context=8, samples=64, context_mask=mask, tau1=100.0, tau2=0.01)
        method.reseed(0)
        return method.objective(x, y, N).function.item()

    assert function("row") > 5 * function("shared")


def test_context_train_uses_rows_of_the_minibatch(batch):
    x, y, _ = batch
    net = make_net(0.0)
    method = STFSEB(net, "train", num_context=B, samples=1, dof=5.0, tau1=1.0, tau2=2.0)
    terms = method.objective(x, y, N)
    expected = function_penalty(net(x), net[:2](x), 1.0, 2.0, 5.0)  # all rows: their order does not matter
    assert terms.function.item() == pytest.approx(expected, rel=1e-9)
    assert torch.isfinite(method.objective(x[:3], y[:3], N).total)  # fewer rows than num_context


def test_features_come_from_the_network_at_construction(batch):
    x, y, context = batch
    net = make_net(0.0)
    h = net[:2](context).detach()
    method = STFSEB(net, context, num_context=40, samples=1, tau1=1.0, tau2=2.0)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    terms = method.objective(x, y, N)
    assert terms.function.item() == pytest.approx(function_penalty(net(context), h, 1.0, 2.0, 5.0), rel=1e-9)


def test_features_keep_the_networks_precision_in_a_bf16_run():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))
    context = torch.rand(40, 1, 8, 8)
    method = STFSEB(net, context, num_context=8, samples=1)
    h = net[:2](context).detach()
    with torch.autocast("cpu", torch.bfloat16):
        method.objective(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), 10)
    assert method.context.cached.dtype == torch.float32
    assert torch.allclose(method.context.cached, h, atol=1e-6)


def test_context_of_other_kinds(batch):
    _x, _y, context = batch
    frozen = context.numpy().copy()
    frozen.setflags(write=False)
    for given in ((context, torch.zeros(40)), frozen, frozen.astype(">f8"), list(context)):
        method = STFSEB(make_net(0.0), given, num_context=40, samples=1)
        assert torch.equal(method.context.images.double(), context)
    with pytest.raises(StfsebError, match="different shapes"):
        STFSEB(make_net(0.0), [torch.zeros(5), torch.zeros(6)])

    class Stubborn(nn.Sequential):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    with pytest.raises(StfsebError, match="extractor=callable"):
        STFSEB(Stubborn(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double(), context)


def test_a_callable_extractor_and_normalised_features(batch):
    x, y, context = batch
    net = make_net(0.0)
    method = STFSEB(net, context, num_context=40, samples=1, extractor=lambda t: t * 7.0, normalise_features=True)
    h = context / context.square().sum(1).mean().sqrt()
    expected = function_penalty(net(context), h, 1.0, 100.0, 5.0)
    assert method.objective(x, y, N).function.item() == pytest.approx(expected, rel=1e-9)
    other = STFSEB(net, context, num_context=40, samples=1, extractor="independent")
    assert other.objective(x, y, N).function.item() != pytest.approx(expected, rel=1e-3)


def test_context_is_drawn_without_replacement():
    stream = ContextStream(100, 32, seed=4)
    seen = torch.cat([stream.indices(step) for step in range(25)])  # 800 draws: eight cycles
    assert torch.equal(torch.bincount(seen), torch.full((100,), 8))
    cycles = seen.view(8, 100)
    assert len(torch.unique(cycles, dim=0)) == 8  # a new order in every cycle
    assert torch.equal(torch.cat([stream.indices(i) for i in range(5)]), stream.indices(0, 5))
    assert torch.equal(stream.indices(3), ContextStream(100, 32, seed=4).indices(3))
    assert not torch.equal(stream.indices(3), ContextStream(100, 32, seed=5).indices(3))


def test_extreme_sizes(batch):
    x, y, _ = batch
    net = make_net(0.5)
    context = torch.randn(1024, 5, dtype=torch.float64)
    for count in (1, 1024):
        terms = STFSEB(net, context, num_context=count, samples=2).objective(x, y, N)
        assert torch.isfinite(terms.total)
    one_class = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    terms = STFSEB(one_class, context, samples=2).objective(x, torch.zeros_like(y), N)
    assert terms.data.item() == 0.0
    assert torch.isfinite(terms.function)


BAD = [
    ({"dof": 2.0}, "dof=2.0"),
    ({"dof": 1.0}, "dof > 2"),
    ({"dof": -1.0, "parametrisation": "scale"}, "dof=-1.0"),
    ({"dof": math.nan}, "dof=nan"),
    ({"tau1": 0.0}, "tau1=0.0"),
    ({"tau2": -1.0}, "tau2=-1.0"),
    ({"tau2": math.inf}, "tau2=inf"),
    ({"sigma": 0.0}, "sigma=0.0"),
    ({"samples": 0}, "samples=0"),
    ({"num_context": 41}, "num_context=41"),
    ({"parametrisation": "covarianse"}, "did you mean 'covariance'"),
    ({"functional_scale": "batsh"}, "functional_scale='batsh'"),
    ({"prior_weight": "kept"}, "prior_weight='kept'"),
    ({"context_mask": "rows"}, "context_mask"),
    ({"extractor": "pretraned"}, "extractor"),
    ({"features": "99"}, "unknown layer '99'"),
    ({"tau": 1.0}, "unknown setting 'tau'"),
]


@pytest.mark.parametrize(("settings", "match"), BAD)
def test_bad_settings_are_named(batch, settings, match):
    with pytest.raises(StfsebError, match=match) as caught:
        STFSEB(make_net(), batch[2], **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("context", "match"),
    [
        (None, "context is missing"),
        ("kmnist", "context='kmnist'"),
        (torch.zeros(40, 6), "do not fit the network"),
        (torch.zeros(40, 5, dtype=torch.int64), "torch.int64"),
        (torch.zeros(0, 5), "empty"),
        (torch.full((40, 5), math.nan), "NaN"),
        ([1, 2], "context"),
        (
            DataLoader(TensorDataset(torch.zeros(40, 5))),
            r"DataLoader: give a tensor, an array, .*the loader's \.dataset",
        ),
        ({"images": torch.zeros(40, 5)}, "context is a dict: give a tensor, an array, an image set, a Dataset"),
        (7, "context is a int: give a tensor"),
    ],
)
def test_bad_context_is_named(context, match):
    with pytest.raises(StfsebError, match=match):
        STFSEB(make_net(), context)


def test_unequal_rates_need_a_number():
    net = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 3))
    with pytest.raises(StfsebError, match=r"0\.1, 0\.5"):
        MCDropout(net)
    MCDropout(net, prior_weight=0.3)


def test_frozen_parameters_have_no_prior():
    net = make_net(0.0)
    net[0].requires_grad_(False)
    terms = MAP(net, sigma=0.5).objective(torch.rand(2, 5), torch.zeros(2, dtype=torch.long), 2)
    assert terms.weights.item() == pytest.approx(weight_penalty(net[3].parameters(), math.inf, 0.5))
