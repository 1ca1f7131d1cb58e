"""Batches whose shapes differ between processes: an error on all of them, where each would wait for
the others."""

import re

import pytest
from processes import printed, run

SCRIPT = """
from jstep.core import processes

state = jstep.TrainState.create(init, optimizer, mesh=mesh)
step = jstep.minimize(loss_fn, optimizer, donate=False)
own = jax.jit(lambda state, x: (state.replace(global_step=state.global_step + 1), {"loss": jnp.sum(x)}))
agreements = []
gather_texts = processes.gather_texts
processes.gather_texts = lambda text: agreements.append(text) or gather_texts(text)

def x(count):
    return np.ones((count, 8), np.float32)

def train(batches, step=step, **options):
    options = dict(progress=False, log_steps=None) | options
    return jstep.train(step, state, batches, 6, **options)

def attempt(name, fn):
    if name not in sys.argv[5:]:
        return
    try:
        print(name, "step", int(fn().global_step))
    except Exception as error:
        print(name, type(error).__name__, error)
    # Not the exchange at the start, of what the processes were given.
    print(name + "_agreements", sum(text.startswith("float32[") for text in agreements))
    agreements.clear()

def by_hand(rows_of):
    new = state
    for n in range(3):
        new, metrics = step(new, jstep.shard_batch(rows_of(n), mesh))
    return new

rows_of = {
    "none": lambda n: x((4, 0)[process]), "later": lambda n: x(((4, 4) if n < 3 else (2, 6))[process]),
    "odd": lambda n: x((4, 3)[process]), "dtype": lambda n: x(4).astype((np.float32, np.int32)[process]),
    "same": lambda n: x(4 if n % 2 else 2),
}
for name, rows_at in rows_of.items():
    attempt(name, lambda: train(rows_at, batch_sharding=rows))
none, same = rows_of["none"], rows_of["same"]
attempt("named", lambda: train(lambda n: {"x": none(n), "y": x(4)}, own, batch_sharding=rows))
attempt("shard_batch", lambda: train(lambda n: jstep.shard_batch(none(n), mesh)))
attempt("by_hand", lambda: by_hand(none))
attempt("by_hand_same", lambda: by_hand(same))
attempt("loader", lambda: train(map(none, range(9)), batch_sharding=rows))
attempt("calls", lambda: train(none, batch_sharding=rows, steps_per_call=3))
attempt("custom", lambda: train(none, own, batch_sharding=rows))
attempt("no_batch", lambda: train([x(4)] * (6 - 6 * process), batch_sharding=rows))

def padded(state, x):  # makes equal shapes of different ones
    return step(state, jstep.shard_batch(np.pad(x, ((0, 4 - len(x)), (0, 0))), mesh))

attempt("padded", lambda: train(lambda n: x((4, 3)[process]), padded))
if process == 0:  # one process alone, with a state of its own
    step(jstep.TrainState.create(init, optimizer), x(2))
attempt("after", lambda: by_hand(lambda n: x(2)))
"""  # noqa: E501


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What two processes print, for the few that are quick."""
    return run(SCRIPT, 2, tmp_path_factory.mktemp("shapes"), "none", "odd", "by_hand", "same")


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    names = "later dtype named shard_batch by_hand_same loader calls custom no_batch padded after"
    return run(SCRIPT, 2, tmp_path_factory.mktemp("shapes"), *names.split())


def is_error(lines, name):
    for of_process in lines:
        error = printed(of_process, name)
        assert error.startswith("ValueError batch: must be alike on all processes, got ")
        assert re.search(r"got .+ on process 0, .* on 1\b", error)
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["none", "by_hand"])
def test_error_on_all_processes(lines, name):
    assert is_error(lines, name)


@pytest.mark.thorough
def test_first_batch_that_one_process_cannot_fetch(lines):
    first, second = (printed(of_process, "odd") for of_process in lines)
    assert "shape: (6, 8)" in second
    found = second.replace(" ", ": ", 1)
    assert first == f"RuntimeError batches: the first one cannot be fetched: process 1: {found}"


@pytest.mark.thorough
def test_known_shapes_need_no_agreement(lines):
    for of_process in lines:
        assert printed(of_process, "same") == "step 6"
        assert printed(of_process, "same_agreements") == "2"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dtype", "named", "calls", "custom"])
def test_more_errors_on_all_processes(more, name):
    assert is_error(more, name)


@pytest.mark.thorough
def test_process_without_a_batch(more):
    first, second = (printed(of_process, "no_batch") for of_process in more)
    assert first.startswith("ValueError batches: another process has no batch")
    assert second.startswith("ValueError batches: there is no batch for step 0")


@pytest.mark.thorough
def test_batches_that_may_differ(more):
    for of_process in more:
        assert printed(of_process, "by_hand_same") == "step 3"
        assert printed(of_process, "by_hand_same_agreements") == "2"
        assert printed(of_process, "padded") == "step 6"
        assert printed(of_process, "after") == "step 3"
