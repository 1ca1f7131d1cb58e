"""`inspect` and `diff` show the positions of loaders, and of the objects of `from_loop`, by
name."""

import json
import os
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jstep
from jstep.core.tables import printable
from jstep.look.checkpoint_positions import lines_of_positions, position_differences, positions_in
from jstep.look.cli import SHOWN
from jstep.stores.tagged_arrays import LARGE
from jstep.stores.tagged_json import as_json, copy_encodable

TITLE = "positions of the batches, and of the objects of from_loop\n"
OPTIMIZER = jstep.gradient_descent(0.25)
STEP = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)


def state(step=0, w=0.0):
    return jstep.TrainState.create({"w": jnp.float32(w)}, OPTIMIZER, global_step=step)


def position(value, since=0):
    return {"value": as_json(copy_encodable(value))} | ({"after": since} if since else {})


def of_processes(*positions, processes=None):
    return {
        "batches_of_processes": {
            "processes": processes or len(positions),
            "positions": list(positions),
        }
    }


@pytest.fixture
def save(tmp_path):
    def save(name, extra, step=0, w=0.0):
        with jstep.Saver(tmp_path / name, async_save=False) as saver:
            return saver.save(state(step, w), extra=extra)

    return save


def shown(cli, path):
    return cli("inspect", path).out.partition(TITLE)[2].splitlines()


def test_processes_with_other_values_are_named(save, cli):
    first, second = (
        {"curriculum": {"level": level, "best": 0.5}, "seen": [1, 2]} for level in (4, 0)
    )
    path = save("a", of_processes(position(first), position(second)))
    lines = ["process 0: curriculum.level 4; process 1: curriculum.level 0", "curriculum.best 0.5"]
    assert shown(cli, path) == [f"  {line}" for line in (*lines, "seen[0] 1", "seen[1] 2")]
    rows = json.loads(cli("inspect", path, "--json").out)["positions"]
    assert {"process": 1, "name": "curriculum.level", "value": 0} in rows
    every = of_processes(*[position(first)] * 200, position(second), *[position(first)] * 100)
    text = "processes 0–199, 201–300: curriculum.level 4; process 200: curriculum.level 0"
    assert " ".join(shown(cli, save("b", every))).split("  ")[1].replace("     ", " ") == text
    assert shown(cli, save("c", of_processes(position(first), processes=64)))[0] == (
        "  curriculum.level 4"
    )
    assert shown(cli, save("d", of_processes(None, position(7)))) == ["  process 1: position 7"]


