"""A whole run with Keras 3 on JAX: `fit` with callbacks.

python run_keras.py TASK.npz DIRECTORY
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from networks_keras import NETWORKS
from whole_run_marks import Marks
from whole_run_tasks import read

task, directory = read(sys.argv[1]), sys.argv[2]
os.makedirs(directory, exist_ok=True)
keras.utils.set_random_seed(0)
model = NETWORKS[task.name]()
rate = keras.optimizers.schedules.ExponentialDecay(task.rate, task.decay_steps, 0.7, staircase=True)
model.compile(
    keras.optimizers.Adam(rate, global_clipnorm=1.0),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
marks = Marks(task, model.count_params())


def batches():
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(task.train[0]))
        for i in range(0, len(order) - task.batch_size + 1, task.batch_size):
            rows = order[i : i + task.batch_size]
            yield task.train[0][rows], task.train[1][rows]


model.fit(
    batches(),
    steps_per_epoch=task.every,
    epochs=task.steps // task.every,
    validation_data=task.valid,
    validation_batch_size=task.eval_size,
    verbose=2,
    callbacks=[
        marks.for_keras(task.every),
        keras.callbacks.TensorBoard(directory, update_freq=task.log_every),
        keras.callbacks.BackupAndRestore(directory + "/backup"),
        keras.callbacks.ModelCheckpoint(directory + "/best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.EarlyStopping("val_loss", patience=task.patience),
    ],
)
marks.test(model.evaluate(*task.test, batch_size=task.eval_size, verbose=0)[0])
