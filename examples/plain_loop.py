"""A plain training loop with gradient accumulation: two parts of 32 rows make one step of 64.

`batch_size=` tells the objective the size of the whole step. The parts then share one draw of context points, and
their terms add up to those of the step. (With `context="train"`, call `method.context.begin_parts(x of the whole step)`
before its first part.)
"""

import torch

import stfseb
from stfseb.data.embedded import read


def main(epochs: int = 2, rows: int = 1000) -> float:
    train, validation = read("train").take(slice(0, rows)), read("validation").take(slice(0, 300))
    torch.manual_seed(0)
    method = stfseb.STFSEB(stfseb.SmallCNN(dropout=0.2), context=read("kmnist"), samples=3)
    optimiser = torch.optim.Adam(method.parameters(), lr=1e-3)
    for epoch in range(epochs):
        method.train()
        for step in torch.randperm(rows).split(64):
            optimiser.zero_grad()
            for part in step.split(32):
                x, y = train.images[part], train.labels[part]
                terms = method.objective(x, y, num_data=rows, batch_size=len(step))
                (terms.total / len(step)).backward()
            optimiser.step()
        print(f"epoch {epoch + 1}: last data term {float(terms.data.detach()) / len(x):.3f} nats an image")
    nll = stfseb.evaluate(method, validation)["nll"]
    print(f"validation NLL {nll:.3f}")
    return nll


if __name__ == "__main__":
    main()