VALUES = [
    (3, "3"), (2.5, "2.5"), (True, "true"), (None, "null"), ("text", "text"), (2**70, str(2**70)),
    ([], "[]"), ((), "[]"), ({}, "{}"), (float("nan"), "NaN"), (np.float32(0.1), "0.1"),
    (np.arange(5), "int64[5] mean 2"), (b"abc", "bytes "), (list(range(9)), "9 items "),
    (("a",) * 9, "9 items "), (np.ones(2, ml_dtypes.bfloat16), "bfloat16[2] mean 1"),
    (jnp.float32(3), "3.0"), (jnp.ones(3), "float32[3] mean 1"),
    (np.asfortranarray(np.eye(2)), "float64[2,2] mean 0.5"),
    (np.array([True, False]), "bool[2] mean 0.5"), (np.zeros(0), "float64[0] "),
    (np.array(["a"]), "<U1[1] "), (np.array([1j]), "complex128[1] "),
    (np.random.default_rng(0), "generator "), (random.Random(0), "random "),
    (np.random.RandomState(1), "random_state "), (jax.random.key(1), "uint32[2] mean 0.5"),
    ("\x1b[31m", '"\\u001b[31m"'), ("x" * 900, "x" * 79 + "…"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[text.strip()[:20] for _, text in VALUES])
def test_each_kind_of_value_has_a_line(value, text):
    found = positions_in({"batches": position({"a": {"b": value}})}, read_file=None)
    assert (
        position_differences(
            found, positions_in({"batches": position({"a": {"b": value}})}, read_file=None)
        )
        == []
    )
    ((entry,),) = (position.entries for position in found.positions.values())
    assert (entry.name, entry.text.startswith(text), len(entry.text) <= 80) == ("a.b", True, True)
    assert entry.text == printable(entry.text)


def test_containers_name_their_items():
    value = {"t": (1, [2]), "d": {3: 4, (5,): 6}, "a.b": 7, "a": {"b": 8}, "$x": 9, "y": 10}
    found = positions_in({"batches": position(value, since=2)}, read_file=None)
    names = {
        entry.name: entry.text
        for position in found.positions.values()
        for entry in position.entries
    }
    assert list(names.values()) == ["1", "2", "4", "6", "7", "8", "9", "10", "2"]
    assert list(names)[:3] == ["t[0]", "t[1][0]", "d[3]"]
    assert list(names)[4:] == ["a.b", "a.b#2", "$x", "y", "batches since"]


def test_what_this_machine_cannot_decode_is_compared_by_its_hash():
    tensor = {
        "$tensor": {"dtype": "a type of another machine", "shape": [1], "data": {"$bytes": "AA=="}}
    }
    a, b = (
        positions_in({"batches": {"value": {"epoch": i, "seen": [tensor] * (8 + i)}}}, {}.get)
        for i in (1, 2)
    )
    assert [name for name, _ in position_differences(a, b)] == ["epoch", "seen"]
    assert [line.rpartition(" ")[0] for line in lines_of_positions(a)] == ["epoch", "seen 9 items"]


def test_diff_has_a_row_for_each_value_that_differs(save, cli):
    def other(level, x=1.0, **more):
        return position({"level": level, "x": np.full(3, x), **more})

    a, b = (
        save("a", of_processes(other(4), other(4))),
        save("b", of_processes(other(4), other(0, 1.5, new=1))),
    )
    assert cli("diff", a, a).out == "identical (2 leaves, bitwise)\n"
    out = cli("diff", a, b, code=1).out
    rows = [
        "identical (2 leaves, bitwise)", "3 positions differ", "  process 1: level  4 in A, 0 in B",
        "  process 1: x      float64[3] mean 1 in A, float64[3] mean 1.5 in B",
        "  process 1: new    only in B",
    ]  # fmt: skip
    assert out.splitlines() == rows
    found = json.loads(cli("diff", a, b, "--json", code=1).out)["positions"]
    assert found[0] == {"name": "process 1: level", "detail": "4 in A, 0 in B"}
    same_for_all = save("c", of_processes(other(4), processes=2))
    assert "1 position differs\n  process 0: level" not in cli("diff", a, same_for_all).out
    assert (
        "processes in A, of 3 in B"
        in cli("diff", a, save("d", of_processes(*[other(n) for n in range(3)])), code=1).out
    )
    cli("diff", same_for_all, save("e", {"batches": other(4)}))
    cli("diff", a, save("f", {"epoch": 1}))
    mean = (
        save("g", {"batches": position({"x": np.array([0.5, 1.5])})}),
        save("h", {"batches": position({"x": np.ones(2)})}),
    )
    assert "x  float64[2] mean 1 in both, with other values" in cli("diff", *mean, code=1).out
    later = [
        save(name, {"batches": position({"at": at}, since)})
        for name, at, since in (("i", 8, 0), ("j", 5, 3))
    ]
    cli("diff", *later)


def test_diff_of_directories_names_the_first_step_at_which_a_position_differs(save, cli):
    for step in range(4):
        for name, level in (("a", 1), ("b", 1 + (step >= 2))):
            path = save(
                name,
                {"batches": position({"level": level})},
                step,
                float(name == "b" and step == 3),
            )
    directories = os.path.dirname(path).replace("/b", "/a"), os.path.dirname(path)
    out = cli("diff", *directories, code=1).out
    assert "the runs diverge at step 3" in out
    assert "1 position differs at step 2, the first of these\n  level  1 in A, 2 in B\n" in out


class Env:
    def __init__(self):
        self.board, self.rng = np.zeros((200, 100)), np.random.default_rng(0)


def test_objects_of_a_run_are_shown_with_their_large_arrays(tmp_path, cli):
    for name, by in (("a", 1.0), ("b", 2.0)):
        env, kept = Env(), {"raw": bytes(LARGE + 1)}
        with jstep.Run(
            STEP, state(), jstep.from_loop(env=env, kept=kept), 2, checkpoint_dir=tmp_path / name
        ) as run:
            for _ in run:
                env.board += by
                run.train_step(jnp.float32(1))
    lines = shown(cli, tmp_path / "a" / "model-2")
    assert lines[0] == "  env.board float64[200,100] mean 2"
    assert [line.rpartition(" ")[0] for line in lines[1:]] == [
        "  env.rng generator",
        "  kept.raw bytes",
    ]
    out = cli("diff", tmp_path / "a" / "model-2", tmp_path / "b" / "model-2", code=1).out
    assert (
        "1 position differs\n"
        "  env.board  float64[200,100] mean 2 in A, float64[200,100] mean 4 in B\n"
    ) in out


def test_the_output_is_bounded(save, cli):
    path = save("a", {"batches": position({f"n{'a' * 1000}{i}": i for i in range(500)})})
    lines = shown(cli, path)
    assert lines[-1] == f"  and {500 - SHOWN} more (--json lists all)"
    assert max(map(len, "".join(lines).split("  "))) < 400


ARRAY = {"dtype": "<f8", "shape": [2], "data": {"$bytes": "AAAA"}}
INVALID = [
    3, {"value": {"$array": ARRAY}}, {"value": {"$array": 3}}, {"value": {"$int": "x"}},
    {"value": {"$dict": [[1]]}}, {"value": {"$dict": 3}}, {"value": {"$file": 3}},
    {"value": {"$jax": {}}}, {"value": {"$tuple": 7}},
    {"value": {"$array": {**ARRAY, "dtype": "|O"}}},
    {"value": {"$array": {**ARRAY, "shape": [2**60]}}}, {"value": {"$new": 1}},
    {"value": 1, "after": {"x": []}}, {"value": {"$float": "1e999999"}},
]  # fmt: skip


@pytest.mark.parametrize("saved", INVALID, ids=map(str, range(len(INVALID))))
def test_a_malicious_position_is_one_line(saved):
    extras = {"batches": saved}, of_processes(saved, [], None), of_processes(saved, position(1))
    for extra in extras:
        found = positions_in(extra, read_file=None)
        assert len(lines_of_positions(found) if found else []) <= 3
        assert position_differences(found, found) == []
    for extra in ({"batches_of_processes": saved}, {"batches_of_processes": {"positions": saved}}):
        assert positions_in(extra, read_file=None) is None


def test_a_file_that_is_missing_is_an_error(save, cli):
    path = save("a", {"batches": {"value": {"$bytes": {"$file": "none"}}}})
    for command in (["inspect", path], ["diff", path, path]):
        assert "the file 'none' is missing" in cli(*command, code=2).err


def test_nothing_is_compared_without_positions():
    assert position_differences(None, positions_in({"batches": position(1)}, read_file=None)) == []
    assert positions_in([1], read_file=None) is positions_in({"mine": 1}, read_file=None) is None
