"""Run cards: their contents, and that `card_difference` names all differences and nothing else."""

import importlib.metadata
import json
import pathlib
import platform
import sys
import textwrap

import cards
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cards import card_of, loss
from jstep.hooks.card_differences import card_difference
from jstep.stores.timeline_writer import Timeline
from processes import python

import jstep
from jstep.loop import card
from jstep.training.metrics import StepMetrics


@pytest.fixture(scope="module")
def base():
    return card_of()


def on_a_mesh(state):
    return jstep.shard_state(state, jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec())


DIFFERENCES = {
    "batch size": ({"batch_size": 16}, "batches: batch_size: 8 in A, 16 in B"),
    "dtype": ({"dtype": jnp.bfloat16}, "state: dtypes[bfloat16]: absent in A, 1 in B"),
    "mesh": ({"place": on_a_mesh}, "devices: mesh: null in A, data: 1 Explicit in B"),
    "optimizer": (
        {"optimizer": jstep.momentum(0.01, 0.9)},
        "state: slots: m, start_step, v only in A; momentum only in B",
    ),
    "later stage": ({"later": True}, "the stage from step 2: absent in A, loss in B"),
    "steps a call": ({"steps_per_call": 3}, "train: steps_per_call: 1 in A, 3 in B"),
    "hooks": ({"hooks": [jstep.StopAtStepHook(last_step=3)]}, "train: hooks: StopAtStepHook only in B"),
}


