"""The page on choosing an optimizer: its bytes per parameter match the slots, and its names exist in jstep."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jstep

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "help" / "choosing-an-optimizer.md").read_text(encoding="utf-8")
BYTES = re.findall(r"^\| `(\w+\(.*?\))` \| ([\d.]+) \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("call", "quoted"), BYTES, ids=[call for call, _ in BYTES])
def test_bytes_per_parameter(call, quoted):
    optimizer = eval(f"jstep.{call}", {"jstep": jstep, "jnp": jnp})
    state = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.zeros((1024, 1024))}, optimizer))
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.slots)) / 1024**2
    # Scalar counters add a few bytes per million parameters; the page has two digits.
    assert actual == pytest.approx(float(quoted), abs=0.005)


def test_all_rows_are_parsed():
    assert len(BYTES) == len(re.findall(r"^\| `", TEXT, re.MULTILINE)) > 0


def test_every_name_exists_in_jstep():
    named = re.findall(r"`(\w+)(?:\([^`]*\))?`", TEXT.replace("```", ""))
    arguments = {"mask", "var_list", "weight_decay_mask"}
    assert {name for name in named if not hasattr(jstep, name)} <= arguments
