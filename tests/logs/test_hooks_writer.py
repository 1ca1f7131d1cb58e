"""Hooks without a summary writer write to the `logdir` of `train`."""

import threading

import jax
import jax.numpy as jnp
import pytest

import jstep
from jstep.summary.writer import drain, sync_to_disk

pytest.importorskip("tensorboard")


def run(logdir, hooks, last_step=4, **kwargs):
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    train_step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
    return jstep.train(
        train_step,
        state,
        lambda n: jnp.ones(3),
        last_step,
        hooks=hooks,
        logdir=logdir,
        log_steps=2,
        progress=False,
        **kwargs,
    )


def tags(logdir):
    found = {}
    for path in sorted(logdir.glob("events.out.tfevents.*")):
        for event in jstep.summary.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_hooks_share_one_event_file_without_duplicates(tmp_path):
    hooks = [
        jstep.SummarySaverHook(save_steps=2, histograms="params/*"),
        jstep.EvaluationHook(lambda state: {"w0": state.params["w"][0]}, every_n_steps=3),
    ]
    run(tmp_path, hooks)
    found = tags(tmp_path)
    rates = found.pop("global_step/sec")
    assert rates == [2, 4]
    # beta1, beta2 and epsilon never change and are therefore not written.
    assert found == {"loss": [2, 4], "learning_rate": [2, 4], "params/w": [2, 4], "eval/w0": [3, 4]}
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_a_hook_with_a_custom_writer_does_not_replace_the_stock_hook(tmp_path):
    with jstep.summary.SummaryWriter(tmp_path / "own") as writer:
        run(
            tmp_path / "run", [jstep.SummarySaverHook(writer, save_steps=1)], save_summaries_steps=4
        )
    assert tags(tmp_path / "own")["loss"] == [1, 2, 3, 4]
    assert tags(tmp_path / "run")["loss"] == [4]


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", ["step", "custom step", "plain function"])
@pytest.mark.parametrize("guard", [jstep.skip_nonfinite, jstep.dynamic_loss_scale])
def test_a_skipped_step_leaves_its_histogram_out(guard, kind, tmp_path, caplog):
    caplog.set_level("INFO", "jstep")
    optimizer = guard(jstep.adam(0.1))

    def loss(params, x, *, step):
        values = jnp.where(step == 2, jnp.nan, 1.0) * params["w"]
        jstep.summary.histogram("values", values)
        return jnp.mean((values - x) ** 2)

    minimized = jstep.minimize(loss, optimizer, pass_step=True)
    steps = {
        "step": minimized,
        "custom step": jstep.TrainStep(minimized.__wrapped__.__call__),
        "plain function": lambda state, x: minimized(state, x),
    }
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    options = {"logdir": tmp_path, "save_summaries_steps": 1, "progress": False}
    state = jstep.train(steps[kind], state, lambda n: jnp.ones(3), 5, steps_per_call=2, **options)
    assert state.global_step == 5
    assert tags(tmp_path)["values"] == [1, 2, 4, 5]
    assert (
        caplog.text.count(
            "step 3 skipped its update: values of the histogram 'values' are NaN or infinite"
        )
        == 1
    )


def test_a_skipped_update_of_an_ensemble_leaves_out_the_histogram_of_that_member(tmp_path):
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))

    def loss(params, x):
        jstep.summary.histogram("values", params["w"] * x)
        return jnp.mean((params["w"] - x) ** 2)

    def create(member):
        return jstep.TrainState.create({"w": jnp.full(4, 2.0) + member}, optimizer)

    axes = jax.tree.map(lambda _: 0, jax.eval_shape(create, 0)).replace(global_step=None)
    members = jax.vmap(
        jstep.minimize(loss, optimizer, jit=False), in_axes=(axes, 0), out_axes=(axes, 0)
    )
    x = jnp.array([1.0, jnp.nan, 2.0])
    state = jax.vmap(create, out_axes=axes)(jnp.arange(3.0))
    jstep.train(
        members, state, lambda n: x, 1, logdir=tmp_path, save_summaries_steps=1, log_steps=None
    )
    written: list[float] = []
    for path in tmp_path.glob("events*"):
        for event in jstep.summary.summary_iterator(path):
            written += [value.histo.num for value in event.summary.value if value.tag == "values"]
    assert written == [4.0, 4.0]


@pytest.mark.thorough
def test_the_flush_of_a_checkpoint_does_not_wait_for_later_summaries(tmp_path, monkeypatch):
    """Their arrays may need a process that waits for this checkpoint, or has failed: both waited
    for ever."""
    until, flushed = threading.Event(), []
    with jstep.summary.SummaryWriter(str(tmp_path)) as writer:
        writer.add_summary(jstep.summary.scalar("early", 1.0), 1)
        drain(writer)
        encode = writer._worker._encode
        writer._worker._encode = lambda *job: until.wait(60) and encode(*job)
        writer.add_summary(jstep.summary.scalar("late", 1.0), 2)
        monkeypatch.setattr(writer._worker._sink, "sync", lambda: flushed.append(writer.path))
        sync = threading.Thread(target=sync_to_disk, args=(writer,))
        sync.start()
        sync.join(20)
        has_synced, flushed_by_it = not sync.is_alive(), flushed[:]
        until.set()
    assert has_synced
    assert flushed_by_it == [writer.path]