@pytest.mark.thorough(except_for=["batch size", "mesh"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named(base, name):
    changed, line = DIFFERENCES[name]
    found = card_difference(base, card_of(**changed))
    assert any(line in one for one in found), found


def test_steps_on_different_batch_shapes_compare_operations(base):
    """The constants of a mean depend on the batch size and are not compared."""
    found = card_difference(base, card_of(batch_size=16))
    assert found[-1] == (
        "step: the traced loss (stage from step 0) has the same operations; its numbers were not compared, as the "
        "batches differ in shape"
    )
    *_, other = card_difference(base, card_of(batch_size=16, loss_fn=lambda params, x: 2 * loss(params, x)))
    assert "differs, on batches of different shapes: operations " in other
    assert "numbers" not in other


def test_equal_starts_have_equal_cards(base):
    assert card_of() == base
    assert card_difference(base, card_of()) == []


def test_secrets_and_other_variables_are_not_recorded():
    found = card.environment(
        {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--a=1",
            "AWS_SECRET_ACCESS_KEY": "x",
            "HOME": "/root",
            "JAX_COMPILATION_CACHE_DIR": "gs://me:pass@bucket/cache?sig=abc",
            "JAX_MY_TOKEN": "abc",
        }
    )
    assert found == {
        "JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache",
        "JAX_MY_TOKEN": "(not recorded)",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--a=1",
    }


@pytest.mark.thorough(except_for=["several steps"])
@pytest.mark.parametrize("kind", ["several steps", "split batches"])
def test_a_card_does_not_trace_the_step_again(kind):
    options, traced = {"steps_per_call": 3}, []
    if kind == "split batches":
        mesh, spec = jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec
        options = {"batch_sharding": jax.sharding.NamedSharding(mesh, spec("data"))}
        options["place"] = lambda state: jstep.shard_state(state, mesh, spec())

    def counting(params, x):
        traced.append(None)
        return loss(params, x)

    assert card_of(loss_fn=counting, **options)["programs"][0]["hash"]
    with_card = len(traced)
    card_of(loss_fn=counting, is_recorded=False, **options)
    assert len(traced) == 2 * with_card


def test_each_program_is_recorded_when_it_runs():
    found = card_of(later=True, batch_size={0: 8, 4: 16}, last_step=6)
    assert [(one["stage"], one["steps"]) for one in found["programs"]] == [(0, 1), (2, 1)]
    resumed = {**found, "programs": found["programs"][1:]}  # starts in the second stage
    assert card_difference(found, resumed) == []


def test_a_plain_function_is_not_traced(base):
    calls = []

    def step(state, x):
        calls.append(float(x.sum()))
        return state.replace(global_step=state.global_step + 1), {"loss": 0.0}

    found = card_of(step=step)
    assert (found["programs"][0]["hash"], len(calls)) == (None, 3)
    assert any("the stage from step 0: loss in A, step in B" in line for line in card_difference(base, found))


def test_a_run_that_keeps_no_checkpoints_has_a_card(tmp_path):
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    step = jstep.minimize(lambda params, x: params["w"] * x, optimizer)
    jstep.train(step, state, lambda step: 1.0, 2, logdir=tmp_path, progress=False)
    assert len(cards.merged(cards.recorded(tmp_path))["programs"]) == 1


def test_a_card_that_cannot_be_recorded_does_not_end_the_run(caplog, monkeypatch):
    write = Timeline.write

    def write_or_raise(accounts, kind, **fields):
        if kind == "card":
            raise OSError("disk full")
        write(accounts, kind, **fields)

    monkeypatch.setattr(Timeline, "write", write_or_raise)
    assert card_of() == {}
    assert "disk full" in caplog.text


CHILD = """
    import json, sys
    sys.path.insert(0, {here!r})
    import cards, jstep
    print(json.dumps(cards.card_of(loss_fn=cards.loss_of_a_table)))
"""


@pytest.mark.thorough
def test_a_start_from_another_directory_has_the_same_hashes(tmp_path):
    """The directory, the hash seed, memory addresses and the script's name do not matter."""
    here = str(pathlib.Path(cards.__file__).parent)
    (tmp_path / "train.py").write_text(textwrap.dedent(CHILD.format(here=here)))
    package = str(pathlib.Path(jstep.__file__).parent.parent)
    out = python("train.py", cwd=tmp_path, PYTHONHASHSEED="7", PYTHONPATH=package)
    from_child, from_here = json.loads(out.splitlines()[-1]), card_of(loss_fn=cards.loss_of_a_table)
    assert from_here["programs"][0]["hash"]
    for part in ("programs", "state", "batches", "stages", "arguments", "versions", "environment"):
        assert from_child[part] == from_here[part]


def test_values_are_recorded_as_json():
    arguments = (jnp.float32(0.1), jnp.ones(1), 3, None, np.float32(0.5))
    assert [card._argument(value) for value in arguments] == [0.1, "float32[1]", 3, None, 0.5]
    assert card._argument(jstep.held("rate", 0.5)) == "held('rate')"
    assert (card._argument(loss), card._argument("loss")) == ({"function": "loss"}, "'loss'")
    others = card._results_with_bits({"w": 1}, StepMetrics([1, 2], None), 3)
    named = card._results_with_bits({"w": 1}, StepMetrics({"loss": 1, "other": 2}, None), 3)
    assert (others, named) == ([True] * 4, [True, True, False, True])


class Unknown:
    """An argument, such as a schedule, that cannot be recorded."""

    __name__ = property(lambda self: 1 / 0)

    def __call__(self, step):
        return 0.1

    __repr__ = __name__.fget


def test_an_argument_costs_no_card(tmp_path, caplog):
    rounded = jstep.stochastic_rounding(jstep.adamw(Unknown()), jax.random.key(5))
    elements = card_of(optimizer=rounded)["programs"][0]["elements"]
    assert elements["stochastic_rounding"]["key"] == "key<fry> [0, 5]"
    assert "Unknown" in str(elements["adamw"]["learning_rate"])
    assert "could not be recorded" not in caplog.text


def test_versions_of_packages_that_are_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert card._versions() == {
        "python": platform.python_version(),
        "jstep": jstep.__version__,
        "jax": jax.__version__,
        "jaxlib": sys.modules["jaxlib"].__version__,
        "orbax-checkpoint": None,
    }
