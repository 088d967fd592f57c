"""The paper's minibatch objective written out plainly, to compare the library with."""

import math

import numpy as np
import torch


def cross_entropy(logits, y):
    log_probs = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -log_probs[torch.arange(len(y)), y].sum()


def function_penalty(outputs, features, tau1, tau2, dof):
    """sum_l of the penalty, K built and inverted densely."""
    h = features.detach().double().numpy()
    f = outputs.detach().double().numpy()
    K = tau1 * h @ h.T + tau2 * np.eye(len(h))
    c = np.einsum("il,ij,jl->l", f, np.linalg.inv(K), f)
    if math.isinf(dof):
        return float(np.sum(c) / 2)
    return float(np.sum((dof + len(h)) / 2 * np.log(1 + c / (dof - 2))))


def weight_penalty(parameters, dof, sigma):
    theta = np.concatenate([p.detach().double().numpy().ravel() for p in parameters])
    if math.isinf(dof):
        return float(np.sum(theta**2) / (2 * sigma**2))
    return float(np.sum((dof + 1) / 2 * np.log(1 + theta**2 / (dof * sigma**2))))
