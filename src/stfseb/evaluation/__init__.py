"""Metrics, out-of-distribution scores and the one pass that computes them."""

from stfseb.evaluation.evaluate import Evaluation, assess, evaluate

__all__ = ["Evaluation", "assess", "evaluate"]
