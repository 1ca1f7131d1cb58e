"""Every optimizer and composition of optimizers, with its expected properties, one line each."""

from optimizer_entries.classic import CLASSIC
from optimizer_entries.entry import EMA, Entry
from optimizer_entries.modern import MODERN
from optimizer_entries.wrappers import WRAPPERS

TABLE: dict[str, Entry] = {**CLASSIC, **MODERN, **WRAPPERS}

__all__ = ["EMA", "TABLE", "Entry"]
