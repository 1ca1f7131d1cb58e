"""A function that is edited after a step was made: `train` warns that the step still runs the old code."""

import importlib
import logging
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jstep

optimizer = jstep.gradient_descent(0.1)
SOURCE = """
import jax.numpy as jnp
import jstep

def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2)

def custom(state, x):
    return state.replace(global_step=state.global_step + 1), {}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in a file, and a function that edits and reloads it."""
    path = tmp_path / "edited_model.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    found = importlib.import_module("edited_model")

    def edit(before, after, in_place):
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))
        if in_place:  # as %autoreload does
            new = types.ModuleType("edited_model")
            exec(compile(path.read_text(), str(path), "exec"), vars(new))
            for name in ("loss_fn", "custom"):
                getattr(found, name).__code__ = getattr(new, name).__code__
        else:
            importlib.reload(found)

    found.edit = edit
    yield found
    del sys.modules["edited_model"]


def warned(train_step, caplog, **options):
    caplog.clear()
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.train(train_step, state, lambda step: jnp.full(2, float(step)), 4, log_steps=None, **options)
    return [one.getMessage() for one in caplog.records if "was edited" in one.getMessage()]


def steps_of(module):
    loss_fn = module.loss_fn
    return {
        "loss": lambda: jstep.minimize(loss_fn, optimizer),
        "checkpointed": lambda: jstep.minimize(jax.checkpoint(loss_fn), optimizer),
        "lanes": lambda: jstep.minimize(loss_fn, optimizer, lanes=1),
        "several": lambda: jstep.minimize({"a": (loss_fn, "w")}, optimizer),
    }


@pytest.mark.thorough(except_for=["1-lanes-autoreload", "1-several-autoreload"])
@pytest.mark.parametrize("in_place", [True, False], ids=["autoreload", "reload"])
@pytest.mark.parametrize("kind", ["loss", "checkpointed", "lanes", "several"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_an_edited_loss_is_named(kind, in_place, steps_per_call, module, caplog):
    train_step = steps_of(module)[kind]()
    assert warned(train_step, caplog, steps_per_call=steps_per_call) == []
    module.edit("** 2", "** 4", in_place)
    (message,) = warned(train_step, caplog, steps_per_call=steps_per_call)
    assert message.startswith("loss_fn was edited after train_step was created")
    assert warned(steps_of(module)[kind](), caplog) == []


@pytest.mark.parametrize("in_place", [True, False], ids=["autoreload", "reload"])
def test_a_step_of_the_users_own(in_place, module, caplog):
    train_step = jstep.TrainStep(module.custom)
    assert warned(train_step, caplog) == []
    module.edit("global_step + 1", "global_step + 1 + 0", in_place)
    assert len(warned(train_step, caplog)) == 1


@pytest.mark.parametrize("in_place", [True, False], ids=["autoreload", "reload"])
def test_comments_and_moved_lines_are_no_edit(in_place, module, caplog):
    train_step = jstep.minimize(module.loss_fn, optimizer)
    assert warned(train_step, caplog) == []
    module.edit("def loss_fn", "# a comment\n\n\ndef loss_fn", in_place)
    assert warned(train_step, caplog) == []


def test_an_edit_before_the_first_trace(module, caplog):
    train_step = jstep.minimize(module.loss_fn, optimizer)
    module.edit("** 2", "** 4", False)
    assert len(warned(train_step, caplog)) == 1


def test_functions_inside_of_others_and_lambdas_are_compared_with_themselves(caplog):
    def inner(params, x):
        return jnp.mean(params["w"] * x)

    for loss_fn in (inner, lambda params, x: jnp.mean(params["w"] * x)):
        assert warned(jstep.minimize(loss_fn, optimizer), caplog) == []
