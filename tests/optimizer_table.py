"""Every optimizer and composition of optimizers, with its expected properties, one line each."""

from optimizer_entries.classic import CLASSIC
from optimizer_entries.entry import EMA, Entry
from optimizer_entries.modern import MODERN
from optimizer_entries.wrappers import WRAPPERS

TABLE = {**CLASSIC, **MODERN, **WRAPPERS}

REPRESENTATIVES = [
    "gradient_descent",  # no slot
    "adam",
    "stochastic_rounding",  # low precision
    "adafactor",  # factored slots
    "muon",  # matrices
    "partition",
    "dynamic_loss_scale",
]
"""One optimizer for each kind of code path: those that quick tests run.

SOAP, `held` and `from_optax` have tests of their own."""

__all__ = ["EMA", "REPRESENTATIVES", "TABLE", "Entry"]
