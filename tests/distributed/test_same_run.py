"""Processes that were not given the same run, or do not see one directory: an error at the start,
on all of them."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fellows import Fellows
from processes import printed, start, wait_for

import jstep
from jstep.checkpoint import shared_directory
from jstep.checkpoint.shared_directory import check_shared
from jstep.origin.agreement import check_latest, check_processes
from jstep.origin.arguments import Options, validated
from jstep.state.sharding import place_with_params


@pytest.fixture
def two(monkeypatch):
    return Fellows(monkeypatch)


def names_below(path):
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_one_directory_at_two_paths_is_one(two, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").symlink_to("disk")
    paths = [tmp_path / "disk" / "run", tmp_path / "mount" / "run"]
    assert two.each(lambda i: check_shared(paths[i], "checkpoint_dir")) == [None, None]
    assert names_below(tmp_path / "disk") == ["run"]  # the file is removed


def test_another_directory_is_an_error_of_all_that_names_both(two, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_directory, "SAME_HOST_SECS", 0.05)
    paths = [tmp_path / "a", tmp_path / "b"]
    errors = two.each(lambda i: check_shared(paths[i], "checkpoint_dir"))
    for error in errors:
        assert isinstance(error, ValueError)
        assert f"checkpoint_dir='{paths[1]}': must be the directory of process 0" in str(error)
        assert f"'{paths[0]}/" in str(error)
    assert names_below(tmp_path) == ["a"]


def test_a_file_that_another_host_shows_late_is_waited_for(two, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_directory, "SAME_HOST_SECS", 0.0)
    monkeypatch.setattr(shared_directory, "space", lambda: f"host {two.index}")
    monkeypatch.setattr(shared_directory, "_POLL_SECS", 0.001)
    answers, exists = iter([False, False]), os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: next(answers, True) and exists(path))
    assert two.each(lambda i: check_shared(tmp_path, "checkpoint_dir")) == [None, None]


def test_a_directory_that_cannot_be_written_is_not_compared(two, tmp_path, monkeypatch):
    """A run that is finished needs no right to write; another one fails at its claim."""

    def refused(path, **options):
        raise PermissionError(path)

    monkeypatch.setattr(shared_directory, "new_file", refused)
    assert two.each(lambda i: check_shared(tmp_path / str(i), "checkpoint_dir")) == [None, None]


def test_a_file_in_place_of_the_directory_is_an_error_of_all(two, tmp_path):
    (tmp_path / "run").write_text("")
    errors = two.each(lambda i: check_shared(tmp_path / "run", "checkpoint_dir"))
    assert [isinstance(error, OSError) for error in errors] == [True, True]


STATE = jstep.TrainState.create({"w": jnp.zeros(2)}, jstep.adam())


PARAMETERS = inspect.signature(jstep.train).parameters.values()
DEFAULTS = {one.name: one.default for one in PARAMETERS if one.default is not one.empty}


def compared(two, *, states=(STATE, STATE), steps=(0, 0), **arguments):
    """Return what each process raises that has its own arguments."""

    def check(index):
        values = {name: value[index] for name, value in arguments.items()}
        options = validated(
            Options(**{"last_step": 10, **DEFAULTS, **values}), states[index], iter(())
        )
        check_processes(options, states[index], steps[index])

    return two.each(check)


def every(steps=None, secs=None):
    return jstep.EvaluationHook(lambda state: {}, every_n_steps=steps, every_n_secs=secs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"last_step": (10, 20)},
            "last_step: must be the same on all processes, got 10 on process 0, 20 on process",
        ),
        ({"steps_per_call": (1, 4)}, "steps_per_call: must be the same"),
        ({"save_checkpoint_steps": (5, None)}, "save_checkpoint_steps: must be the same"),
        ({"stop_secs": (60.0, None)}, "stop_secs is given: must be the same"),
        ({"checkpoint_dir": ("run", None)}, "checkpoint_dir is given: must be the same"),
        (
            {"hooks": ([], [every(2)])},
            "number of hooks: must be the same on all processes, got 0 on process 0, 1 on",
        ),
        (
            {"hooks": ([every(2)], [every(3)])},
            "cadence of hooks[0]: must be the same on all processes, got every 2",
        ),
        ({"hooks": ([every(2)], [every(2, 1.0)])}, "every 2 steps or by the clock on process 1"),
        ({"log_steps": (10, 20), "steps_per_call": (4, 4)}, "log_steps: must be the same"),
        ({"steps": (0, 5)}, "step of the state: must be the same"),
    ],
)
def test_arguments_that_differ_are_named(two, arguments, message):
    for error in compared(two, **arguments):
        assert isinstance(error, ValueError), error
        assert message in str(error)


def test_states_that_differ_are_told_by_their_leaves(two):
    other = jstep.TrainState.create({"w": jnp.zeros(2), "b": jnp.zeros(1)}, jstep.adam())
    for error in compared(two, states=(STATE, other)):
        assert (
            "state: must have the same leaves on all processes, got fewer on process 0 and params/b"
            in str(error)
        )


@jax.tree_util.register_pytree_with_keys_class
class Listed(dict):
    """A dict whose leaves are in the order in which they were inserted."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(key), value) for key, value in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values, strict=True))


