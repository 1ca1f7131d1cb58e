"""A whole run with Flax, Optax and Orbax, and a loop by hand.

python run_flax.py TASK.npz DIRECTORY
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.early_stopping import EarlyStopping
from flax.training.train_state import TrainState
from networks_flax import NETWORKS
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN
from tensorboardX import SummaryWriter
from whole_run_marks import Marks
from whole_run_tasks import read
from whole_run_weights import for_flax

marks = Marks()
task, directory = read(sys.argv[1]), os.path.abspath(sys.argv[2])
marks.data(task)
net = NETWORKS[task.name]()
schedule = optax.exponential_decay(task.rate, task.decay_steps, 0.7, staircase=True)
params = jax.jit(lambda key: net.init(key, task.train[0][:1])["params"])(jax.random.key(0))
params = jax.tree.map(jnp.asarray, for_flax(task))  # the weights of all marks
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)
state = state.replace(step=jnp.int32(0))  # a Python number would compile the step once more
marks.init(sum(leaf.size for leaf in jax.tree.leaves(params)))


def losses(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, x, y):
    def loss_fn(params):
        return losses(state.apply_fn({"params": params}, x), y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def evaluate(params, x, y):
    def body(carry, batch):
        logits = net.apply({"params": params}, batch[0])
        return carry, (losses(logits, batch[1]).mean(), (logits.argmax(-1) == batch[1]).mean())

    batches = jax.tree.map(lambda a: a.reshape(-1, task.eval_size, *a.shape[1:]), (x, y))
    _, (loss, accuracy) = jax.lax.scan(body, None, batches)
    return {"loss": loss.mean(), "accuracy": accuracy.mean()}


best = BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1)
options = ocp.CheckpointManagerOptions(
    preservation_policy=AnyPreservationPolicy([LatestN(1), best])
)
early_stop = EarlyStopping(patience=task.patience)
with (
    ocp.CheckpointManager(f"{directory}/checkpoints", options=options) as manager,
    SummaryWriter(directory) as writer,
):
    first = manager.latest_step() or 0
    if first:
        restored = manager.restore(
            first,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(state), stop=ocp.args.JsonRestore()
            ),
        )
        state, early_stop = restored.state, early_stop.replace(**restored.stop)
    for step in range(first, task.steps):
        rows = task.order[step]
        state, loss = train_step(state, task.train[0][rows], task.train[1][rows])
        done = step + 1
        marks.step(done, loss)
        if done % task.log_every == 0:
            writer.add_scalar("loss", float(loss), done)
        if done % 100 == 0:
            print(done, float(loss))
        if done % task.every == 0:
            metrics = {
                name: float(value)
                for name, value in jax.device_get(evaluate(state.params, *task.valid)).items()
            }
            for name, value in metrics.items():
                writer.add_scalar(f"validation/{name}", value, done)
            early_stop = early_stop.update(metrics["loss"])
            stop = {
                "best_metric": early_stop.best_metric,
                "patience_count": early_stop.patience_count,
            }
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state), stop=ocp.args.JsonSave(stop)
            )
            manager.save(done, args=items, metrics=metrics)
            if early_stop.should_stop:
                break
marks.test(evaluate(state.params, *task.test)["loss"])
