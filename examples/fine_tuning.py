"""Fine-tuning a pretrained network, its backbone frozen or changed by a low-rank update, with a pretrained prior.

The pretrained backbone is also the extractor of the function prior: K = tau1 h h' + tau2 I is then small between
images that the backbone takes for alike. The method keeps a copy of an extractor that is being trained.
"""

import copy

import torch
from torch import Tensor, nn

import stfseb
from stfseb.data.embedded import read


class LowRank(nn.Module):
    """W x + B A x: a frozen linear layer with a trainable update of low rank that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def pretrained() -> nn.Sequential:
    """Return the convolutions and the hidden layer of a network trained on another task (handwritten digits)."""
    torch.manual_seed(0)
    net = stfseb.SmallCNN(dropout=0.2)
    stfseb.fit(stfseb.MAP(net), read("mnist").take(slice(0, 1000)), epochs=2, lr=2e-3, progress=False)
    return net[:-2]  # up to the hidden layer's ReLU


def fine_tune(backbone: nn.Sequential, low_rank: bool) -> tuple[stfseb.Method, float]:
    body = copy.deepcopy(backbone).requires_grad_(False)
    if low_rank:
        body.hidden = LowRank(body.hidden, rank=4)
    net = nn.Sequential(body, nn.Dropout(0.2), nn.Linear(128, 10))
    method = stfseb.STFSEB(net, read("kmnist"), extractor=backbone, samples=3, prior_weight=1.0)
    stfseb.fit(method, read("train").take(slice(0, 1000)), epochs=6, batch_size=32, lr=3e-3, progress=False)
    return method, stfseb.evaluate(method, read("test").take(slice(0, 500)))["acc"]


def main() -> None:
    backbone = pretrained()
    for low_rank in (False, True):
        method, accuracy = fine_tune(backbone, low_rank)
        count = sum(p.numel() for p in method.trainable())
        print(f"{'low-rank' if low_rank else 'frozen'} backbone: {count:,} parameters, accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