def test_states_that_differ_in_the_order_of_their_leaves_are_told_where(two):
    states = [
        STATE.replace(params=Listed({key: jnp.zeros(2) for key in keys})) for keys in ("abc", "acb")
    ]
    for error in compared(two, states=states):
        assert (
            "must have the same order of leaves on all processes, "
            "got params/b float32[2] on process 0"
        ) in str(error)
        assert "and params/c float32[2] on process 1" in str(error)


def test_what_may_differ_is_not_compared(two):
    """Only process 0 writes lines and files, and only its seconds count."""
    metrics = [jstep.MetricsHook(lambda step, row: None, every_n_steps=7)], [jstep.Hook()]
    assert compared(two, hooks=metrics, log_steps=(10, None), stop_secs=(60.0, 70.0)) == [None] * 2


def test_another_newest_checkpoint_is_an_error(two):
    assert two.each(lambda i: check_latest([3, 3][i])) == [None, None]
    for error in two.each(lambda i: check_latest([3, None][i])):
        assert "got step 3 on process 0, none on process 1" in str(error)


def test_integers_of_numpy_are_those_of_python(two):
    intervals = {"save_checkpoint_steps": 2, "log_steps": 3, "save_summaries_steps": 4}
    pairs = {name: (np.int64(value), value) for name, value in intervals.items()}
    assert (
        compared(two, **pairs, steps_per_call=(np.int64(4), 4), logdir=("run", "run")) == [None] * 2
    )


def test_a_state_of_one_process_stays_as_it_is():
    assert place_with_params(STATE) is STATE


PROGRAM = """
mode = sys.argv[5]
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh).replace(global_step=jnp.int32(0))
own = directory + f"/{process}" if mode == "run" else directory
best = jstep.KeepBest(directory + (f"/best{process}" if mode == "best" else "/best"), "loss")
evaluate = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[best])

class End(jstep.Hook):
    def end(self, step, state):
        if mode == "interrupted":
            raise OSError("a plot")
        return state.replace(params=jax.tree.map(lambda leaf: leaf + 1, state.params))

try:
    state = jstep.train(step, state, batches, 4, hooks=[evaluate, End()], checkpoint_dir=own, batch_sharding=rows)
    print("placement", state.global_step.sharding.is_fully_addressable, flush=True)
except Exception as error:
    print("raised", type(error).__name__, error, flush=True)
"""  # noqa: E501


def outcomes(directory, mode, name):
    ended = wait_for(start(PROGRAM, 2, directory, mode, patience=20))
    return [printed(one.out.split("\n"), name) for one in ended]


def test_two_processes_with_directories_of_their_own(tmp_path):
    for text in outcomes(tmp_path, "run", "raised"):
        assert "must be the directory of process 0" in text
        assert f"'{tmp_path}/1'" in text
        assert f"'{tmp_path}/0/" in text


@pytest.mark.thorough
def test_two_processes_whose_best_checkpoints_have_directories_of_their_own(tmp_path):
    for text in outcomes(tmp_path, "best", "raised"):
        assert "KeepBest: directory" in text
        assert f"'{tmp_path}/best1'" in text


@pytest.mark.thorough
def test_a_step_that_is_on_no_mesh_is_placed_as_the_parameters_are(tmp_path):
    """A restart at the end makes what is missing there, and saves it."""
    assert all("a plot" in text for text in outcomes(tmp_path, "interrupted", "raised"))
    assert outcomes(tmp_path, "none", "placement") == ["False", "False"]
    assert outcomes(tmp_path, "none", "placement") == ["False", "False"]
