import pytest
import torch
from torch import nn

from stfseb import DeepCNN, SmallCNN, StfsebError
from stfseb.networks.features import Features, last_linear, reinitialised
from stfseb.networks.registry import build


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_parameter_counts_are_the_papers_architectures():
    assert count(SmallCNN(1, 10)) == 421_642
    assert count(DeepCNN(3, 10)) == 550_570
    assert SmallCNN(1, 11, image_size=28)(torch.rand(2, 1, 28, 28)).shape == (2, 11)
    assert DeepCNN(3, 9, image_size=28)(torch.rand(2, 3, 28, 28)).shape == (2, 9)


def test_dropout_stands_after_every_block_and_after_the_hidden_layer():
    small = [type(m).__name__ for m in SmallCNN().children()]
    deep = [type(m).__name__ for m in DeepCNN().children()]
    assert small.count("Dropout") == 3
    assert deep.count("Dropout") == 4
    assert all(deep[i - 1] in ("MaxPool2d", "ReLU") for i, n in enumerate(deep) if n == "Dropout")


def test_networks_rebuild_from_their_json():
    net = DeepCNN(3, 7, dropout=0.2, image_size=28, hidden=64)
    again = build(net.spec)
    assert again.spec == net.spec
    again.load_state_dict(net.state_dict())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"dropout": 1.0}, "dropout=1.0"), ({"classes": 0}, "classes=0"), ({"image_size": 3}, "image_size=3")],
)
def test_impossible_networks_are_refused(arguments, match):
    with pytest.raises(StfsebError, match=match):
        SmallCNN(**arguments)


class Residual(nn.Module):
    """The output layer is defined first and reached last."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.body = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x))))


def test_features_are_the_input_of_the_last_linear_that_runs():
    net, x = Residual().train(), torch.rand(5, 4)
    assert last_linear(net, x) == "head"
    assert net.training
    extractor = Features.from_network(Residual(), x, None)
    extractor.source.load_state_dict(net.state_dict())
    assert torch.allclose(extractor(x), torch.relu(net.body(x)))


def test_a_named_layer_gives_its_output_and_an_unknown_one_the_nearest_name():
    x = torch.rand(5, 4)
    net = Residual()
    extractor = Features.from_network(net, x, "body")
    assert torch.allclose(extractor(x), net.body(x))
    assert not extractor(x).requires_grad
    with pytest.raises(StfsebError, match="did you mean 'body'"):
        Features.from_network(Residual(), x, "bodi")


def test_any_callable_may_extract():
    extractor = Features(lambda x: x.view(len(x), 2, 2) * 2, None)
    assert torch.equal(extractor(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    with pytest.raises(StfsebError, match="3 images"):
        Features(lambda x: x.sum(0), None)(torch.ones(3, 4))


def test_without_a_linear_a_layer_must_be_named():
    with pytest.raises(StfsebError, match="features="):
        last_linear(nn.Conv2d(1, 2, 3), torch.rand(1, 1, 8, 8))


def test_independent_copies_differ_and_leave_the_random_state_alone():
    net = SmallCNN()
    state = torch.get_rng_state()
    other = reinitialised(net, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(net.conv1.weight, other.conv1.weight)
    assert other.conv1.weight.std().item() == pytest.approx(net.conv1.weight.std().item(), rel=0.3)
