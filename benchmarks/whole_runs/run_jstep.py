"""A whole run with jstep.

python run_jstep.py TASK.npz DIRECTORY STEPS_PER_CALL
"""

import sys

import jax
import jax.numpy as jnp
from networks_jax import NETWORKS
from whole_run_marks import Marks
from whole_run_tasks import read
from whole_run_weights import tree_of

import jstep

marks = Marks()
task, directory, steps_per_call = read(sys.argv[1]), sys.argv[2], sys.argv[3]
marks.data(task)
init, predict = NETWORKS[task.name]


def losses(logits, y):
    # As Optax computes it: log_softmax takes a few percent more of the transformer's step.
    of_y = jnp.take_along_axis(logits, y[..., None], -1)
    return jax.nn.logsumexp(logits, -1, keepdims=True) - of_y


def loss_fn(params, x, y):
    return losses(predict(params, x), y).mean()


def metrics(params, x, y):
    logits = predict(params, x)
    return {"loss": losses(logits, y).mean(), "accuracy": (logits.argmax(-1) == y).mean()}


def evaluator(examples):
    return jstep.evaluator(
        metrics, jstep.batches(examples, task.eval_size, shuffle=False, num_epochs=1)
    )


optimizer = jstep.chain(
    jstep.clip_gradients(by_global_norm=1.0),
    jstep.adamw(
        jstep.exponential_decay(task.rate, task.decay_steps, 0.7, staircase=True), weight_decay=0.01
    ),
)
state = jstep.TrainState.create(lambda: init(jax.random.key(0)), optimizer)
state = state.replace(params=jax.tree.map(jnp.asarray, tree_of(task.weights)))  # of all marks
marks.init(sum(leaf.size for leaf in jax.tree.leaves(state.params)))
state = jstep.train(
    jstep.minimize(loss_fn, optimizer),
    state,
    jstep.batches(task.train, task.batch_size, seed=0),
    task.steps,
    checkpoint_dir=directory,
    logdir=directory,
    save_checkpoint_steps=task.every,
    save_summaries_steps=task.log_every,
    steps_per_call="auto" if steps_per_call == "auto" else int(steps_per_call),
    hooks=[
        marks.for_jstep(),
        jstep.EvaluationHook(
            evaluator(task.valid),
            every_n_steps=task.every,
            prefix="validation",
            callbacks=[
                jstep.KeepBest(directory, "loss", prefix="best"),
                jstep.EarlyStopping("loss", patience=task.patience),
            ],
        ),
    ],
)
marks.test(evaluator(task.test)(state)["loss"])
