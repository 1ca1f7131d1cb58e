"""Handwritten digits: more than 99 % accuracy with a small convolutional network in a minute.

    python examples/digits.py                # press Ctrl-C and start it again: it resumes
    jstep report runs/digits -o digits.html  # the curves on a page
    tensorboard --logdir runs/digits         # also shows histograms, the hardest digits, the graph

The images are the UCI handwritten digits that come with scikit-learn (1797 images of 8×8 pixels, no
download). The network is plain JAX. The learning rate (a staircase), Adam's bias correction, the
decay of the moving average of the weights, dropout and batches are functions of the global step, so
a run that is interrupted and resumed ends with bitwise the same weights as an uninterrupted one.

During training the network is evaluated on validation images. The run stops when the validation
loss no longer improves, and the best weights are evaluated on the test images.
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jstep


def load():
    """Training, validation and test sets: images (n, 8, 8, 1) in [0, 1] and labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    images, valid_images, labels, valid_labels = train_test_split(
        images, labels, test_size=200, random_state=0, stratify=labels
    )
    return (images, labels), (valid_images, valid_labels), (test_images, test_labels)


def init_params(key):
    """Two convolutions and two dense layers, He-initialized."""
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (4 * 4 * 64, 128),
        "dense2": (128, 10),
    }
    params = {}
    for name, shape in shapes.items():
        key, sub = jax.random.split(key)
        fan_in = np.prod(shape[:-1])
        params[name] = {
            "kernel": jax.random.normal(sub, shape) * np.sqrt(2.0 / fan_in).astype(np.float32),
            "bias": jnp.zeros(shape[-1]),
        }
    return params


def convolve(layer, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return (
        jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        + layer["bias"]
    )


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def predict(params, images, dropout_key=None):
    """Logits of a batch of images; with a key, dropout of a quarter of the hidden units."""
    x = jax.nn.relu(convolve(params["conv1"], images))
    x = jax.nn.relu(convolve(params["conv2"], x))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(dense(params["dense1"], x.reshape(len(x), -1)))
    if dropout_key is not None:
        x = jnp.where(jax.random.bernoulli(dropout_key, 0.75, x.shape), x / 0.75, 0.0)
    return dense(params["dense2"], x)


def loss_fn(params, images, labels, rng):
    """Loss and accuracy on images that are randomly shifted by up to one pixel."""
    shift_key, dropout_key = jax.random.split(rng)
    images = jnp.roll(images, jax.random.randint(shift_key, (2,), -1, 2), axis=(1, 2))
    logits = predict(params, images, dropout_key=dropout_key)
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))
    return loss, {"accuracy": jnp.mean(logits.argmax(-1) == labels)}


def metrics(params, images, labels):
    """Loss and accuracy of each image; `jstep.evaluator` averages them over all batches."""
    logits = predict(params, images)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
    return {"loss": loss, "accuracy": logits.argmax(-1) == labels}


def one_pass(examples):
    """Batches of all examples in order, the last one smaller."""
    return jstep.batches(
        examples, batch_size=128, shuffle=False, num_epochs=1, drop_remainder=False
    )


def make_optimizer():
    return jstep.with_moving_average(
        jstep.chain(
            jstep.clip_gradients(by_global_norm=1.0),
            jstep.adam(
                jstep.exponential_decay(2e-3, decay_steps=200, decay_rate=0.7, staircase=True)
            ),
        ),
        jstep.ExponentialMovingAverage(0.99, num_updates=True),
    )


def tile(pictures, columns=8, scale=8):
    """Tile pictures (n, h, w) into a single enlarged picture (1, height, width, 1)."""
    n, h, w = pictures.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    sheet = np.full((rows * columns, h + 1, w + 1), 0.5, np.float32)  # a gray line between them
    sheet[:n, :h, :w] = pictures
    sheet = (
        sheet.reshape(rows, columns, h + 1, w + 1)
        .swapaxes(1, 2)
        .reshape(rows * (h + 1), columns * (w + 1))
    )
    return sheet.repeat(scale, 0).repeat(scale, 1)[None, :, :, None]


