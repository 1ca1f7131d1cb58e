"""What replaced the state, at which steps: recorded by a run, and shown by the commands."""

import json

import jax
import jax.numpy as jnp
import pytest

import jstep
from jstep.hooks.course import Course, LoopState
from jstep.hooks.timetable import Timetable
from jstep.look import cli
from jstep.record.state_changes import StateChanges

LAST = 12


def loss_of(params, batch):
    return sum(jnp.sum((leaf - batch) ** 2) for leaf in jax.tree.leaves(params))


def halved(state, name):
    return state.with_params(
        {**state.params, name: jax.tree.map(lambda leaf: leaf / 2, state.params[name])}
    )


def halve_tower(step, state, metrics):
    return halved(state, "tower") if step == 4 else None


def run_to(last_step, where, body=lambda step, run: None, **options):
    optimizer = jstep.adam(0.1)
    params = {"tower": {"w": jnp.ones(3), "b": jnp.ones(1)}, "head": jnp.ones(2)}
    state = jstep.TrainState.create(params, optimizer)
    step, batches = jstep.minimize(loss_of, optimizer), lambda step: jnp.ones(())
    options |= {"hooks": [jstep.every(4, halve_tower)], "checkpoint_dir": where, "progress": False}
    with jstep.Run(step, state, batches, last_step, **options) as run:
        for step in run:
            body(step, run)


def halve_head(step, run):
    if step in (6, 9):
        run.state = halved(run.state, "head")
    run.state = run.state.with_params({**run.state.params})  # the same leaves


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Runs A and B, whose second start changes nothing; only A's body changes the state."""
    where = tmp_path_factory.mktemp("runs")
    for name, body in (("a", halve_head), ("b", lambda step, run: None)):
        run_to(LAST, where / name, body, steps_per_call=1)
        run_to(LAST + 1, where / name)
    return where / "a", where / "b"


def shown(capsys, *arguments, code=0):
    assert cli.main([str(word) for word in arguments]) == code
    return capsys.readouterr().out


BY_BODY = "its state was changed by the body at steps 6, 9: params/head"
BY_HOOK = "its state was changed by every(4, halve_tower).after_step at step 4: params/tower"


def test_the_commands_show_what_replaced_the_state(two_runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    a, b = two_runs
    table, changes = shown(capsys, "runs", a, "--starts"), shown(capsys, "diff", a)
    for line in (BY_BODY, BY_HOOK):
        assert f"start 1, {line}" in table
        assert f"  {line}" in changes
        assert f"{line} (start 1)" in jstep.report(a).html
    assert "start 2, its state" not in table
    facts = json.loads(shown(capsys, "runs", a, "--starts", "--json"))[0]["state_changes"]
    assert [(change["by"], change["leaves"], change["steps"]) for change in facts] == [
        ("every(4, halve_tower).after_step", ["params/tower"], [4]),
        ("the body", ["params/head"], [6, 9]),
    ]
    of_both = shown(capsys, "diff", a, b, code=1)
    assert "in A, the state was changed by the body at steps 6, 9: params/head" in of_both
    assert "halve_tower" not in of_both, "both runs have it"
    leaves = {
        leaf["path"]: leaf
        for leaf in json.loads(shown(capsys, "diff", a, b, "--json", code=1))["leaves"]
    }
    assert leaves["params/head"]["norms"][0] < leaves["params/head"]["norms"][1]


def test_the_record_of_changes_is_bounded():
    course = Course(
        LoopState(0, {str(i): jnp.zeros(()) for i in range(12)}), 100, Timetable(), has_body=True
    )
    changes = StateChanges()
    course.on_replaced = changes.add

    def replace(step, by, *names):
        course.position = LoopState(step, course.position.state)
        course.replace_state(
            course.position.state | {str(name): jnp.zeros(()) for name in names}, by
        )

    for step in range(30):
        replace(step, "the body", *range(10))
        replace(step, "the body", *range(10))  # twice at one step
    for step, name in enumerate(range(10), 30):
        replace(step, "x" * 1000, name)
    first, *others = changes.as_record()
    assert first["steps"] == [*range(10), *range(20, 30)]
    assert (first["count"], len(first["leaves"]), first["leaves_left_out"]) == (30, 4, 6)
    assert [change["leaves"] for change in others] == [
        *([str(name)] for name in range(5)),
        ["other leaves"],
    ]
    assert (others[-1]["by"], others[-1]["steps"]) == ("the body or a hook", [35, 36, 37, 38, 39])
    assert {len(change["by"]) for change in others[:-1]} == {80}


def test_a_state_that_was_donated_is_not_read():
    state = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    course = Course(LoopState(3, state), 10, Timetable(), has_body=True)
    changes = StateChanges()
    course.on_replaced = changes.add
    after = jax.jit(lambda state: state | {"w": state["w"] + 1}, donate_argnums=0)(state)
    assert state["w"].is_deleted()
    course.replace_state(after, "the body")
    course.replace_state(after | {"w": jnp.ones(2)}, None)  # the end of a hook is undone
    (change,) = changes.as_record()
    assert (change["leaves"], change["steps"]) == (["b", "w"], [3])
