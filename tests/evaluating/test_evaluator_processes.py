"""Evaluation on several processes: each evaluates its own rows, and all get the same results and decisions."""

import numpy as np
import pytest
from processes import all_printed, run

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
then = [jstep.EarlyStopping("each", 2, "min"), jstep.KeepBest(directory + f"/best{count}", "each", "min")]
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
"""


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
        # The means of outputs cancel: their error is that of the float32 outputs, which are below 1.
        np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-6, atol=np.finfo(np.float32).eps)
        np.testing.assert_array_equal(np.stack(found)[:, 3], np.stack(expected)[:, 3])  # counted, therefore identical
    assert all_printed(first, "found") == all_printed(second, "found")
    assert all_printed(first, "counts") == all_printed(second, "counts") == all_printed(alone, "counts") != []
    for a, b in zip(all_printed(first, "perplexity"), all_printed(alone, "perplexity"), strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-6)
    assert all_printed(first, "end") == all_printed(second, "end") == all_printed(alone, "end") == ["25 [15]"]
    assert len(all_printed(first, "metrics")) == 3
    assert all_printed(second, "metrics") == []  # only process 0 writes
    assert "batch_sharding=None: jstep.batches gives each process its own rows" in all_printed(first, "error")[0]
    assert "RuntimeError: batches: another process failed" in all_printed(first, "empty")[0]
    assert "empty, there is nothing to evaluate" in all_printed(second, "empty")[0]
