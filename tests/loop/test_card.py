"""Run cards: their contents, and that `card_difference` names all differences and nothing else."""

import importlib.metadata
import json
import math
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
from processes import python

import jstep
from jstep.core.jaxprs import ProgramHash
from jstep.hooks.card_differences import card_difference
from jstep.loop import card
from jstep.stores.timeline import Timeline
from jstep.training.metrics import Metrics


@pytest.fixture(scope="module")
def base():
    return card_of()


def mixture(code=1.0, **more):
    sources = {"web": np.ones((32, 4), np.float32), "code": np.ones((16, 4), np.float32)}
    return jstep.mixture(sources, 8, {"web": 3.0, "code": code}, **more)


def on_a_mesh(state):
    return jstep.shard_state(state, jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec())


DIFFERENCES = {
    "seed": ({"seed": 5}, "batches: seed: 1 in A, 5 in B"),
    "rate": ({"optimizer": jstep.adam(0.02)}, "step: learning_rate: 0.01 in A, 0.02 in B"),
    "scheduled rate": (
        {"optimizer": jstep.adam(jstep.exponential_decay(0.5, 10, 0.25))},
        "step: learning_rate: 0.01 in A, exponential_decay(learning_rate=0.5, decay_steps=10, decay_rate=0.25) in B",
    ),
    "data size": ({"rows": 65}, "batches: rows: 64 in A, 65 in B"),
    "skip": ({"skip": (2, 5)}, "batches: steps: [[0, null, 1]] in A, [[0, 2, 1], [5, null, 1]] in B"),
    "batch size": ({"batch_size": 16}, "batches: batch_size: 8 in A, 16 in B"),
    "later batch size": ({"batch_size": {0: 8, 50: 16}}, "batches: batch_size[50]: absent in A, 16 in B"),
    "dtype": ({"dtype": jnp.bfloat16}, "state: dtypes[bfloat16]: absent in A, 1 in B"),
    "mesh": ({"place": on_a_mesh}, "devices: mesh: null in A, data: 1 Explicit in B"),
    "step function": ({"loss_fn": lambda params, x: 2 * loss(params, x)}, "mul (11 in A, 13 in B)"),
    "optimizer": (
        {"optimizer": jstep.momentum(0.01, 0.9)},
        "state: slots: m, start_step, v only in A; momentum only in B",
    ),
    "another optimizer with the same slots": (
        {"optimizer": jstep.adamw(0.01)},
        "step: optimizer: adam only in A; adamw only in B",
    ),
    "later stage": ({"later": True}, "the stage from step 2: absent in A, loss in B"),
    "last step": ({"last_step": 4}, "train: last_step: 3 in A, 4 in B"),
    "steps a call": ({"steps_per_call": 3}, "train: steps_per_call: 1 in A, 3 in B"),
    "hooks": ({"hooks": [jstep.StopAtStepHook(last_step=3)]}, "train: hooks: StopAtStepHook only in B"),
    "kind of batches": ({"batches": mixture()}, "batches: kind: Batches in A, Mixture in B"),
}


@pytest.mark.thorough(except_for=["batch size", "another optimizer with the same slots"])
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


def test_weights_of_a_mixture_are_named():
    one, other = (card_of(batches=mixture(code)) for code in (1.0, 3.0))
    assert card_difference(one, other) == [
        "batches: weights[code]: 0.25 in A, 0.5 in B",
        "batches: weights[web]: 0.75 in A, 0.5 in B",
    ]


