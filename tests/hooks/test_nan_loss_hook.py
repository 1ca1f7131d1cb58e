"""`NanLossHook` in runs: skipped updates and modified metrics; order of hooks; methods that are not
called."""

import contextlib
import functools
import logging
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked_runs import OPTIMIZER, train
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.state.nonfinite import FINITE, INFINITE, NAN, StateContents

ADD = jax.jit(jnp.add, donate_argnums=0)


def nan_at(*steps):
    return lambda n: np.full(3, math.nan if n + 1 in steps else n + 1, np.float32)


@functools.cache
def skipping_step(optimizer, guard=jstep.skip_nonfinite):
    optimizer = guard(optimizer)
    step = jstep.minimize(lambda params, x: x[0] * jnp.sum(params["w"]), optimizer)
    return optimizer, step


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_nan_loss_hook_accepts_skipped_updates(steps_per_call, tmp_path):
    optimizer, step = skipping_step(OPTIMIZER)
    state = train(
        12, [jstep.NanLossHook(every_n_steps=2)], step=step, optimizer=optimizer,
        batches=nan_at(3, 8), steps_per_call=steps_per_call, checkpoint_dir=tmp_path,
        save_checkpoint_steps=4,
    )  # fmt: skip
    assert jstep.global_step(state) == 12
    # Step 8 was skipped, and its state is finite.
    assert jstep.Saver(tmp_path).all_steps() == [4, 8, 12]


@pytest.mark.thorough(except_for=["5"])
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_too_many_consecutive_skips_stop_the_run_and_save_it(steps_per_call, tmp_path):
    optimizer, step = skipping_step(OPTIMIZER)
    hook = jstep.NanLossHook(every_n_steps=2, max_skipped_steps=3)
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="3 updates in a row were skipped up to step 9"
    ) as caught:
        train(
            50, [hook], step=step, optimizer=optimizer, batches=nan_at(3, 4, *range(7, 100)),
            checkpoint_dir=tmp_path, steps_per_call=steps_per_call,
        )  # fmt: skip
    assert caught.value.step == 9
    assert caught.value.may_save
    assert pickle.loads(pickle.dumps(caught.value)).may_save
    assert jstep.Saver(tmp_path).latest_step() == jstep.global_step(caught.value.state)


def skip_scaled(optimizer):
    return jstep.skip_nonfinite(jstep.dynamic_loss_scale(optimizer))


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("guard", [jstep.skip_nonfinite, skip_scaled, jstep.dynamic_loss_scale])
def test_skipped_updates_are_counted_over_restarts(guard, steps_per_call, tmp_path):
    """Starts of two steps each, all of them skipped from step 3 on, end at the limit, as one start
    does."""
    optimizer, step = skipping_step(jstep.gradient_descent(0.1), guard)

    def start(last_step):
        hook = jstep.NanLossHook(every_n_steps=1, max_skipped_steps=5)
        train(
            last_step, [hook], step=step, optimizer=optimizer, batches=nan_at(*range(3, 100)),
            checkpoint_dir=tmp_path, steps_per_call=steps_per_call,
        )  # fmt: skip

    for last_step in (2, 4, 6):
        start(last_step)
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="5 updates in a row were skipped up to step 7"
    ):
        start(20)


def test_a_custom_step_returns_the_skipped_metric():
    @jax.jit
    def step(state, x):
        bad = ~jnp.isfinite(x[0])
        return state.replace(global_step=state.global_step + 1), {
            "loss": x[0],
            "skipped": bad.astype(jnp.float32),
        }

    hooks = [jstep.NanLossHook(every_n_steps=1)]
    assert jstep.global_step(train(5, hooks, step=step, batches=nan_at(2))) == 5


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("change", ["mutate", "delete", "donate"])
def test_hooks_can_modify_delete_or_donate_metrics(change, steps_per_call):
    total = None

    def modify(step, state, metrics):
        nonlocal total
        if change == "mutate":
            metrics["loss"] = jnp.float32(math.nan)
            metrics.pop("half")
        elif change == "delete":
            metrics["loss"].delete()
        else:
            total = metrics["loss"] if total is None else ADD(total, metrics["loss"])

    rows = []
    hooks = [
        jstep.NanLossHook(every_n_steps=3),
        jstep.MetricsHook(
            lambda step, values: rows.append((step, values["loss"])), every_n_steps=4, mean=True
        ),
        jstep.every(1, modify),
    ]
    train(8, hooks, steps_per_call=steps_per_call)
    assert rows == [(4, 2.5), (8, 6.5)]


def test_a_hook_in_several_runs_keeps_no_state():
    hook = jstep.NanLossHook(every_n_steps=4)
    for _ in range(2):
        with pytest.raises(jstep.NanLossDuringTrainingError) as caught:
            train(20, [hook], batches=nan_at(6))
        assert caught.value.step == 6
    train(20, [hook])
    assert hook._given_run is hook._unchecked is None  # it holds nothing of the run


