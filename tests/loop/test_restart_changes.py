"""A restart says what has changed since its checkpoint was written: each change once, and nothing
else."""

import functools
import itertools
import logging
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising

import jstep

SCALE = np.array([[1.0, 2.0]], np.float32)


def loss(params, x):
    return jnp.mean((x @ params["w"] - params["b"]) ** 2)


def renamed(params, rows):
    return jnp.mean((rows @ params["w"] - params["b"]) ** 2)


def doubled(params, x):
    return 2 * loss(params, x)


def batches(seed=0, batch_size=8, **more):
    return jstep.batches(
        np.linspace(0, 1, 256, dtype=np.float32).reshape(64, 4), batch_size, seed=seed, **more
    )


SLOW, FAST = {"optimizer": jstep.adam(0.1)}, {"optimizer": jstep.adam(0.2)}
steps = functools.cache(jstep.minimize)


def run(
    directory, last_step, *, loss_fn=loss, step=None, data=None, place=lambda state: state, **more
):
    options = {"progress": False} | {name: more.pop(name) for name in list(more) if name in TRAIN}
    optimizer = more.pop("optimizer", SLOW["optimizer"])
    state = jstep.TrainState.create({"w": jnp.ones((4, 2)), "b": jnp.zeros((1, 2))}, optimizer)
    step = (jstep.minimize if more else steps)(loss_fn, optimizer, **more) if step is None else step
    data = batches() if data is None else data
    return jstep.train(step, place(state), data, last_step, checkpoint_dir=directory, **options)


TRAIN = {
    "config",
    "steps_per_call",
    "batch_sharding",
    "hooks",
    "save_checkpoint_steps",
    "log_steps",
    "logdir",
    "progress",
}


def reported(caplog):
    """Return the lines of the warnings below their first ones, and the INFO lines about a start;
    forget them."""
    others = "are not sharded", "nothing left to run", "has no position"
    records = [
        record
        for record in caplog.records
        if not any(words in record.getMessage() for words in others)
    ]
    warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    infos = [
        m
        for record in records
        if record.levelno == logging.INFO and "since this checkpoint" in (m := record.getMessage())
    ]
    caplog.clear()
    assert len(warnings) <= 1, warnings
    lines = [line.strip() for one in warnings for line in one.splitlines()[1:]]
    lines = [TRACED if line.startswith(f"{TRACED} (") else line for line in lines]
    lines = [line for line in lines if not line.startswith("learning_rate at step ")]
    assert all(
        one.startswith("model-")
        and ": the configuration changed since this checkpoint was written:\n" in one
        for one in warnings
    )
    return lines, infos


@pytest.fixture(autouse=True)
def informed(caplog):
    caplog.set_level(logging.INFO, "jstep")


TRACED = "the traced step differs"


def of_table(value):
    """A loss with a large constant, which the text of a traced program lacks."""
    table = np.full((64, 4), value, np.float32)
    return lambda params, x: loss(params, x) + jnp.mean(table @ params["w"])


CHANGED = {
    "loss and rate": (
        {},
        {"loss_fn": doubled, **FAST},
        ["learning_rate: 0.1 before, 0.2 now", TRACED],
    ),
    "constant": ({"loss_fn": of_table(1.0)}, {"loss_fn": of_table(2.0)}, [TRACED]),
}


@pytest.mark.thorough(except_for=["loss and rate"])
@pytest.mark.parametrize("name", CHANGED)
def test_each_change_is_reported_once(name, tmp_path, caplog):
    before, after, expected = CHANGED[name]
    run(tmp_path, 4, **before)
    assert reported(caplog) == ([], [])
    run(tmp_path, 6, **after)
    lines, infos = reported(caplog)
    assert infos == []
    assert len(lines) == len(expected), lines
    assert all(line.startswith(begin) for line, begin in zip(lines, expected, strict=True)), lines
    run(tmp_path, 8, **after)
    assert reported(caplog) == ([], [])


UNCHANGED = {
    "nothing": {},
    "several steps": {"steps_per_call": 10},
    "a renamed loss": {"loss_fn": renamed},
    "defaults": {"optimizer": jstep.adam(np.float32(0.1), beta1=0.9)},
    "cadences": {
        "save_checkpoint_steps": 1,
        "log_steps": 2,
        "hooks": [jstep.StopAtStepHook(last_step=100)],
    },
    "a later stage": {
        "step": {
            0: jstep.minimize(loss, jstep.adam(0.1)),
            4: jstep.minimize(doubled, jstep.adam(0.2)),
        }
    },
    "other metrics": {
        "metrics": [lambda gradients, updates, params: {"b": jnp.sum(gradients["b"])}]
    },
    "an aux": {
        "loss_fn": lambda params, x: (loss(params, x), {"mean": jnp.mean(x) * SCALE[0, 1]}),
        "has_aux": True,
    },
}


@pytest.mark.thorough(except_for=["an aux"])
@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_else_is_reported(name, tmp_path, caplog):
    after = UNCHANGED[name]
    for last_step, options in (
        (2, {}),
        (4, {"optimizer": jstep.adam(0.1)}),
        (6, after),
        (8, after),
    ):
        # Each program is traced.
        run(tmp_path, last_step, **options)
        assert reported(caplog) == ([], [])


