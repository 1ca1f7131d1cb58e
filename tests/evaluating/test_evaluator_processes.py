"""Evaluation on several processes: each evaluates its own rows, and all get the same results and
decisions.

First with the numbers that another process would send, or threads in its place; then with real
processes.
"""

import jax
import numpy as np
import pytest
from fellows import Fellows
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from processes import all_printed, run

from jstep.core import processes
from jstep.evaluating import evaluation_batches
from jstep.evaluating.evaluation_batches import _ENDED, _FAILED, _synchronized, place_batches

ROWS = np.arange(6.0, dtype=np.float32).reshape(3, 2)


def taken(monkeypatch, mine, others):
    """Return the batches of this process, which are on another device, while another one sends its
    counts."""
    sent = list(others)

    def exchange(nbytes, *counts):
        others = [sent.pop(0) if sent else _ENDED for _ in counts]
        return [[nbytes, *counts], [0, *others]]

    monkeypatch.setattr(processes, "ints_of_all", exchange)
    sharding = SingleDeviceSharding(jax.devices()[1])
    found = [batch for (batch,) in _synchronized(iter([(one,) for one in mine]), sharding)]
    assert all(one.sharding == sharding for one in found)
    assert not sent
    return [one.tolist() for one in found]


def test_batches_end_when_those_of_all_have_ended(monkeypatch):
    both = [ROWS[:2].tolist(), ROWS[2:].tolist()]
    assert taken(monkeypatch, [ROWS[:2], ROWS[2:]], [2, 2, _ENDED]) == both
    assert taken(monkeypatch, [ROWS[:2], ROWS[2:]], [2, _ENDED, _ENDED]) == both
    assert taken(monkeypatch, [ROWS[:2]], [2, 2, _ENDED]) == [ROWS[:2].tolist(), []]


@pytest.mark.parametrize(
    ("mine", "others", "error", "message"),
    [
        ([ROWS], [_FAILED], RuntimeError, "another process failed while it fetched a batch"),
        ([], [3], ValueError, "this process has no batch, and others have"),
        ([ROWS], [_ENDED], ValueError, "another process has no batch at all"),
    ],
)
def test_what_another_process_lacks_is_an_error_here(mine, others, error, message, monkeypatch):
    with pytest.raises(error, match=message):
        taken(monkeypatch, mine, others)


def test_an_error_of_this_process_is_sent_before_it_is_raised(monkeypatch):
    sent = []
    monkeypatch.setattr(
        processes, "ints_of_all", lambda *numbers: sent.append(numbers) or [numbers, numbers]
    )

    def broken():
        raise OSError("a file is gone")
        yield

    with pytest.raises(OSError, match="a file is gone"):
        next(_synchronized(broken(), None))
    assert sent == [(0, _FAILED)]


@pytest.mark.parametrize(
    ("kilobytes", "sizes"), [(1, [1, 2, 4, 8, 16, 16]), (20_000, [1, 2, *[3] * 11])]
)
def test_processes_exchange_the_numbers_of_several_batches_at_once(kilobytes, sizes, monkeypatch):
    """As many as the largest batch of any process allows, so that all have groups of one size."""
    exchanges = []

    def exchange(nbytes, *counts):
        exchanges.append(len(counts))
        return [[nbytes, *counts], [kilobytes * 1000, *counts]]

    monkeypatch.setattr(processes, "ints_of_all", exchange)
    batches = [(np.full((1, 1), i, np.float32),) for i in range(35)]
    sharding = SingleDeviceSharding(jax.devices()[0])
    found = [batch for (batch,) in _synchronized(iter(batches), sharding)]
    assert [int(batch[0, 0]) for batch in found] == list(range(35))
    assert exchanges == sizes