def write_hardest(writer, state, images, labels):
    """Print the test digits that the averaged weights misclassify; draw the 16 of largest loss."""
    params = jstep.averaged_params(state)
    guesses = np.asarray(predict(params, images).argmax(-1))
    wrong = np.flatnonzero(guesses != labels)
    which = ", ".join(f"a {labels[i]} classified as {guesses[i]}" for i in wrong)
    print(f"{len(wrong)} mistakes{f': {which}' if which else ''}")
    hardest = np.argsort(-np.asarray(metrics(params, images, labels)["loss"]))[:16]
    writer.add_summary(
        jstep.summary.image("hardest", tile(images[hardest, :, :, 0]), max_images=1),
        state.global_step,
    )


def main(steps=1500, seed=0, directory=None):
    directory = pathlib.Path(directory or f"runs/digits/seed{seed}")
    training, validation, testing = load()
    print(
        f"{len(training[0])} training, {len(validation[0])} validation "
        f"and {len(testing[0])} test images"
    )

    optimizer = make_optimizer()
    state = jstep.TrainState.create(init_params(jax.random.key(seed)), optimizer)
    train_step = jstep.minimize(
        loss_fn, optimizer, has_aux=True, rng=jax.random.key(seed + 1), metrics=("grad_norm",)
    )
    batches = jstep.batches(training, batch_size=64, seed=seed)
    print(state)

    if newest := jstep.latest_checkpoint(directory, "model"):
        print(
            f"found {newest}: resuming from it; "
            f"to start from scratch, delete {directory} or pass another --dir"
        )
    else:
        print(
            f"checkpoints and event files are written to {directory}; "
            "press Ctrl-C to stop, run again to resume"
        )
        with jstep.summary.SummaryWriter(directory) as writer:
            writer.add_graph(train_step, state, *batches[0])

    state = jstep.train(
        train_step,
        state,
        batches,
        last_step=steps,
        checkpoint_dir=directory,
        logdir=directory,
        hooks=[
            jstep.NanLossHook(),
            jstep.SummarySaverHook(save_steps=20, histograms="params/*"),
            jstep.EvaluationHook(
                jstep.evaluator(metrics, one_pass(validation), use_averages=True),
                every_n_steps=50,
                prefix="validation",
                callbacks=[
                    jstep.KeepBest(directory, "loss", prefix="best"),
                    jstep.EarlyStopping("loss", patience=6),
                ],
            ),
        ],
    )

    with jstep.Saver(directory, prefix="best") as saver:
        best_step = saver.best_step()
        best = saver.restore(state, step=best_step)
        print(f"of {jstep.global_step(state)} updates, the validation loss was best after", end=" ")
        print(f"{best_step}: {saver.extra(best_step)['loss']:.4f}")
    with jstep.summary.SummaryWriter(directory) as writer:
        write_hardest(writer, best, *testing)
    raw = jstep.evaluator(metrics, one_pass(testing))(best)["accuracy"]
    averaged = jstep.evaluator(metrics, one_pass(testing), use_averages=True)(best)["accuracy"]
    # Fingerprints are equal if two runs are bitwise identical.
    fingerprint = "{:08x}{:08x}".format(*jstep.fingerprint(best.params))
    print(
        f"test accuracy of the best weights, after {jstep.global_step(best)} updates: "
        f"{raw:.4f} raw, {averaged:.4f} "
        f"averaged weights (fingerprint of the weights: {fingerprint})"
    )
    print(f"a page with its curves: jstep report {directory}")
    return raw, averaged


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="the global step to train up to (default 1500)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, dropout and batches (default 0)"
    )
    parser.add_argument(
        "--dir", dest="directory", help="directory of the run (default runs/digits/seedSEED)"
    )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:  # train has saved and logged it
        sys.exit(130)
