"""Which numbers each parameter refuses, and what they are told: the table `ranges.txt`.

Each parameter of each public function and class is given some numbers. A row of the table is a
message, the values that are told it, and below it the parameters of that kind. `*.learning_rate`
stands for that parameter of each function that no row names. Messages about a wrong type have one
form, for all parameters.
"""

import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = pathlib.Path(jstep.__file__).parent
WRONG: tuple[Any, ...] = (-1, 0, 1, 2.5, float("nan"), float("inf"), "x", True, None)
SGD = jstep.gradient_descent(0.1)
PARAMS = {"w": np.ones((2, 3), np.float32)}


def loss(params: Any, *args: Any) -> Any:
    return jnp.sum(params["w"])


ADVANCING = jstep.minimize(loss, SGD)


GIVEN: dict[str, Any] = {
    "learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5, "boundaries": [2],
    "values": [1.0, 2.0], "momentum": 0.9, "capacity": 10, "min_after_dequeue": 1, "last_step": 10,
    "steps": 10, "warmup_steps": 2, "total_steps": 10, "peak": 0.1, "base": 0.1, "max_value": 0.1,
    "value": 0.1, "start": 0.1, "end": 0.2, "beta1": 0.9, "beta3": 0.99,
    "initial_learning_rate": 0.1, "step_size_up": 3, "stable_steps": 3, "optimizer": SGD,
    "clip_norm": 1.0, "every_n_steps": 2, "decay": 0.9, "schedule": lambda step: 0.1,
    "first_decay_steps": 4, "fn": lambda *args: None, "problems": "damaged", "num_classes": 3,
    "k": 2, "n": 2, "inner": SGD, "arrays": {"x": np.zeros((20, 2))},
    "sources": {"a": {"x": np.zeros((20, 2))}}, "weights": {"a": 1.0}, "batch_size": 4,
    "batches": [()], "metric_fn": lambda params: {}, "evaluate": lambda state: {}, "metric": "loss",
    "loss_fn": lambda params: 0.0, "message": "text", "msg": "text", "text": "text", "tag": "tag",
    "tags": "tag", "name": "name", "prefix": "model", "key": jax.random.key(0), "level": 10,
    "step": 3, "start_step": 2, "stop_step": 4, "leaves": (), "at": 1,
    "write": lambda step, metrics: None, "make": lambda step: iter(()), "iterator": iter(()),
    "enqueue_ops": [print],
    "logdir": "logs", "directory": "runs", "path": "runs/weights.safetensors",
    "checkpoint_dir": "runs", "paths": "runs", "params": PARAMS, "grads": PARAMS, "updates": PARAMS,
    "factors": PARAMS, "tree": PARAMS, "target": PARAMS, "xs": PARAMS, "slots": lambda param: {},
    "hyper": {"learning_rate": 0.1}, "eta": 0.1, "gamma": 0.5, "factor": 0.5, "weight_decay": 0.1,
    "direction": lambda grad, param, hyper: grad, "rule": lambda grad, slots, param, hyper: grad,
    "transformation": optax.sgd(0.1), "optimizers": {"all": SGD},
    "labels": lambda path, leaf: "all", "old_optimizer": SGD, "new_optimizer": SGD,
    "ema": jstep.ExponentialMovingAverage(0.9), "alpha": 5.0, "schedules": [0.1, 0.2],
    "init_value": 0.1, "end_value": 0.2, "min": 0.1, "max": 0.2, "t": np.ones(3), "x": np.ones(3),
    "ids": np.arange(3), "table": np.ones((4, 2)), "local_batch": np.ones((2, 3)),
    "tensor": np.ones((1, 2, 2, 3)), "summaries": [], "graph": None, "scores": np.ones(4),
    "logits": np.ones((4, 3)), "predictions": np.arange(4) % 3, "train_step": ADVANCING,
    "widths": [2, 4], "global_step": 0, "activations": lambda params: params,
    "make_state": lambda: jstep.TrainState.create(PARAMS, SGD),
}  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    "state": lambda: jstep.TrainState.create(PARAMS, SGD),
    "mesh": lambda: jax.make_mesh((1,), ("data",)), "saver": lambda: jstep.Saver("runs"),
    "queue": lambda: jstep.FIFOQueue(3),
    "qr": lambda: jstep.QueueRunner(jstep.FIFOQueue(3), [print]),
    "summary": lambda: jstep.summary.scalar("tag", 1.0),
}  # fmt: skip
"""Arguments that a call may use up."""
GIVEN_TO: dict[str, dict[str, Any]] = {
    **{name: {"labels": np.arange(4) % 2} for name in dir(jstep.metrics)},
    "replayed": {"make": list}, "mean_of": {"total": 1.0, "count": 1.0},
    "scale_updates": {"factors": {"w": 0.5}}, "mup": {"base": PARAMS}, "train": {"last_step": 0},
    "gradients": {"fn": loss}, "layer_norms": {"tree": PARAMS},
    "replay": {"batches": lambda step: ()},
    "verify_resume": {"train_step": ADVANCING, "batches": lambda step: ()},
    "topology": {"name": "h100:1x8"},
    "coord_check": {"make": lambda width: (ADVANCING, MADE["state"](), ())},
    "TrainStep": {"step": lambda state: (state, {})},
    "write_graph": {"graph": jax.jit(loss).trace(PARAMS)}, "scalar": {"values": 1.0},
    "get_slot": {"name": "momentum"}, "add_noise": {"key": jax.random.key(0)},
    "goodput": {"path": "runs"}, "DataLossError": {"offset": 3, "reason": "text"},
}  # fmt: skip
"""Arguments that have another meaning there."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NOT_CALLED = {"Batches", "Mixture", "PrefetchIterator", "Run", "start_queue_runners"}
"""Classes of what jstep's functions return, what takes no numbers, and what has the arguments of
`train`."""
MODULES = (jstep, jstep.metrics, jstep.summary)


def rooms() -> dict[str, dict[str, Any]]:
    """The public functions and classes, by the room that defines them."""
    found: dict[str, dict[str, Any]] = {}
    for module in MODULES:
        for name in sorted(set(dir(module)) - NOT_CALLED):
            made = getattr(module, name)
            code = (
                inspect.unwrap(made.__init__ if isinstance(made, type) else made)
                if callable(made)
                else None
            )
            if not name.startswith("_") and inspect.isfunction(code):
                path = pathlib.Path(code.__code__.co_filename)
                if path.is_relative_to(PACKAGE):
                    found.setdefault(path.parent.name, {})[name] = made
    return found


ROOMS = rooms()


def messages_of(make: Any) -> dict[str, dict[str, str]]:
    """The messages about each parameter that name it first, each with the values that get it."""
    parameters = inspect.signature(make).parameters
    to_it = GIVEN_TO.get(make.__name__, {})
    required = [
        one for one in parameters.values() if one.default is one.empty and one.kind not in VARIADIC
    ]
    required += [one for one in parameters.values() if one.name in to_it and one not in required]
    found: dict[str, dict[str, str]] = {}
    for name in parameters:
        for value in WRONG:
            given = {
                one.name: MADE[one.name]() if one.name in MADE else (GIVEN | to_it)[one.name]
                for one in required
            }
            given[name] = value
            positional = [
                given.pop(one.name) for one in required if one.kind is one.POSITIONAL_ONLY
            ]
            try:
                make(*positional, **given)
            except (ValueError, TypeError, LookupError, OSError, ImportError) as error:
                what, colon, text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).partition(": ")
                if colon and what == f"{name}={value!r}":
                    texts = found.setdefault(name, {})
                    texts[text] = f"{texts[text]} {value!r}" if text in texts else repr(value)
    return found


def kinds() -> dict[str, set[str]]:
    """The table: message and values → parameters."""
    rows: dict[str, set[str]] = {}
    for line in (HERE / "ranges.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            rows[list(rows)[-1]] |= set(line.split())
        else:
            rows[line] = set()
    return rows


@pytest.mark.parametrize(
    ("name", "make"),
    [pytest.param(*one, id=one[0]) for room in ROOMS.values() for one in room.items()],
)
def test_what_wrong_numbers_are_told(
    name: str, make: Any, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {
        (f"{text} <- {values}", f"{name}.{parameter}")
        for parameter, texts in messages_of(make).items()
        for text, values in texts.items()
        if ", got " not in text  # that of a wrong type, for all parameters alike
    }
    rows = kinds()
    listed = {
        (row, path) for row, paths in rows.items() for path in paths if path.startswith(f"{name}.")
    }
    patterns = {
        f"{name}.{parameter}": f"*.{parameter}" for parameter in inspect.signature(make).parameters
    }
    for path in patterns.keys() - {path for _, path in listed}:
        listed |= {(row, path) for row, paths in rows.items() if patterns[path] in paths}
    assert told == listed, (
        "list each parameter below the row of its message in tests/bad_input/ranges.txt"
    )


def test_the_table_names_what_there_is() -> None:
    names = {name for made in ROOMS.values() for name in made}
    assert {parameter.partition(".")[0] for row in kinds().values() for parameter in row} <= {
        *names,
        "*",
    }