def test_only_batches_with_a_sharding_are_those_of_all_processes(monkeypatch):
    three, place = Fellows(monkeypatch, 3), SingleDeviceSharding(jax.devices()[1])
    row = ROWS[:1].tolist()
    found = three.each(
        lambda i: [batch.tolist() for (batch,) in place_batches([ROWS[:1]] * (i + 1), place)]
    )
    assert found == [[row, [], []], [row, row, []], [row, row, row]]
    ((alone,),) = place_batches([ROWS], None)  # the same on all processes: the program places it
    assert (type(alone), alone.tolist()) == (np.ndarray, ROWS.tolist())


# Batches of an evaluation whose rows several processes hold, with threads in their place.


class Spread(NamedSharding):
    """A sharding over devices of several processes."""

    is_fully_addressable = False


@pytest.mark.parametrize(
    ("sizes", "owners"),
    [([2, 1, 3], [2, 0, 1]), ([0, 3, 2], [0, 1, 2]), ([2, 2, 2], [0, 1]), ([-1, 1, 1], [1, 2])],
)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_rows_are_joined_in_the_order_of_the_owners(sizes, owners, dtype, monkeypatch):
    """Whatever each process has of them, bit by bit, and replicated where they do not divide over
    the mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    three = Fellows(monkeypatch, 3)
    monkeypatch.setattr(evaluation_batches, "part_owners", lambda sharding: owners)
    monkeypatch.setattr(
        evaluation_batches, "place_rows", lambda rows, sharding: ("placed", len(rows))
    )
    whole = (np.arange(24).reshape(3, 4, 2) % 3).astype(dtype)
    own = [whole[i][: max(0, size)] for i, size in enumerate(sizes)]
    sharding = Spread(mesh, PartitionSpec("data"))
    found = three.each(lambda i: evaluation_batches._global(np.array(sizes), own[i], sharding))
    expected = np.concatenate([own[i] for i in owners])
    for one in found:
        assert one.dtype == dtype
        assert one.tolist() == expected.tolist()
        assert one.sharding.spec == PartitionSpec(None)


def test_equal_rows_that_divide_are_placed_by_each_process(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    monkeypatch.setattr(evaluation_batches, "part_owners", lambda sharding: [0, 1])
    monkeypatch.setattr(
        evaluation_batches, "place_rows", lambda rows, sharding: ("placed", len(rows))
    )
    sharding = Spread(mesh, PartitionSpec("data"))
    found = evaluation_batches._global(np.array([4, 4]), np.ones((4, 2)), sharding)
    assert found == ("placed", 4)
    scalar = evaluation_batches._global(
        np.array([4, 4]), np.float32(3), Spread(mesh, PartitionSpec())
    )
    assert (scalar.shape, scalar.tolist()) == ((), 3.0)


# Real processes.

SCRIPT = """
def value(params, x):
    out = jnp.tanh(x @ params["w"] + params["b"][None])
    return {"each": jnp.sum(out ** 2, axis=1), "mean": jnp.mean(out), "pair": (jnp.sum(out), jnp.sum(out > 0)),
            "right": out[:, 0] > 0}

state = jstep.TrainState.create(init, optimizer, mesh=mesh)
for size, rows_in_all in ((16, 64), (16, 55), (8, 19)):
    part = jstep.batches(data[:rows_in_all], size, shuffle=False, num_epochs=1, drop_remainder=False)
    evaluate = jstep.evaluator(value, part, batch_sharding=rows)
    found = evaluate(state)
    assert evaluate(state) == found
    print("found", *found.values())

# Loaders without a length: processes have different numbers of batches, of different sizes.
parts = np.array_split(data[:21], [4, 9])
mine = [parts[0], parts[2]] if process == 0 else [parts[1]]
if count == 1:
    mine = list(parts)
print("found", *jstep.evaluator(value, mine, batch_sharding=rows)(state).values())

