"""What editors complete on a public object is documented, so that users may call it."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pages import DOCS
from source_files import text_of

import jstep

PLACE = pathlib.Path(tempfile.mkdtemp())
STATE = jstep.TrainState.create({"w": 1.0}, jstep.adam())
ROWS = jstep.batches(np.ones((8, 2), np.float32), 2)

# What an `EvaluationHook` calls of them is on its page, as of any callback.
CALLBACKS = ("EarlyStopping", "KeepBest", "ReduceOnPlateau")

# Those that cannot be made without arguments. Of the others of the list, an exception or a result,
# the class is enough: they have nothing that their class does not show.
MAKERS: dict[str, Callable[[], Any]] = {
    "Batches": lambda: ROWS,
    "CheckpointSaverHook": lambda: jstep.CheckpointSaverHook(PLACE / "saver", save_steps=1),
    "Coordinator": jstep.Coordinator,
    "EarlyStopping": lambda: jstep.EarlyStopping("loss"),
    "EvaluationHook": lambda: jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=1),
    "ExponentialMovingAverage": lambda: jstep.ExponentialMovingAverage(0.9),
    "FIFOQueue": lambda: jstep.FIFOQueue(1),
    "FingerprintHook": jstep.FingerprintHook,
    "History": jstep.History,
    "Hook": jstep.Hook,
    "KeepBest": lambda: jstep.KeepBest(PLACE / "best", "loss"),
    "LoggingHook": jstep.LoggingHook,
    "MetricsHook": lambda: jstep.MetricsHook(lambda step, values: None),
    "Mixture": lambda: jstep.mixture({"a": np.ones(4), "b": np.ones(4)}, 2, {"a": 1, "b": 1}),
    "NanLossHook": jstep.NanLossHook,
    "Optimizer": jstep.adam,
    "ProfilerHook": lambda: jstep.ProfilerHook(PLACE, start_step=1, stop_step=2),
    "ProgressHook": lambda: jstep.ProgressHook(last_step=1),
    "RandomShuffleQueue": lambda: jstep.RandomShuffleQueue(2, 1),
    "ReduceOnPlateau": lambda: jstep.ReduceOnPlateau("loss", "rate"),
    "ReportingHook": jstep.ReportingHook,
    "Run": lambda: jstep.Run(
        jstep.minimize(lambda params: params["w"] ** 2, jstep.adam()), STATE, None, 1
    ),
    "Saver": lambda: jstep.Saver(PLACE / "run"),
    "Slot": lambda: jstep.Slot(0.0),
    "StallHook": jstep.StallHook,
    "StepCounterHook": jstep.StepCounterHook,
    "StopAtStepHook": lambda: jstep.StopAtStepHook(last_step=1),
    "SummarySaverHook": jstep.SummarySaverHook,
    "TrainState": lambda: STATE,
    "TrainStep": lambda: jstep.minimize(lambda params: params["w"] ** 2, jstep.adam()),
    "Cost": lambda: jstep.cost(
        jstep.minimize(lambda params: params["w"] ** 2, jstep.adam()), STATE
    ),
    "Schedule": lambda: jstep.cosine_decay(0.1, 10),
    "summary.SummaryWriter": lambda: jstep.summary.SummaryWriter(PLACE / "logs"),
    "summary.Summary": lambda: jstep.summary.scalar("x", 1.0),
}


def public_classes() -> Iterator[tuple[str, type]]:
    for package, prefix in (
        (jstep, ""),
        *((getattr(jstep, name), f"{name}.") for name in ("summary", "metrics")),
    ):
        for name in package.__all__:
            if isinstance(getattr(package, name), type):
                yield f"{prefix}{name}", getattr(package, name)


CLASSES = dict(public_classes())


def shown(name: str) -> set[str]:
    """The names that completion shows, but for those that Python itself defines."""
    one = MAKERS[name]() if name in MAKERS else CLASSES[name]
    foreign = {
        member
        for base in CLASSES[name].__mro__
        if not base.__module__.startswith("jstep")
        for member in dir(base)
    }
    return {member for member in dir(one) if not member.startswith("_")} - foreign


def documented(name: str) -> set[str]:
    """The members that the reference lists, and what docstrings have as arguments, attributes or
    `code`."""
    names: set[str] = set()
    for base in CLASSES[name].__mro__:
        text = base.__doc__ or ""
        names |= set(re.findall(r"^ {4,8}(\w+): ", text, re.MULTILINE))
        for code in re.findall(r"`([^`]+)`", text):
            names |= set(re.findall(r"^\.?(\w+)", code))
        names |= set(LISTED.get(base.__name__, ()))
    if name in CALLBACKS:
        names |= documented("EvaluationHook")
    return names


def listed_members() -> dict[str, list[str]]:
    listed: dict[str, list[str]] = {}
    for page in (DOCS / "reference").glob("*.md"):
        for entry in re.finditer(
            r"^::: jstep\.([\w.]+)\n((?:    .*\n)*)", text_of(page), re.MULTILINE
        ):
            found = re.search(r"members: \[(.*?)\]", entry[2])
            if found:
                listed[entry[1].rpartition(".")[2]] = found[1].split(", ")
    return listed


LISTED = listed_members()


@pytest.mark.parametrize("name", CLASSES)
def test_completion_shows_what_is_documented(name: str) -> None:
    assert shown(name) - documented(name) == set()


def test_all_that_has_arguments_is_made() -> None:
    assert set(MAKERS) <= set(CLASSES)
    hooks = {name for name, cls in CLASSES.items() if issubclass(cls, jstep.Hook)}
    assert hooks <= set(MAKERS)
