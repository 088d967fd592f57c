"""The paper's tables and figures as plans of runs: what each needs, and how it is carried out."""

from stfseb.experiments.paper.plan import ALL, KINDS, Plan, Variant, make_plan
from stfseb.experiments.paper.quantities import Quantity, quantities

__all__ = ["ALL", "KINDS", "Plan", "Quantity", "Variant", "make_plan", "quantities"]
