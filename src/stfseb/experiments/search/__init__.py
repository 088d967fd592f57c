"""Random search for a method's settings: many workers on one study, resumable, with an exact count of trials.

plan.py      what is searched: task, method, space, training, seed; the draws, which follow from them alone
store.py     the trials in SQLite or PostgreSQL: who has which, who is done, who died
trials.py    training the trials as a population and measuring each, on validation and held-back context images
pruning.py   when a trial is hopeless, and the replay that shows whether a winner would have been lost
rules.py     which trial is chosen: the paper's rule, ours, and ours with level AUROCs
finals.py    the short list of the best trials, and how finalists stand before and after full training
worker.py    one worker from the first claim to the last trial
outcome.py   search.json and preset.yaml
"""

from stfseb.experiments.search.outcome import read_search
from stfseb.experiments.search.plan import Plan, make_plan
from stfseb.experiments.search.pruning import Pruning, replay_pruning
from stfseb.experiments.search.rules import Choice, Images, choose
from stfseb.experiments.search.worker import search

__all__ = ["Choice", "Images", "Plan", "Pruning", "choose", "make_plan", "read_search", "replay_pruning", "search"]