@pytest.mark.thorough(except_for=["11-1"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize("bad", [3, 7, 8, 11])
def test_the_bad_step_is_named_across_single_and_looped_calls(bad, steps_per_call):
    """A stage of convolutions runs one step a call on a CPU; its last steps precede those of the
    looped stage."""

    def convolved(params, x):
        image, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)) * params["w"][0]
        kinds = ("NHWC", "HWIO", "NHWC")
        return x[0] + 0 * jnp.sum(
            jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=kinds)
        )

    conv = jstep.minimize(convolved, OPTIMIZER)
    plain = jstep.minimize(lambda params, x: x[0] + 0 * jnp.sum(params["w"]), OPTIMIZER)
    hooks, options = [jstep.NanLossHook(every_n_steps=20)], {"steps_per_call": steps_per_call}
    with pytest.raises(jstep.NanLossDuringTrainingError, match=f"at step {bad} "):
        train(20, hooks, step={0: conv, 7: plain}, batches=nan_at(bad), **options)


# `NanLossHook` with states that are not finite although each loss is finite.

BAD = 6  # the update BAD − 1 → BAD has a finite loss whose gradient is not
DATA = [0.0 if n == BAD - 1 else 1.0 for n in range(40)]


def root_loss(params, x):
    # The derivative at 0 is NaN: infinity times zero.
    return jnp.sqrt(x * jnp.sum(params["w"] ** 2))


def batches(step):
    return np.float32(DATA[step])


ADAMW, SKIPPING = jstep.adamw(1e-2), jstep.skip_nonfinite(jstep.adamw(1e-2))
step_of = functools.cache(jstep.minimize)


def run(
    last_step=20,
    *,
    hooks=None,
    optimizer=ADAMW,
    metrics=(),
    loss_fn=root_loss,
    params=None,
    **options,
):
    state = jstep.TrainState.create(
        params or {"w": jnp.ones(2), "other": {"v": jnp.ones(3)}}, optimizer
    )
    step = step_of(loss_fn, optimizer, metrics=tuple(metrics))
    hooks = [jstep.NanLossHook(every_n_steps=3)] if hooks is None else hooks
    return (
        step,
        state,
        jstep.train(step, state, batches, last_step, hooks=hooks, progress=False, **options),
    )


@pytest.mark.thorough(except_for=["4-metrics0-1"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("metrics", [(), ("grad_norm",)])
@pytest.mark.parametrize("save_steps", [2, 3, 4])
def test_nan_from_a_gradient_is_never_saved(tmp_path, save_steps, metrics, steps_per_call):
    with pytest.raises(jstep.NanLossDuringTrainingError) as caught:
        run(
            metrics=metrics, checkpoint_dir=tmp_path, save_checkpoint_steps=save_steps,
            steps_per_call=steps_per_call
        )  # fmt: skip
    assert jstep.Saver(tmp_path).all_steps() == list(range(save_steps, BAD, save_steps))
    saved_at_once = BAD % save_steps == 0
    assert caught.value.step == BAD if metrics or saved_at_once else BAD + 1
    assert not caught.value.may_save
    text = str(caught.value)
    if saved_at_once:
        assert "params/w" in text
        assert f"contains NaN after step {BAD}, though each loss is finite" in text
    if metrics:
        assert (
            f"the gradient is not finite at step {BAD}" in text
            or (f"not finite at step {BAD} (the update") in text
        )
    assert f"checkpoint_dir, {caught.value.step - 1})" in text


def test_nan_in_the_last_update_is_an_error_at_the_end():
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="params/w and 2 more; one of the updates 0 → 6 made"
    ):
        run(BAD)
    hook = jstep.NanLossHook(fail_on_nan_loss=False)
    _, _, state = run(BAD, hooks=[hook])
    assert jnp.isnan(state.params["w"]).all()


def edge_loss(params, x):
    scores = params["w"] + jax.lax.stop_gradient(params["mask"])
    return jnp.sqrt(params["b"] + x) + jnp.sum(jax.nn.softmax(scores) ** 2)  # ∂/∂b is infinite at 0


def masked_params():
    return {"w": jnp.ones(3), "mask": jnp.array([0.0, -jnp.inf, 0.0]), "b": jnp.zeros(())}


def edge_run(optimizer, directory, first):
    step = step_of(edge_loss, optimizer, metrics=("grad_norm",))
    state = jstep.TrainState.create(masked_params(), optimizer)
    norms = []
    hooks = [
        jstep.NanLossHook(every_n_steps=1),
        jstep.MetricsHook(lambda step, values: norms.append(values["grad_norm"]), every_n_steps=1),
    ]
    options = {"checkpoint_dir": directory, "save_checkpoint_steps": 1}
    jstep.train(
        step,
        state,
        lambda n: np.float32(first if n == 0 else 1.0),
        4,
        hooks=hooks,
        progress=False,
        **options,
    )
    return norms


def test_infinity_from_an_update_counts_and_a_mask_does_not(tmp_path):
    sgd = jstep.gradient_descent(1e-9)
    edge_run(sgd, tmp_path / "finite", 1.0)
    assert jstep.Saver(tmp_path / "finite").all_steps() == [1, 2, 3, 4]
    with pytest.raises(
        jstep.NanLossDuringTrainingError,
        match=r"contains infinite numbers after step 1.*params/b; ",
    ):
        edge_run(sgd, tmp_path / "infinite", 0.0)
    assert jstep.Saver(tmp_path / "infinite").all_steps() == []


def test_clipped_infinite_gradients_do_not_stop_the_run(tmp_path):
    optimizer = jstep.chain(
        jstep.clip_gradients(by_value=(-1.0, 1.0)), jstep.gradient_descent(1e-9)
    )
    norms = edge_run(optimizer, tmp_path, 0.0)
    assert [math.isfinite(norm) for norm in norms] == [False, True, True, True]
    assert jstep.Saver(tmp_path).all_steps() == [1, 2, 3, 4]


@pytest.mark.thorough(except_for=["params-True", "m-False"])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("where", ["params", "m"])
def test_nan_in_a_checkpoint_is_reported(where, guarded, tmp_path, caplog):
    optimizer = SKIPPING if guarded else ADAMW
    bad = {"w": jnp.array([1.0, math.nan]), "other": {"v": jnp.ones(3)}}
    good = {"w": jnp.ones(2), "other": {"v": jnp.ones(3)}}
    state = jstep.TrainState.create(bad if where == "params" else good, optimizer, global_step=7)
    if where == "m":
        state = state.replace(slots={**state.slots, "m": bad})
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
    path = "params/w" if where == "params" else "slots/m/w"
    skips_all = guarded and where == "params"
    with contextlib.nullcontext() if skips_all else pytest.raises(jstep.NanLossDuringTrainingError):
        run(9, optimizer=optimizer, checkpoint_dir=tmp_path, save_checkpoint_steps=1)
    warnings = [
        record
        for record in caplog.records
        if "contained NaN when this run began, at step 7" in record.message
    ]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert path in warnings[0].message
    assert skips_all or jstep.Saver(tmp_path).all_steps() == [7]


def test_nan_in_a_slot_is_detected_before_it_is_saved(tmp_path):
    """A NaN in an accumulated gradient reaches the parameters only steps later, after finite
    gradients."""
    optimizer = jstep.update_every(jstep.adamw(1e-2), 4, accumulate=True)
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match=f"slots/.* not finite at step {BAD} "
    ) as caught:
        run(
            optimizer=optimizer,
            metrics=["grad_norm"],
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=BAD + 1,
        )
    assert caught.value.step == BAD
    assert jstep.Saver(tmp_path).all_steps() == []
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="after a gradient that is not finite at step 6"
    ):
        run(optimizer=optimizer, metrics=["grad_norm"])


