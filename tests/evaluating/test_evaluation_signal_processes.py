"""A signal to one process during an evaluation: all processes abandon it at the same batch, save and exit."""

import pytest
from processes import all_printed, run, start, wait_for

import jstep

SCRIPT = """
mode = sys.argv[5]

class Slow:
    def __iter__(self):
        for i in range(60):
            if mode == "term" and evaluations and i == 3 and process == count - 1:
                print("sent", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
            if mode == "term" and evaluations:
                time.sleep(0.1)  # JAX checks for signals once a second
            yield data[16 * process : 16 * process + 8] if count == 2 else data[:16]
        evaluations.append(1)

evaluations, seen = [], []
evaluate = jstep.evaluator(lambda params, x: {"loss": x[:, 0]}, Slow(), batch_sharding=rows)
hook = jstep.EvaluationHook(lambda state: evaluate(state), every_n_steps=5, callbacks=[
    lambda step, state, results: seen.append(step), jstep.EarlyStopping("loss", patience=4)])
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
try:
    end = jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, 40, hooks=[hook], batch_sharding=rows,
                      progress=False, checkpoint_dir=directory)
    print("end", jstep.global_step(end))
finally:
    print("seen", *seen, flush=True)
"""


@pytest.mark.thorough
def test_all_processes_abandon_and_repeat_the_evaluation(tmp_path):
    ended = wait_for(start(SCRIPT, 2, tmp_path, "term"))
    assert [one.code for one in ended] == [143, 143], ended[0].err[-2000:]
    assert [all_printed(one.out.split("\n"), "seen") for one in ended] == [["5"], ["5"]]  # step 10 was abandoned
    with jstep.Saver(tmp_path) as saver:
        assert saver.latest_step() == 10
    for one in run(SCRIPT, 2, tmp_path, "none"):
        assert all_printed(one, "seen") == ["10 15 20 25"]
        assert all_printed(one, "end") == ["25"]  # the first evaluation is the best, and the next four are not better