# Metric objects: counts are identical for any number of processes and any sizes of their parts.
def objects(params, x):
    out = jnp.tanh(x @ params["w"])
    truth = x[:, 0] + 0.1 * x[:, 1] > 0
    return {"auc": jstep.metrics.auc(out[:, 0], truth), "pr": jstep.metrics.auc(out[:, 0], truth, "PR"),
            "right": jstep.metrics.accuracy(out, jnp.argmax(x, axis=1)), "f1": jstep.metrics.f1(out[:, 0], truth, 0.1),
            "matrix": jstep.metrics.confusion_matrix(jnp.argmax(out, 1), jnp.argmax(x, axis=1), 8),
            "perplexity": jstep.metrics.perplexity(out, jnp.argmax(x, axis=1))}

for part in (mine, jstep.batches(data[:55], 16, shuffle=False, num_epochs=1, drop_remainder=False)):
    evaluate = jstep.evaluator(objects, part, batch_sharding=rows)
    counts = evaluate(state)
    assert evaluate(state) == counts
    print("perplexity", counts.pop("perplexity"))
    print("counts", *counts.values())

# Callbacks decide alike on all processes, and all of them save the best checkpoint.
import itertools
stop = jstep.EarlyStopping("each", patience=2, mode="min")
then = [stop, jstep.KeepBest(directory + f"/best{count}", "each", mode="min")]
losses = itertools.chain([3.0, 2.0, 1.0], itertools.repeat(1.0 - process))  # the values of process 0 count
hooks = [jstep.EvaluationHook(lambda state: {"each": next(losses)}, every_n_steps=5, callbacks=then), jstep.MetricsHook(
    lambda step, values: print("metrics", step, *values.values()), every_n_steps=10)]
with jax.transfer_guard("disallow"):  # the guard applies to the user's own transfers only
    end = jstep.train(
        jstep.minimize(loss_fn, optimizer), state, batches, 100, hooks=hooks, batch_sharding=rows, progress=False,
        checkpoint_dir=directory + f"/run{count}",
    )
with jstep.Saver(directory + f"/best{count}", prefix="best") as saver:
    print("end", jstep.global_step(end), saver.all_steps())

def message(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print("error", message(lambda: jstep.evaluator(value, part)(end)))
mine = [] if process == count - 1 else [data]
print("empty", message(lambda: jstep.evaluator(value, mine, batch_sharding=rows)(end)))
"""  # noqa: E501


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (lines,) = run(SCRIPT, 1, tmp_path_factory.mktemp("alone"))
    return lines


@pytest.mark.thorough
def test_two_processes_give_the_results_of_one(alone, tmp_path):
    first, second = run(SCRIPT, 2, tmp_path)
    expected = [np.array(line.split(), float) for line in all_printed(alone, "found")]
    assert len(expected) == 4
    for lines in (first, second):
        found = [np.array(line.split(), float) for line in all_printed(lines, "found")]
        # The means of outputs cancel: their error is that of the float32 outputs, which are below
        # 1.
        np.testing.assert_allclose(
            np.stack(found), np.stack(expected), rtol=1e-6, atol=np.finfo(np.float32).eps
        )
        # This value is counted, and therefore identical.
        np.testing.assert_array_equal(np.stack(found)[:, 3], np.stack(expected)[:, 3])
    assert all_printed(first, "found") == all_printed(second, "found")
    assert (
        all_printed(first, "counts")
        == all_printed(second, "counts")
        == all_printed(alone, "counts")
        != []
    )
    for a, b in zip(
        all_printed(first, "perplexity"), all_printed(alone, "perplexity"), strict=True
    ):
        assert float(a) == pytest.approx(float(b), rel=1e-6)
    assert (
        all_printed(first, "end")
        == all_printed(second, "end")
        == all_printed(alone, "end")
        == ["25 [15]"]
    )
    assert len(all_printed(first, "metrics")) == 3
    assert all_printed(second, "metrics") == []  # only process 0 writes
    assert (
        "batch_sharding=None: jstep.batches gives each process its own rows"
        in all_printed(first, "error")[0]
    )
    assert "RuntimeError: batches: another process failed" in all_printed(first, "empty")[0]
    assert "empty, there is nothing to evaluate" in all_printed(second, "empty")[0]