def test_differences_of_versions_environment_and_devices_are_named(base, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0" if name == "jax" else version(name))
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("JAX_DEBUG_NANS", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    other = card_of()
    other["devices"]["processes"] = 2
    flags = base["environment"].get("XLA_FLAGS", "").split()
    assert card_difference(base, other) == [
        f"jax: {jax.__version__} in A, 0.99.0 in B",
        "JAX_DEBUG_NANS: absent in A, 0 in B",
        *sorted(
            ["XLA_FLAGS --xla_cpu_enable_fast_math: absent in A, true in B"]
            + [f"XLA_FLAGS {name}: {value or 'set'} in A, absent in B" for name, _, value in map(partitioned, flags)]
        ),
        "devices: processes: 1 in A, 2 in B",
    ]


def partitioned(flag):
    return flag.partition("=")


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


def test_paths_are_recorded_and_not_compared(base, tmp_path):
    other = card_of(logdir=tmp_path / "logs")
    assert other["arguments"]["logdir"] == str(tmp_path / "logs")
    assert card_difference(base, other) == []


def mesh_options(*, is_placed):
    mesh = jax.make_mesh((8,), ("data",))
    batches = {"batch_sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))}
    replicated = jax.sharding.PartitionSpec()
    return {"place": lambda state: jstep.shard_state(state, mesh, replicated), **(batches if is_placed else {})}


TRACING_OPTIONS = {
    "a device": dict,
    "several steps": lambda: {"steps_per_call": 3},
    "a mesh": lambda: mesh_options(is_placed=False),
    "split batches": lambda: mesh_options(is_placed=True),
}


@pytest.mark.thorough(except_for=["several steps", "split batches"])
@pytest.mark.parametrize("name", TRACING_OPTIONS)
def test_a_card_does_not_trace_the_step_again(name):
    options = TRACING_OPTIONS[name]()
    traced = []

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


def test_a_run_without_a_step_has_a_card():
    found = card_of(last_step=0)
    assert (found["programs"], found["arguments"]["last_step"]) == ([], 0)


def test_a_card_that_cannot_be_recorded_does_not_end_the_run(caplog):
    class Batches(list):
        @property
        def __class__(self):
            return list

        def __len__(self):
            raise RuntimeError("no length")

    write = Timeline.write

    def write_or_raise(accounts, kind, **fields):
        if kind == "card":
            raise OSError("disk full")
        write(accounts, kind, **fields)

    assert card_of(write=write_or_raise) == {}
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


def test_of_many_numbers_a_program_has_only_the_hash():
    for count in (200, 201):
        numbers = {str(n): 1 for n in range(count)}
        shuffled = dict(reversed(numbers.items()))
        found = card._hash_card(ProgramHash("abc", {"mul": 1, "add": 2}, shuffled, {}))
        assert found == {
            "hash": "abc",
            "operations": {"add": 2, "mul": 1},
            "numbers": numbers if count == 200 else None,
        }
        assert list(found["operations"]) == ["add", "mul"]
        assert list(found["numbers"] or sorted(numbers)) == sorted(numbers)


def test_values_are_recorded_as_json():
    values = [np.float32(0.1), np.array([1, 2]), np.array([[0.5, np.inf]]), math.nan, np.bool_(True), {"a"}, None, "a"]
    assert [card._json(value) for value in values] == [0.1, [1, 2], [[0.5, "inf"]], "nan", True, "{'a'}", None, "a"]
    arguments = (jnp.float32(0.1), jnp.ones(1), 3, None, np.float32(0.5))
    assert [card._argument(value) for value in arguments] == [0.1, "float32[1]", 3, None, 0.5]
    assert card._argument(jstep.held("rate", 0.5)) == "held('rate')"
    others = card._results_with_bits({"w": 1}, Metrics([1, 2], None), 3)
    named = card._results_with_bits({"w": 1}, Metrics({"loss": 1, "other": 2}, None), 3)
    assert (others, named) == ([True] * 4, [True, True, False, True])


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


def test_batches_of_another_kind_differ_in_that_alone():
    then = {"kind": "A", "rows": 1}
    assert card._changes_of_batches(then, {"kind": "B", "rows": 2}) == ["kind: A before, B now"]
    assert card._changes_of_batches(then, {"kind": "A", "rows": 2}) == ["rows: 1 before, 2 now"]
    assert card._changes_of_batches(then, then) == [
        "their definition is the same, but it takes other rows in this version of jstep"
    ]


def test_a_function_is_recorded_as_one():
    """Text is what one would type; a function's name is not."""

    def named():
        pass

    assert card._argument(named) == {"function": "named"}
    assert card._argument("named") == "'named'"
    assert card._argument(jstep.linear_warmup(0.1, 5)).startswith("linear_warmup(")