@pytest.mark.thorough(except_for=["4-lanes"])
@pytest.mark.parametrize("option", ["lanes", "num_microbatches"])
@pytest.mark.parametrize("rows", [1, 4])
def test_nothing_is_reported_where_the_number_of_rows_changes(rows, option, tmp_path, caplog):
    """A single row, of a lane or a microbatch, needs no sum."""
    for last_step in (4, 6, 8):
        run(tmp_path, last_step, data=batches(batch_size={0: 8, 4: rows, 6: 16}), **{option: rows})
        assert reported(caplog) == ([], [])


def over(devices, *, rows=True, slot_axis=None, axis_type=jax.sharding.AxisType.Auto):
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:devices]
    )
    spec = jax.sharding.PartitionSpec()
    place = functools.partial(jstep.shard_state, mesh=mesh, param_specs=spec, slot_axis=slot_axis)
    return {"place": place, "batch_sharding": "data" if rows else None}


PLACES = {
    "fewer devices": (over(4), over(2), "devices: of_state: 4 before, 2 now; devices: mesh: "),
    "a mesh": ({}, over(4, rows=False), "devices: of_state: 1 before, 4 now; devices: mesh: "),
    "explicit axes": (
        over(4),
        over(4, axis_type=jax.sharding.AxisType.Explicit),
        "devices: mesh: data: 4 Auto before",
    ),
    "zero": (over(4), over(4, slot_axis="data"), "state: its leaves are sharded differently"),
    "batch_sharding": (over(4), over(4, rows=False), "train: batch_sharding: "),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACES)
def test_devices_and_layout_are_one_line(name, tmp_path, caplog):
    before, after, expected = PLACES[name]
    run(tmp_path, 2, **before)
    assert reported(caplog) == ([], [])
    run(tmp_path, 4, **after)
    lines, infos = reported(caplog)
    assert lines == []
    assert len(infos) == 1
    assert infos[0].startswith(f"model-2: since this checkpoint was written, {expected}")
    run(tmp_path, 6, **after)
    assert reported(caplog) == ([], [])


@pytest.mark.thorough
def test_settings_of_jax(tmp_path, caplog):
    run(tmp_path, 2)
    reported(caplog)
    with jax.default_matmul_precision("highest"):
        run(tmp_path, 4)
        assert reported(caplog) == (
            ["jax_default_matmul_precision: null before, highest now", TRACED],
            [],
        )
        run(tmp_path, 6, **FAST)
        assert reported(caplog) == (LINE, [])


@pytest.mark.thorough
def test_x64_does_not_repeat_what_it_does_to_the_state(tmp_path, caplog, x64):
    data = {"data": lambda step: np.ones((8, 4), np.float32)}
    start = jstep.TrainState.create(
        {"w": jnp.ones((4, 2), jnp.float32), "b": jnp.zeros((1, 2), jnp.float32)}, SLOW["optimizer"]
    )
    with jax.enable_x64(False):
        run(tmp_path, 2, **data)
    reported(caplog)
    run(tmp_path, 4, place=lambda state: start, **data)
    assert reported(caplog) == (["jax_enable_x64: false before, true now", TRACED], [])


class LostError(Exception):
    """Raised in a hook: the state after the step is not saved."""


def killed(directory, last_step, **more):
    with jstep.Saver(directory) as saver:
        saver.save = lambda *args, **kwargs: None
        with pytest.raises(LostError):
            run(saver, last_step, hooks=[jstep.every(1, raising(LostError()))], **more)


LINE = ["learning_rate: 0.1 before, 0.2 now", TRACED]


def test_a_run_is_compared_with_the_start_that_made_its_checkpoint(tmp_path, caplog):
    run(tmp_path, 2, **SLOW)
    run(tmp_path, 2, **FAST)  # no step
    assert reported(caplog) == ([], [])
    caplog.set_level(logging.ERROR, "jstep")  # why the states of the next ones were lost
    killed(tmp_path, 4, **FAST)
    caplog.set_level(logging.INFO, "jstep")
    caplog.clear()
    run(tmp_path, 4, **FAST)
    assert reported(caplog) == (LINE, [])
    run(tmp_path, 6, **FAST)
    assert reported(caplog) == ([], [])
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"model-{step}")
    run(tmp_path, 4, **SLOW)  # from step 2
    assert reported(caplog) == ([], [])


def test_a_checkpoint_that_is_saved_again_before_a_step(tmp_path, caplog):
    """Its state is that of the earlier start."""

    class Signal(jstep.Hook):
        def begin(self, state):
            os.kill(os.getpid(), signal.SIGTERM)

        def get_state(self):
            return {"now": time.time()}

        def set_state(self, state):
            pass

    run(tmp_path, 2, hooks=[], **SLOW)
    with pytest.raises(SystemExit):
        run(tmp_path, 4, hooks=[Signal()], **FAST)
    caplog.clear()
    run(tmp_path, 4, **FAST)
    assert reported(caplog)[0] == LINE


