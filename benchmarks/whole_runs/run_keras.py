"""A whole run with Keras 3 on JAX: `fit` with callbacks.

python run_keras.py TASK.npz DIRECTORY
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
from networks_keras import NETWORKS
from tensorboardX import SummaryWriter
from whole_run_marks import Marks
from whole_run_tasks import read
from whole_run_weights import to_keras

marks = Marks()
task, directory = read(sys.argv[1]), sys.argv[2]
marks.data(task)
os.makedirs(directory, exist_ok=True)
keras.utils.set_random_seed(0)
model = NETWORKS[task.name]()
rate = keras.optimizers.schedules.ExponentialDecay(task.rate, task.decay_steps, 0.7, staircase=True)
model.compile(
    keras.optimizers.AdamW(rate, weight_decay=0.01, epsilon=1e-10, global_clipnorm=1.0),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    steps_per_execution=10,
)
to_keras(task, model)  # the weights of all marks
marks.init(model.count_params())


class Log(keras.callbacks.Callback):  # keras.callbacks.TensorBoard imports TensorFlow, for seconds
    def on_train_begin(self, logs=None):
        self.writer = SummaryWriter(directory)

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % task.log_every == 0:
            self.writer.add_scalar(
                "loss", float(logs["loss"]), int(self.model.optimizer.iterations)
            )

    def on_epoch_end(self, epoch, logs=None):
        for name in ("val_loss", "val_accuracy"):
            self.writer.add_scalar(name, logs[name], (epoch + 1) * task.every)

    def on_train_end(self, logs=None):
        self.writer.close()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return task.steps

    def __getitem__(self, i):
        return task.train[0][task.order[i]], task.train[1][task.order[i]]


model.fit(
    Batches(),
    steps_per_epoch=task.every,
    epochs=task.steps // task.every,
    validation_data=task.valid,
    validation_batch_size=task.eval_size,
    shuffle=False,
    verbose=2,
    callbacks=[
        marks.for_keras(task.every),
        Log(),
        keras.callbacks.BackupAndRestore(directory + "/backup"),
        keras.callbacks.ModelCheckpoint(
            directory + "/best.weights.h5",
            monitor="val_loss",
            save_best_only=True,
            save_weights_only=True,
        ),
        keras.callbacks.EarlyStopping("val_loss", patience=task.patience),
    ],
)
marks.test(model.evaluate(*task.test, batch_size=task.eval_size, verbose=0)[0])
