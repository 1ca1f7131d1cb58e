"""A whole run with Flax, Optax and Orbax, and a loop by hand.

python run_flax.py TASK.npz DIRECTORY
"""

import os
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.early_stopping import EarlyStopping
from flax.training.train_state import TrainState
from networks_flax import NETWORKS
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN
from tensorboardX import SummaryWriter
from whole_run_marks import Marks
from whole_run_tasks import read

task, directory = read(sys.argv[1]), os.path.abspath(sys.argv[2])
net = NETWORKS[task.name]()
schedule = optax.exponential_decay(task.rate, task.decay_steps, 0.7, staircase=True)
params = jax.jit(lambda key: net.init(key, task.train[0][:1], train=False)["params"])(jax.random.key(0))
state = TrainState.create(
    apply_fn=net.apply, params=params, tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
)
key = jax.random.key(1)
marks = Marks(task, sum(leaf.size for leaf in jax.tree.leaves(params)))


def losses(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        dropout = jax.random.fold_in(key, state.step)
        return losses(state.apply_fn({"params": params}, x, train=True, rngs={"dropout": dropout}), y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def eval_step(state, x, y):
    logits = state.apply_fn({"params": state.params}, x, train=False)
    return {"loss": losses(logits, y).mean(), "accuracy": (logits.argmax(-1) == y).mean()}


def evaluate(state, x, y):
    size = task.eval_size
    results = [eval_step(state, x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


best = BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1)
options = ocp.CheckpointManagerOptions(preservation_policy=AnyPreservationPolicy([LatestN(1), best]))
early_stop = EarlyStopping(patience=task.patience)
with ocp.CheckpointManager(f"{directory}/checkpoints", options=options) as manager, SummaryWriter(directory) as writer:
    first = manager.latest_step() or 0
    if first:
        restored = manager.restore(
            first, args=ocp.args.Composite(state=ocp.args.StandardRestore(state), stop=ocp.args.JsonRestore())
        )
        state, early_stop = restored.state, early_stop.replace(**restored.stop)
    rng = np.random.default_rng(0)
    per_epoch = len(task.train[0]) // task.batch_size
    for step in range(task.steps):  # to resume at the same batch, the orders of all epochs before are drawn again
        if step % per_epoch == 0:
            order = rng.permutation(len(task.train[0]))
        if step < first:
            continue
        rows = order[step % per_epoch * task.batch_size :][: task.batch_size]
        state, loss = train_step(state, task.train[0][rows], task.train[1][rows])
        done = step + 1
        marks.step(done, loss)
        if done % task.log_every == 0:
            writer.add_scalar("loss", float(loss), done)
        if done % 100 == 0:
            print(done, float(loss))
        if done % task.every == 0:
            metrics = evaluate(state, *task.valid)
            for name, value in metrics.items():
                writer.add_scalar(f"validation/{name}", value, done)
            early_stop = early_stop.update(metrics["loss"])
            stop = {"best_metric": early_stop.best_metric, "patience_count": early_stop.patience_count}
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), stop=ocp.args.JsonSave(stop))
            manager.save(done, args=items, metrics=metrics)
            if early_stop.should_stop:
                break
marks.test(evaluate(state, *task.test)["loss"])
