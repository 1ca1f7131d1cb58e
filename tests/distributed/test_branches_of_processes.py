"""Branches, histories, and complete checkpoints on two processes, and on one with as many
devices."""

import pytest
from processes import printed, run

PROGRAM = """
folder = directory
step = jstep.minimize(loss_fn, optimizer)

class Told(jstep.Hook):
    steps = []
    def saved(self, step, path):
        self.steps.append(step)
    def before_save(self, step):
        return None

def train(last_step, name, state=None, **options):
    if state is None:
        state = jstep.TrainState.create(init(), optimizer, mesh=mesh)
    history, told = jstep.History(f"{folder}/{name}.jsonl", every_n_steps=3), Told()
    told.steps = []
    options |= {"save_checkpoint_steps": 5, "save_checkpoint_secs": None, "batch_sharding": rows, "log_steps": None}
    where, hooks = f"{folder}/{name}", [history, told]
    state = jstep.train(step, state, batches, last_step, checkpoint_dir=where, hooks=hooks, **options)
    return state, history, told

whole, rows_of_whole, _ = train(15, "whole")
_, _, told = train(10, "trunk")
print("told", told.steps)
branch, history, _ = train(15, "branch", start_from=f"{folder}/trunk")
print("same", weights(branch) == weights(whole))
print("rows", [row["step"] for row in history.rows], history.rows[-1:] == rows_of_whole.rows[-1:])

def edited(step):
    with jstep.Saver(f"{folder}/whole") as saver:
        state = saver.restore(jstep.TrainState.create(init(), optimizer, mesh=mesh), step)
    bias = jnp.concatenate([state.params["b"][:4], jnp.ones(4)]) if step == 10 else state.params["b"]
    return state.with_params({"w": state.params["w"], "b": bias})

one = train(15, "edited", edited(10), start_from=f"{folder}/trunk")[0]
other = jstep.train(step, edited(10), batches, 15, batch_sharding=rows, log_steps=None)
print("edited", weights(one) == weights(other), weights(one) != weights(whole))
try:
    train(15, "refused", edited(5), start_from=f"{folder}/trunk")
except ValueError as error:
    print("refused", "at the step of the state passed, 5, got one at step 10" in str(error))
"""  # noqa: E501


@pytest.mark.thorough
def test_a_branch_on_two_processes(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    first, second = run(PROGRAM, 2, tmp_path / "two")
    (alone,) = run(PROGRAM, 1, tmp_path / "one")
    assert printed(first, "told") == "[5, 10]"  # the last one once, when the hooks have ended
    assert printed(second, "told") == "[]"
    assert [printed(one, "same") for one in (first, second, alone)] == ["True"] * 3
    assert [printed(one, "edited") for one in (first, second, alone)] == ["True True"] * 3
    assert [printed(one, "refused") for one in (first, second, alone)] == ["True"] * 3
    rows = [printed(one, "rows") for one in (first, second, alone)]
    assert rows[0] == rows[1]
    assert rows[0].endswith("True")
