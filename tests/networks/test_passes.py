"""How the calls of a pass lie in memory: networks that `view` their features work, the numbers stay the same."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stfseb
from stfseb.networks.dropout import Block, NoDropout
from stfseb.networks.folding import FoldedNetwork, deterministic
from stfseb.networks.layout import Pass, layout_kept, takes_any_layout
from stfseb.training.population import Member, fit_population

LAST = torch.channels_last


class Flattening(nn.Module):
    """Two convolutions and a linear layer, with a flattening in between as people write it."""

    def __init__(self, flatten, channels=1):
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop, self.last, self.flatten = nn.Dropout(0.5), nn.Linear(8 * 16, 3), flatten

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.one(x)), 2)
        x = F.max_pool2d(torch.relu(self.two(x)), 2)
        return self.last(self.drop(self.flatten(x)))


WAYS = {
    "numbers": lambda x: x.view(-1, 8 * 16),
    "a tuple": lambda x: x.view((x.size(0), -1)),
    "by name": lambda x: x.view(size=(x.size(0), 128)),
    "as another": lambda x: x.view_as(torch.empty(x.size(0), 128)),
    "bits and back": lambda x: (
        x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).view(x.dtype).flatten(1)
    ),
}


def made(flatten, channels=1):
    torch.manual_seed(0)
    return Flattening(flatten, channels)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [stfseb.MCDropout, stfseb.MAP, stfseb.MFVI])
def test_a_network_that_views_is_one_that_flattens(way, channels, kind):
    x = torch.rand(5, channels, 16, 16)
    theirs, ours = (
        kind(made(flatten, channels)).sample_logits(x, 3, seed=1) for flatten in (lambda x: x.flatten(1), WAYS[way])
    )
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", [stfseb.STFSEB, stfseb.MCDropout, stfseb.FSEB, stfseb.MAP])
def test_it_trains_and_is_its_owners_afterwards(kind, precision):
    x, y = torch.rand(40, 1, 16, 16), torch.arange(40) % 3
    net = made(WAYS["numbers"])
    context = {"context": torch.rand(20, 1, 16, 16), "num_context": 4} if kind in (stfseb.STFSEB, stfseb.FSEB) else {}
    method = kind(net, **context)
    stfseb.fit(method, (x, y), (x, y), epochs=1, batch_size=16, precision=precision, progress=False)
    assert net(x).shape == (40, 3)  # its own forward, outside of our passes
    assert all(p.is_contiguous() for p in net.parameters())
    assert method.predict_proba(x[:4]).shape == (4, 3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_networks_of_which_little_is_known_train_on_channels_last_weights_in_bf16(precision):
    x, y = torch.rand(40, 3, 16, 16), torch.arange(40) % 3
    net = made(lambda x: seen.append(net.one.weight.is_contiguous()) or x.view(len(x), -1), channels=3)
    seen = []
    stfseb.fit(stfseb.MAP(net), (x, y), (x, y), epochs=1, batch_size=16, precision=precision, progress=False)
    assert seen[-1] == (precision == "float32")
    assert net.one.weight.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_it_trains_on_a_card_and_is_its_owners_afterwards(capture):
    x, y = torch.rand(64, 1, 16, 16), torch.arange(64) % 3
    net = made(WAYS["numbers"])
    stfseb.fit(
        stfseb.MCDropout(net), (x, y), (x, y), epochs=1, batch_size=16, device="cuda", capture=capture, progress=False
    )
    assert net(x.cuda()).shape == (64, 3)
    assert all(p.is_contiguous() for p in net.parameters())


@pytest.mark.parametrize("way", ["set", "relu", "clamp"])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.flatten(1),
        lambda x: torch.cat([x, x])[: len(x)].flatten(1),
        lambda x: torch.add(0, other=x).flatten(1),
    ],
)
def test_what_is_written_into_a_copied_view_is_not_lost_in_silence(way, read):
    def forward(x):
        if way == "set":
            x.view(len(x), -1)[:, ::2] = 0
        elif way == "relu":
            F.relu(x.view(len(x), -1), inplace=True)
        else:
            x.view_as(torch.empty(len(x), 128)).clamp_(0)
        return read(x)

    x = torch.rand(5, 1, 16, 16)
    net = made(forward).eval()
    torch.testing.assert_close(stfseb.MAP(net).sample_logits(x, 1)[0], net(x))  # plain: a view is a view
    with pytest.raises(stfseb.StfsebError, match="writes into a view of a tensor"):
        stfseb.MAP(net.to(memory_format=LAST)).sample_logits(x, 1)


def written(x):
    """Return a view that has been written to."""
    return F.relu(x.view(len(x), -1).sub_(0.1), inplace=True)


def test_a_network_of_a_population_is_its_owners_afterwards():
    x, y = torch.rand(40, 3, 16, 16), torch.arange(40) % 3
    net = made(WAYS["numbers"], channels=3)
    member = Member("one", lambda: stfseb.MAP(net), 0)
    (outcome,) = fit_population([member], (x, y), (x, y), epochs=1, batch_size=16, device="cpu", precision="bf16")
    assert outcome.result is not None
    assert net(x).shape == (40, 3)
    assert all(p.is_contiguous() for p in net.parameters())


ASKING = {  # what x is, and not what is in it
    "nothing": lambda x: None,
    "shape": lambda x: x.shape[0],
    "size": lambda x: x.size(0) + x.size()[1] + x.numel() + x.dim(),
    "length": len,
    "others like it": lambda x: (x.new_zeros(3), torch.zeros_like(x), torch.ones(3).type_as(x)),
    "its size for others": lambda x: (torch.ones(()).expand_as(x), torch.ones(x.numel()).view_as(x)),
    "kind": lambda x: (x.dtype, x.device, x.stride(), x.is_contiguous(), x.requires_grad),
}


@pytest.mark.parametrize("ask", ASKING)
def test_going_on_with_a_copied_view_that_was_written_to_is_right(ask, monkeypatch):
    seen = []
    real = Pass._viewed
    monkeypatch.setattr(Pass, "_viewed", lambda self, x, out: seen.append(self) or real(self, x, out))

    def forward(x):
        out = written(x)
        ASKING[ask](x)
        return out

    net = made(forward).eval()
    x = torch.rand(5, 1, 16, 16)
    plain = net(x)
    torch.testing.assert_close(stfseb.MAP(net.to(memory_format=LAST)).sample_logits(x, 1)[0], plain)
    (copied,) = seen[0].views.all
    assert copied.copy_written


def through_another_copy(x):
    one, other = x.view(len(x), -1), x.view(len(x), 16, -1)
    one.clamp_(0.5)
    return other.flatten(1)


def through_the_original(x):
    flat = x.view(len(x), -1)
    x.clamp_(0.5)
    return flat + 0


def through_an_alias(x):
    alias = x[:]
    x.view(len(x), -1).clamp_(0.5)
    return alias.flatten(1)


def into_a_dropout(x):
    x.view(len(x), -1).clamp_(0.5)
    return F.dropout(x, 0.5).flatten(1)


def test_what_a_dropout_reads_is_not_lost_in_silence():
    net = made(into_a_dropout).eval().to(memory_format=LAST)
    with pytest.raises(stfseb.StfsebError, match="reads the other again"):
        stfseb.MCDropout(net).sample_logits(torch.rand(5, 1, 16, 16), 2)


def test_tensors_without_counts_or_memory_are_no_hindrance():
    x = torch.rand(5, 3, 16, 16)
    late = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=LAST), Viewing(), nn.LazyLinear(3))
    stfseb.fit(stfseb.MAP(late), (x, torch.arange(5) % 3), (x, torch.arange(5) % 3), epochs=1, progress=False)
    with torch.inference_mode():
        inside = torch.rand(5, 3, 4, 4).contiguous(memory_format=LAST)
    net = nn.Sequential(Viewing(), nn.Linear(48, 3))
    torch.testing.assert_close(stfseb.MAP(net).sample_logits(inside, 1)[0], net(inside.clone().contiguous()).detach())


class Viewing(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


def in_a_list(x):
    x.view(len(x), -1).clamp_(0.5)
    return torch.stack([x, x])[0].flatten(1)


@pytest.mark.parametrize("forward", [through_another_copy, through_the_original, through_an_alias, in_a_list])
def test_what_a_view_and_its_tensor_would_share_is_not_lost_in_silence(forward):
    x = torch.rand(5, 1, 16, 16)
    net = made(forward).eval()
    torch.testing.assert_close(stfseb.MAP(net).sample_logits(x, 1)[0], net(x))
    with pytest.raises(stfseb.StfsebError, match="reads the other again"):
        stfseb.MAP(net.to(memory_format=LAST)).sample_logits(x, 1)


@pytest.mark.parametrize("write", ["before", "after", "between"])
def test_parts_of_one_tensor_that_share_nothing_are_not_confused(write):
    """As gated layers do it: halves of the channels, each flattened by a view."""

    def forward(x):
        one, other = x[:, :4], x[:, 4:]
        if write == "before":
            other.clamp_(0.5)
        one = one.view(len(x), -1)
        if write == "between":
            other.clamp_(0.5)  # counted with the first half's writes
        one = F.relu(one, inplace=True)
        other = other.view(len(x), -1)
        if write == "after":
            one.clamp_(0.1)
        return torch.cat([one, other.sigmoid()], 1)

    x = torch.rand(5, 1, 16, 16)
    net = made(forward).eval()
    plain = net(x)
    torch.testing.assert_close(stfseb.MAP(net.to(memory_format=LAST)).sample_logits(x, 1)[0], plain)


def test_copies_made_after_a_write_have_it():
    def forward(x):
        first = x.view(len(x), -1)
        x.clamp_(0.5)
        del first
        return x.view(len(x), -1) + x.flatten(1)

    x = torch.rand(5, 1, 16, 16)
    net = made(forward).eval()
    plain = net(x)
    torch.testing.assert_close(stfseb.MAP(net.to(memory_format=LAST)).sample_logits(x, 1)[0], plain)


def test_a_network_that_views_is_compiled_as_one_graph():
    net = made(WAYS["numbers"]).eval().to(memory_format=LAST)
    x = torch.rand(5, 1, 16, 16)

    def run(x):
        with NoDropout():
            return net(x)

    expected = run(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), expected)


def layers(channels=1):
    torch.manual_seed(0)
    first = [nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0)]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 3))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains_of_known_layers_run_channels_last_on_a_cpu(channels, dtype, monkeypatch):
    net, seen = layers(channels).eval(), []
    real = F.max_pool2d
    monkeypatch.setattr(
        F, "max_pool2d", lambda x, *a, **k: seen.append(x.is_contiguous(memory_format=LAST)) or real(x, *a, **k)
    )
    x = torch.rand(40, channels, 16, 16)  # 10,240 places
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain = net(x)
        ours, folded = deterministic(net, x), FoldedNetwork(net)(x, 2, [Block(40, shared=True)])[0]
        deterministic(net, x[:20])  # too few to pay
    assert [key for key, _ in itertools.groupby(seen)] == [False, True, False]
    close = {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(ours, plain.float(), **close)
    torch.testing.assert_close(folded[1], plain.float(), **close)
    assert x.stride() == (channels * 256, 256, 16, 1)  # the caller's own stays as it was


def test_gradients_do_not_depend_on_the_layout():
    net, x = layers(), torch.rand(40, 1, 16, 16)
    theirs = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    ours = torch.autograd.grad(deterministic(net, x).square().sum(), list(net.parameters()))
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_masks_do_not_depend_on_the_layout():
    """Of every row its own masks: the same of a seed in either layout and precision, up to rounding."""
    net, x = layers(), torch.rand(40, 1, 16, 16)
    net[3].p = 0.5
    found = []
    for one, rows in ((net, x), (copy.deepcopy(net).double(), x.double())):
        torch.manual_seed(3)
        found.append(FoldedNetwork(one)(rows, 4, [Block(40, shared=False)])[0].float())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [nn.GroupNorm(2, 8), nn.LayerNorm([8, 16, 16]), nn.Conv2d(8, 8, 3, padding=1, groups=2), Flattening(torch.flatten)],
)
def test_other_networks_are_left_as_they_are(other):
    assert takes_any_layout(list(layers()))
    assert not takes_any_layout([*layers(), other])
    hooked = layers()
    hooked[1].register_forward_hook(lambda m, i, out: out.view(len(out), -1).shape and None)
    assert not takes_any_layout(list(hooked))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_a_layout_is_not_chosen(dtype):
    """In double precision, under vmap and jvp, while a graph is made, for volumes and for what is given by name."""
    conv = nn.Conv2d(3, 4, 3, padding=1).to(dtype)
    x = torch.rand(40, 3, 16, 16, dtype=dtype)
    call = Pass(laid_out=True).call
    assert call(F.conv2d, (x, conv.weight), {}).is_contiguous(memory_format=LAST) == (dtype == torch.float32)
    assert Pass().call(F.conv2d, (x, conv.weight), {}).is_contiguous()
    assert call(F.conv2d, (), {"input": x, "weight": conv.weight}).is_contiguous()
    strides = []

    def one(weight):
        out = call(F.conv2d, (x, weight), {})
        strides.append(out.stride())
        return F.group_norm(out, 2)  # asks for the layout, which vmap does not tell of any but the plain one

    torch.func.vmap(one)(torch.stack([conv.weight, conv.weight]))
    torch.func.jvp(one, (conv.weight.detach(),), (conv.weight.detach(),))
    assert all(stride[-1] == 1 for stride in strides)
    assert call(F.conv3d, (x[None], torch.rand(1, 40, 1, 1, 1, dtype=dtype)), {}).shape == (1, 1, 3, 16, 16)
    net = layers().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and shapes that are looked at are constants
        traced = torch.jit.trace(lambda x: deterministic(net, x), torch.rand(40, 1, 16, 16), check_trace=False)
    assert traced(torch.rand(7, 1, 16, 16)).shape == (7, 3)  # the number of rows is not baked in


def test_weights_lie_after_training_as_they_did_before(monkeypatch):
    """Whatever an engine does to them (here as on a card); layers that get their weights late are no hindrance."""
    from stfseb.training import loop

    real, laid = loop.make_engine, []

    def make(method, *args, **kwargs):
        for parameter in method.net.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=LAST)
                laid.append(parameter.is_contiguous())
        return real(method, *args, **kwargs)

    monkeypatch.setattr(loop, "make_engine", make)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.rand(40, 3, 8, 8), torch.arange(40) % 3
    stfseb.fit(stfseb.MAP(net), (x, y), (x, y), epochs=1, batch_size=16, progress=False)
    assert laid == [False]
    assert all(p.is_contiguous() for p in net.parameters())


def test_weights_lie_in_the_end_as_they_were():
    plain, last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=LAST)
    net = nn.Sequential(plain, last)
    for parameter in (plain.weight, last.weight):
        parameter.grad = torch.rand_like(parameter).contiguous(memory_format=LAST)
    gradient = plain.weight.grad.clone()
    values = [p.detach().clone() for p in net.parameters()]

    def leave():
        with layout_kept(net):
            for parameter in (plain.weight, last.weight):
                parameter.data = parameter.data.contiguous(memory_format=LAST)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert plain.weight.is_contiguous()
    assert plain.weight.grad.is_contiguous()
    assert torch.equal(plain.weight.grad, gradient)
    assert last.weight.is_contiguous(memory_format=LAST)
    assert last.weight.grad.is_contiguous(memory_format=LAST)
    assert not last.weight.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(values, net.parameters(), strict=True))
