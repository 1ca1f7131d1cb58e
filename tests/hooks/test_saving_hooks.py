"""`CheckpointSaverHook`, `SummarySaverHook` and `EvaluationHook`."""

import logging

import jax.numpy as jnp
from fake_runs import FakeRun
from hook_fakes import SaverAndHook, Writer, lines, state_at
from hooked_runs import train

import jstep

# CheckpointSaverHook


def test_it_saves_the_last_step_once(tmp_path):
    saves = SaverAndHook(tmp_path, save_steps=5)
    run = FakeRun(saves.hook, state_at())
    states = {step: state_at(step) for step in range(1, 6)}
    for step, state in states.items():
        run.after_step(step, state, {})
    before = (tmp_path / "model-5").stat().st_mtime_ns
    saves.hook.end(5, states[5])
    assert saves.steps() == [5]
    assert (tmp_path / "model-5").stat().st_mtime_ns == before
    run = FakeRun(saves.hook, state_at(7))
    saves.hook.end(7, state_at(7))
    assert saves.steps() == [5, 7]


def test_a_custom_saver_hook_saves_the_state_of_later_hooks(tmp_path):
    class Add(jstep.Hook):
        def after_step(self, step, state, metrics):
            return state.replace(params={"w": state.params["w"] + 1.0})

        def end(self, step, state):
            return self.after_step(step, state, {})

    saver_hook = jstep.CheckpointSaverHook(tmp_path, save_steps=2)
    state = train(4, [saver_hook, Add()])
    assert state.params["w"][0] == 6.0
    with jstep.Saver(tmp_path) as saver:
        assert saver.restore(state).params["w"][0] == 6.0
        assert saver.restore(state, step=2).params["w"][0] == 3.0


def test_extra_and_before_save(tmp_path):
    checked = []
    saves = SaverAndHook(
        tmp_path,
        save_steps=1,
        extra=lambda: {"position": 7},
        before_save=(lambda step: step == 2, lambda step: checked.append(step)),
    )
    run = FakeRun(saves.hook, state_at())
    for step in (1, 2, 3):
        run.after_step(step, state_at(step), {})
    assert saves.steps() == [1, 3]
    assert checked == [1, 2, 3]
    assert saves.saver.extra(3) == {"position": 7}


def test_a_hook_with_a_directory_can_be_used_in_several_runs(tmp_path):
    hook = jstep.CheckpointSaverHook(tmp_path / "new", save_steps=2)
    for start in (0, 2):
        run = FakeRun(hook, state_at(start))
        run.after_step(start + 2, state_at(start + 2), {})
        hook.end(start + 2, state_at(start + 2))
        hook.close()
        hook.close()
    assert jstep.Saver(tmp_path / "new").all_steps() == [2, 4]


# SummarySaverHook


def test_summaries_of_metrics_and_of_the_state():
    writer = Writer()
    hook = jstep.SummarySaverHook(
        writer,
        save_steps=2,
        histograms=["params/*", "slots/momentum/*"],
        leave_out=lambda: {"beta"},
    )
    run = FakeRun(hook, state_at())
    summary = jstep.summary.scalar("made/in/the/step", 1.0, collections=())
    metrics = {
        "loss": jnp.float32(1),
        "beta": jnp.float32(0.9),
        "summary": summary,
        "vector": jnp.ones(2),
    }
    for step in range(1, 5):
        run.after_step(step, state_at(), metrics)
    tags = ("loss", "made/in/the/step"), ("params/w", "slots/momentum/w")
    assert writer.points == [(2, tags[0]), (2, tags[1]), (4, tags[0]), (4, tags[1])]


def test_without_metrics_there_is_no_summary():
    writer = Writer()
    FakeRun(jstep.SummarySaverHook(writer, save_steps=1), state_at()).after_step(1, state_at(), {})
    assert writer.points == []


# EvaluationHook


def test_evaluation_hook_evaluates_when_due_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    writer = Writer()
    hook = jstep.EvaluationHook(
        lambda state: {"w": state.params["w"].sum()}, every_n_steps=10, prefix="validation"
    )
    run = FakeRun(hook, state_at())
    run.shared[jstep.summary.SummaryWriter] = writer
    for step in (5, 10, 15):
        run.after_step(step, state_at(step, step), {})
    assert list(hook.results) == [10]
    hook.end(10, state_at(10, 10.0))
    assert list(hook.results) == [10]
    hook.end(15, state_at(15, 15.0))
    assert {step: float(values["w"]) for step, values in hook.results.items()} == {10: 30, 15: 45}
    assert writer.points == [(10, ("validation/w",)), (15, ("validation/w",))]
    assert lines(caplog) == ["step 10  validation/w 30", "step 15  validation/w 45"]