def test_nan_in_the_model_state_is_allowed_and_an_infinite_slot_gives_one_warning(tmp_path, caplog):
    optimizer = jstep.adamw(1e-2)
    state = jstep.TrainState.create(
        {"w": jnp.ones(2)}, optimizer, model_state={"last": jnp.zeros(())}
    )
    step = jstep.minimize(
        lambda params, stats, x: (jnp.sum(params["w"]) * x, {"last": jnp.float32(math.nan)}),
        optimizer, has_model_state=True,
    )  # fmt: skip
    hooks = [jstep.NanLossHook(every_n_steps=1)]
    options = {
        "hooks": hooks,
        "progress": False,
        "checkpoint_dir": tmp_path,
        "save_checkpoint_steps": 2,
    }
    state = jstep.train(step, state, lambda n: np.float32(1e25), 4, **options)
    assert jstep.Saver(tmp_path).all_steps() == [2, 4]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "at step 2 the optimizer state contains infinity: slots/v/w. " in warning
    caplog.clear()
    # It is infinite from the start, and no news.
    jstep.train(step, state, lambda n: np.float32(1.0), 6, **options)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("read_cpus", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_contents_of_all_kinds_of_arrays(kind, read_cpus):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    x = np.ones((8, 8), np.float32)
    x[3, 5] = math.nan
    params = {
        "split": jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "model"))),
        "rows": jax.device_put(np.ones((8, 8)), NamedSharding(mesh, PartitionSpec("data"))),
        "one": jnp.array(-jnp.inf),
        "device": jax.device_put(jnp.ones(3), jax.devices()[3]),
        "host": np.array([1.0, np.inf]),
        "half": jnp.array([math.nan, 1], jnp.bfloat16),
        "quarter": jnp.ones(4, jnp.float8_e4m3fn),
        "complex": jnp.array([complex(0, math.inf)]),
        "int": jnp.arange(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 3)),
        "none": None,
    }
    contents = StateContents(
        jstep.TrainState(params, {}, jnp.int32(0)), read_cpus=read_cpus
    ).contents()
    assert contents == {
        "params/split": NAN, "params/rows": FINITE, "params/one": INFINITE, "params/device": FINITE,
        "params/host": INFINITE, "params/half": NAN, "params/quarter": FINITE,
        "params/complex": INFINITE,
    }  # fmt: skip
    assert StateContents(object()).contents() == {}
