"""Hugging Face Accelerate: mixed precision and gradient accumulation by its own switches.

Accelerate divides the loss by the number of accumulated parts, so each part divides by its own rows; `batch_size=`
is the size of the whole step.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import stfseb
from stfseb.data.embedded import read

ROWS, PART, PARTS = 960, 32, 2


def main(epochs: int = 2) -> float:
    train = read("train").take(slice(0, ROWS))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=PARTS)
    torch.manual_seed(0)
    method = stfseb.STFSEB(stfseb.SmallCNN(dropout=0.2), context=read("kmnist"), samples=3)
    optimiser = torch.optim.Adam(method.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(train.images, train.labels), PART, shuffle=True, drop_last=True)
    wrapped, optimiser, loader = accelerator.prepare(method, optimiser, loader)
    for _ in range(epochs):
        wrapped.train()
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                total = wrapped(x, y, num_data=ROWS, batch_size=PART * PARTS)
                accelerator.backward(total / PART)
                optimiser.step()
                optimiser.zero_grad()
    nll = stfseb.evaluate(accelerator.unwrap_model(wrapped), read("validation").take(slice(0, 300)))["nll"]
    print(f"validation NLL {nll:.3f}")
    return nll


if __name__ == "__main__":
    main()