def test_without_the_start_lanes_and_batches_are_compared(tmp_path, caplog):
    run(tmp_path, 4)
    reported(caplog)
    shutil.rmtree(tmp_path / "starts")
    run(tmp_path, 6, data=batches(1), **FAST)
    lines, infos = reported(caplog)
    assert len(lines) == 1
    assert lines[0].startswith(
        "batches: those before step 4 are not the ones that model-4 was trained on: seed: 0 be"
    )
    assert infos == []  # there is no earlier start
    (tmp_path / "starts" / "model.000001.json").write_text("{")
    run(tmp_path, 7, data=batches(1), **FAST)
    assert reported(caplog) == ([], [])


def test_options_that_differ_are_lines_of_the_warning(tmp_path, caplog):
    """Not those that are arguments of train, too, paths, and what is not recorded."""
    own = {"width": 512, "steps": 2, "out": "/a", "api_token": "a1" * 10, "big": list(range(900))}
    run(tmp_path, 2, config=own)
    assert reported(caplog) == ([], [])
    own = {
        "width": 768,
        "steps": 4,
        "out": "/b",
        "api_token": "b1" * 10,
        "big": list(range(900)),
        "new": None,
    }
    run(tmp_path, 4, config=own)
    assert reported(caplog) == (
        ["config: width: 512 before, 768 now", "config: new: absent before, null now"],
        [],
    )
    run(tmp_path, 6)
    assert reported(caplog) == ([], [])


def test_of_many_differences_forty_are_shown_and_are_printable(tmp_path, caplog):
    run(tmp_path, 2, config={"0": "\x1b[31m"} | {str(i): 1 for i in range(1, 60)})
    reported(caplog)
    run(tmp_path, 4, config={"0": "\u202e\x9b"} | {str(i): 2 for i in range(1, 60)})
    assert all(
        c.isprintable() or c == "\n" for record in caplog.records for c in record.getMessage()
    )
    lines, _ = reported(caplog)
    assert (len(lines), lines[-1]) == (41, "and 20 more")


# A start that has nothing to do says what has changed, and that none of it was trained.

UNTRAINED = (
    "none of this has an effect, as the run takes no step: "
    "pass another checkpoint_dir, or a larger last_step"
)
X = np.ones((8, 4), np.float32)
SOURCES = {
    "function": lambda: lambda step: X,
    "batches": batches,
    "list": lambda: [X] * 9,
    "data that has ended": lambda: batches(num_epochs=1, batch_size=16),
}


@pytest.mark.thorough(except_for=["function"])
@pytest.mark.parametrize("name", SOURCES)
def test_what_changed_and_was_not_trained(name, tmp_path, caplog):
    for _ in range(2):
        run(tmp_path, 4, data=SOURCES[name](), config={"rate": 0.1}, **SLOW)
        assert reported(caplog) == ([], [])
    changed = ["config: rate: 0.1 before, 0.2 now", UNTRAINED]
    for last_step, more in ((4, {}), (2, {"loss_fn": doubled})):
        # Programs are not compared, as none is traced.
        run(tmp_path, last_step, data=SOURCES[name](), config={"rate": 0.2}, **FAST, **more)
        assert reported(caplog)[0] == changed
    run(tmp_path, 5, data=SOURCES[name](), config={"rate": 0.2}, **FAST)
    found = [*LINE, "config: rate: 0.1 before, 0.2 now"]
    # These steps were trained, if there are any.
    assert reported(caplog)[0] == found * (name != "data that has ended")


def test_an_iterator_is_not_read(tmp_path, caplog):
    def rows():
        for n in itertools.count():
            read.append(n)
            yield X

    read = []
    run(tmp_path, 3, data=rows(), config={"rate": 0.1})
    reported(caplog)
    read.clear()
    run(tmp_path, 3, data=rows(), loss_fn=doubled, config={"rate": 0.2})
    assert (read, reported(caplog)[0]) == ([], ["config: rate: 0.1 before, 0.2 now", UNTRAINED])


@pytest.mark.thorough
@pytest.mark.parametrize("jit", [True, False])
def test_a_custom_step_is_compared(jit, tmp_path, caplog):
    def start(loss_fn, last_step):
        def custom(state, x):
            value, gradients = jax.value_and_grad(loss_fn)(state.params, x)
            return jstep.apply_gradients(state, gradients, SLOW["optimizer"]), {
                "loss": value,
                "rows": jnp.float32(8),
            }

        run(tmp_path, last_step, step=jax.jit(custom) if jit else custom)
        return reported(caplog)[0]

    assert start(loss, 3) == start(loss, 5) == []
    assert start(doubled, 6) == [TRACED] * jit


@pytest.mark.thorough
def test_the_same_step_for_batches_whose_type_is_weak_no_more(tmp_path, caplog):
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
    for last_step, batch in ((3, jnp.full(2, 1.0)), (6, np.ones(2, np.float32))):
        state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer)
        jstep.train(step, state, [batch] * 6, last_step, checkpoint_dir=tmp_path)
    assert reported(caplog) == ([], [])
