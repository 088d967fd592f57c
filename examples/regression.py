"""Regression with error bars: a Gaussian likelihood with learnt noise, and a prior that knows the targets' mean."""

import torch
from sklearn.datasets import load_diabetes

import stfseb
from stfseb.likelihoods import GaussianRegression


def main() -> dict[str, float]:
    x, y = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:340], order[340:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    torch.manual_seed(0)
    spread = float(y[train].std())
    # The network's outputs are in units of the targets, so the prior at unfamiliar rows must be too.
    method = stfseb.STFSEB(
        stfseb.MLP(in_features=10, hidden=(64,)),
        context=3.0 * torch.randn(500, 10),
        prior_mean=float(y[train].mean()),
        tau1=spread**2,
        tau2=spread**2,
        prior_weight=0.0,
        likelihood=GaussianRegression(noise=spread),
    )
    with torch.no_grad():  # a good start: the targets' mean and spread
        method.net.output.weight.mul_(spread)
        method.net.output.bias.fill_(float(y[train].mean()))
    stfseb.fit(method, (x[train], y[train]), epochs=200, lr=0.02, patience=30, progress=False)
    scores = stfseb.evaluate(method, (x[test], y[test]), {"far away": 5.0 * torch.randn(100, 10)})
    low, high = method.predict_interval(x[test][:3], level=0.9, seed=0)
    for target, a, b in zip(y[test][:3], low[:, 0], high[:, 0], strict=True):
        print(f"measured {target:.0f}, predicted between {a:.0f} and {b:.0f}")
    print(f"RMSE {scores['rmse']:.1f}, NLL {scores['nll']:.2f}, 95 % intervals hold {100 * scores['coverage95']:.0f} %")
    return scores


if __name__ == "__main__":
    main()
