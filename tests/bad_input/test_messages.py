"""What wrong numbers are told, whole; `python tests/bad_input/test_messages.py` writes it anew.

Each parameter of each optimizer, schedule, hook and queue is given numbers that it may refuse. Their borders, and what
a number means, are looked at there. The messages are in a file for each room beside this one.
"""

import inspect
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import jstep

WRONG: tuple[Any, ...] = (-1, 0, 1, 2.5, float("nan"), float("inf"), "x", True, None)
GIVEN: dict[str, Any] = {
    "learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5, "boundaries": [2], "values": [1.0, 2.0],
    "momentum": 0.9,
    "capacity": 10, "min_after_dequeue": 1, "last_step": 10, "steps": 10, "warmup_steps": 2, "total_steps": 10,
    "peak": 0.1, "base": 0.1, "max_value": 0.1, "value": 0.1, "start": 0.1, "end": 0.2, "beta1": 0.9, "beta3": 0.99,
    "initial_learning_rate": 0.1, "step_size_up": 3, "stable_steps": 3, "optimizer": jstep.gradient_descent(0.1),
    "clip_norm": 1.0, "every_n_steps": 2, "decay": 0.9, "schedule": lambda step: 0.1, "first_decay_steps": 4,
    "fn": lambda *args: None, "num_classes": 3, "k": 2, "n": 2, "inner": jstep.gradient_descent(0.1),
    "arrays": {"x": np.zeros((20, 2))}, "sources": {"a": {"x": np.zeros((20, 2))}}, "weights": {"a": 1.0},
    "batch_size": 4, "batches": [()],
    "metric_fn": lambda params: {}, "evaluate": lambda state: {}, "metric": "loss", "loss_fn": lambda params: 0.0,
}  # fmt: skip
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ROOMS = ("optimizers", "schedules", "hooks", "queues", "data", "evaluating", "training", "differentiate")


def makers(room: str) -> dict[str, Any]:
    """The public functions and classes that the package defines in a room."""
    found = {}
    for name in sorted(dir(jstep)):
        made = getattr(jstep, name)
        code = inspect.unwrap(made.__init__ if isinstance(made, type) else made)
        if inspect.isfunction(code) and pathlib.Path(code.__code__.co_filename).parent.name == room:
            found[name] = made
    found.pop("start_queue_runners", None)  # it makes nothing
    return found


def messages_of(make: Any) -> dict[str, dict[str, str]]:
    """The messages about each parameter that name it first, each with the values that are told it."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    required = [one for one in parameters.values() if one.default is one.empty and one.kind not in VARIADIC]
    if not all(one.name in GIVEN for one in required):
        return {}
    found: dict[str, dict[str, str]] = {}
    for name in parameters:
        for value in WRONG:
            given = {one.name: GIVEN[one.name] for one in required} | {name: value}
            positional = [given.pop(one.name) for one in required if one.kind is one.POSITIONAL_ONLY]
            try:
                make(*positional, **given)
            except (ValueError, TypeError) as error:
                what, colon, text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).partition(": ")
                if colon and what == f"{name}={value!r}":
                    texts = found.setdefault(name, {})
                    texts[text] = f"{texts[text]} {value!r}" if text in texts else repr(value)
    return found


def file_of(room: str) -> pathlib.Path:
    return pathlib.Path(__file__).with_name(f"messages_of_{room}.json")


@pytest.mark.parametrize(
    ("room", "name", "make"),
    [pytest.param(room, *one, id=f"{room}-{one[0]}") for room in ROOMS for one in makers(room).items()],
)
def test_the_messages(room: str, name: str, make: Any) -> None:
    assert messages_of(make) == json.loads(file_of(room).read_text(encoding="utf-8")).get(name, {})


if __name__ == "__main__":
    for room in ROOMS:
        told = {name: found for name, make in makers(room).items() if (found := messages_of(make))}
        file_of(room).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
