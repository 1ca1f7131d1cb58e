"""What the tools print, whole, for small fixed inputs; `python tests/look/test_whole_reports.py`
writes it anew.

The texts are in whole_reports.txt beside this file: a change of a report is a change of that file,
to be looked at.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jstep
from jstep.look.arrays import array_difference
from jstep.look.cli import main
from jstep.look.diff import changes_text, differences_left_out

FILE = pathlib.Path(__file__).with_name("whole_reports.txt")
SLOW = jstep.adam(jstep.linear(0.1, 0.0, steps=1000))
FAST = jstep.momentum(jstep.piecewise_constant([200, 600], [1.0, 0.5, 0.25]), 0.9)


class AtSteps(jstep.Hook):
    """A hook that is due at some steps."""

    def __init__(self, *steps):
        self._steps = (*steps, 10**9)

    def after_step(self, step, state, metrics):
        pass

    def next_due(self, step):
        return next(one for one in self._steps if one > step)


def first_loss(params, x):
    return jnp.sum(params["w"]) * jnp.sum(x["x"])


def second_loss(params, x):
    return first_loss(params, x)


def plan_of_everything():
    optimizer = jstep.partition({"slow": SLOW, "fast": FAST}, lambda path, leaf: "slow")
    steps = {0: jstep.minimize(first_loss, optimizer), 300: jstep.minimize(second_loss, optimizer)}
    hooks = [
        *(
            jstep.LoggingHook(every_n_steps=100),
            jstep.LoggingHook(every_n_secs=10),
            jstep.every(300, print),
        ),
        *(jstep.every(1, print), AtSteps(3, 7, 20, 21, 22, 1000), AtSteps(400), AtSteps()),
    ]
    data = jstep.batches({"x": np.zeros((1000, 2), np.float32)}, {0: 4, 500: 8}, seed=0)
    plan = jstep.plan(optimizer, 1000, train_step=steps, hooks=hooks, batches=data, points=5)
    return f"{plan}\n{plan.due!r}\n\n" + "\n".join(
        [plan._title(), *map(str, plan._rows()), *plan._notes()]
    )


def plan_of_a_mixture():
    sources = {
        name: {"x": np.zeros((rows, 2), np.float32)} for name, rows in (("a", 30), ("b", 10))
    }
    weights = {0: {"a": 0.5, "b": 0.5}, 100: {"a": 0.25, "b": 0.75}}
    return str(jstep.plan(SLOW, 400, batches=jstep.mixture(sources, 4, weights, seed=0), points=3))


def factors_of_mup():
    def shapes(width, hidden):
        leaves = {
            "in": (3, width),
            "hidden": (width, hidden),
            "b": (width,),
            "out": (width, 2),
            "scale": (),
        }
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}

    base, target = shapes(8, 8), shapes(32, 64)
    names = [
        (name, init)
        for name in ("adam", "sgd", "muon", "muon_original", "hyperball")
        for init in INITS
    ]
    tables = [
        f"{name}, {init}\n{jstep.mup(base, target, optimizer=name, init=init)}"
        for name, init in names
    ]
    return "\n".join([*tables, str(jstep.mup(base["b"], target["b"]))])


INITS = ("fan_in", "constant")
COST = jstep.Cost(
    flops=3.5e12, bytes_accessed=2.5e9, params_bytes=2**20, slots_bytes=2**21,
    argument_bytes=2**22, output_bytes=2**22, alias_bytes=2**21, temp_bytes=2**30,
    peak_bytes=5 * 2**30, compile_seconds=12.25, devices=8, memory_bytes=2**33,
    loops_unknown=2, host_bytes=2**25, fits=True, warnings=("short", "long " * 40),
)  # fmt: skip


def costs():
    sizes = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "bytes_accessed")
    unknown = dict.fromkeys(sizes)
    too_large = dataclasses.replace(COST, fits=False, flops=None)
    fits = dataclasses.replace(
        COST, fits=True, devices=1, host_bytes=0, loops_unknown=0, warnings=()
    )
    return "\n".join(map(str, (COST, too_large, dataclasses.replace(COST, **unknown), fits)))


def goodputs():
    stalled = {"waiting": 0.5, "productive": 30.0}
    some = jstep.Goodput(
        productive=70.0,
        rewound=5.5,
        starting=20.0,
        waiting=1.0,
        saving=2.0,
        evaluating=3.0,
        hooks=4.0,
        down=10.0,
        starts=2,
        steps=1000,
        stalled=stalled,
    )
    return f"{some}\n{jstep.Goodput(starts=1)}"


def differences_of_arrays():
    inf, nan = np.inf, np.nan
    pairs = [
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
        (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.5, 3.25])),
        (np.array([0.0, 1.0], np.float16), np.array([-0.0, 1.0], np.float16)),
        (np.array([nan, inf, -inf, 1.0]), np.array([1.0, -inf, inf, inf])),
        (np.array([inf, 2.0, nan]), np.array([1.0, inf, 2.0])),
        (np.array([1 + 2j, 3j]), np.array([1 + 4j, 3j])),
        (np.array([1, 5], np.int8), np.array([1, -100], np.int8)),
        (np.array([0, 2**64 - 1], np.uint64), np.array([0, 0], np.uint64)),
        (np.array([True, False]), np.array([True, True])),
        (np.array([1.5], ml_dtypes.bfloat16), np.array([1.75], ml_dtypes.bfloat16)),
        (np.zeros(3), np.zeros((1, 3))),
        (np.zeros((0, 2)), np.zeros((0, 2))),
    ]
    return "\n".join(str(array_difference(f"leaf {i}", a, b)) for i, (a, b) in enumerate(pairs))


def differences_of_leaves_left_out():
    def leaf(fingerprint, dtype="float32", shape=(2,)):
        return SimpleNamespace(fingerprint=fingerprint, dtype=dtype, shape=shape)

    same = {"same": leaf("0")}
    a = {
        **same,
        "a": leaf("1"),
        "value": leaf("2"),
        "dtype": leaf("3"),
        "shape": leaf("4"),
        "both": leaf("5"),
    }
    b = {
        **same,
        "b": leaf("1"),
        "value": leaf("0"),
        "dtype": leaf("3", "int32"),
        "shape": leaf("4", shape=(3, 1)),
    }
    b["both"] = leaf("5", "int8", ())
    sides = [SimpleNamespace(left_out=of, named={}) for of in (a, b)]
    return "\n".join(f"{one.path}: {one.why}: {one.detail}" for one in differences_left_out(*sides))


def differences_of_cards():
    many = [f"line {i}" for i in range(42)]
    cases = {"no record": None, "none": [], "2": many[:2], "40": many[:40], "41": many[:41]}
    return "\n".join(
        f"of {name}:\n" + "\n".join(changes_text(found)) for name, found in cases.items()
    )


def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(list(arguments))
    # JSON is one line, which nobody could review: here, each object of a list begins a line.
    text = out.getvalue().replace("}, {", "},\n{")
    return f"exit code {code}\n{text}"


def commands():
    """`inspect`, `diff` and `events` of what a small run leaves behind."""
    optimizer = jstep.momentum(0.1, 0.9)

    def state(step, **more):
        params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16)} | more
        return jstep.TrainState.create(params, optimizer, global_step=step)

    # A version of one length: lines are broken before it is known which words are masked.
    with (
        mock.patch.object(jstep, "__version__", "VERSION"),
        tempfile.TemporaryDirectory() as folder,
    ):
        paths = {}
        many = {f"p{i:02}": jnp.float32(i) for i in range(42)}
        runs = {
            "a": [state(1), state(2), state(3, bad=jnp.array([1.0, jnp.nan, jnp.inf]))],
            "b": [state(2, w=jnp.ones((2, 3))), state(3, w=jnp.ones((2, 3)), new=jnp.ones(1))],
            "c": [state(3, **many)],
            "d": [state(4, **{name: leaf + 1 for name, leaf in many.items()})],
        }
        for name, states in runs.items():
            with jstep.Saver(f"{folder}/{name}", async_save=False) as saver:
                for one in states:
                    paths[name, int(one.global_step)] = saver.save(
                        one, extra={"epoch": 3, "loss": None}
                    )
        with jstep.summary.SummaryWriter(f"{folder}/log") as writer:
            writer.add_session_log("START", 1)
            writer.add_summary(jstep.summary.scalar(["loss", "bad"], [0.5, float("nan")]), 1)
            writer.add_summary(jstep.summary.histogram("weights", np.arange(4.0)), 2)
        wanted = [
            ["inspect", paths["a", 3]], ["inspect", paths["a", 3], "--json"],
            ["inspect", paths["b", 2], "--verify"], ["inspect", f"{folder}/a"],
            ["inspect", f"{folder}/a", "--json"], ["diff", f"{folder}/a", f"{folder}/a"],
            ["diff", f"{folder}/a", f"{folder}/b"],
            ["diff", f"{folder}/a", f"{folder}/b", "--json"],
            ["diff", paths["a", 2], paths["a", 2]], ["diff", paths["a", 3], paths["b", 3]],
            ["diff", paths["c", 3], paths["d", 4]], ["events", f"{folder}/log"],
            ["events", f"{folder}/log", "--json"], ["events", f"{folder}/log", "--name", "l*"],
        ]  # fmt: skip
        shown = [" ".join(map(os.path.basename, one)) + "\n" + printed(*one) for one in wanted]
        return masked("\n".join(shown), folder)


def masked(out, folder):
    """Return a text without what differs between runs: times and the folder."""
    out = out.replace(folder, "FOLDER")
    out = re.sub(
        r"\d{4}-\d\d-\d\d([ T])\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d)?",
        lambda time: "TIME".ljust(len(time[0]), "."),
        out,
    )
    return re.sub(r'"(time|saved_at)": [\d.]+', r'"\1": TIME', out)


REPORTS = {
    one.__name__: one
    for one in (
        *(
            plan_of_everything,
            plan_of_a_mixture,
            factors_of_mup,
            costs,
            goodputs,
            differences_of_arrays,
        ),
        *(differences_of_leaves_left_out, differences_of_cards, commands),
    )
}


def stored():
    parts = re.split(r"^=== (\w+)\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: body.rstrip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("name", REPORTS)
def test_the_whole_text(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert REPORTS[name]().rstrip("\n") == stored()[name]


def test_each_stored_text_is_compared():
    assert list(stored()) == list(REPORTS)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    made = "\n".join(f"=== {name}\n{make().rstrip()}\n" for name, make in REPORTS.items())
    FILE.write_text(made, encoding="utf-8")
    sys.exit(0)
