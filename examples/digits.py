"""Handwritten digits: a small convolutional network, trained to more than 98 % in less than a minute.

    python examples/digits.py

The images are the UCI handwritten digits that come with scikit-learn (1797 of 8×8 pixels, no download).
The network is plain JAX; everything about training comes from jstep and reads the one global step: the
staircase of the learning rate, Adam's bias correction, the moving average of the weights, and the batch.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jstep


def load():
    """Training and test images, (n, 8, 8, 1) in [0, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return train_test_split(images, labels.astype(np.int32), test_size=0.25, random_state=0, stratify=labels)


def init_params(key):
    """Two convolutions and two dense layers, He-initialized."""
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "dense1": (4 * 4 * 64, 128), "dense2": (128, 10)}
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
    return jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dims) + layer["bias"]


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def predict(params, images, dropout_key=None):
    """Logits of a batch of images; with a key, a quarter of the hidden units is left out."""
    x = jax.nn.relu(convolve(params["conv1"], images))
    x = jax.nn.relu(convolve(params["conv2"], x))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(dense(params["dense1"], x.reshape(len(x), -1)))
    if dropout_key is not None:
        x = jnp.where(jax.random.bernoulli(dropout_key, 0.75, x.shape), x / 0.75, 0.0)
    return dense(params["dense2"], x)


def loss_fn(params, images, labels, rng):
    logits = predict(params, images, dropout_key=rng)
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))
    return loss, {"accuracy": jnp.mean(logits.argmax(-1) == labels)}


@jax.jit
def accuracy(params, images, labels):
    return jnp.mean(predict(params, images).argmax(-1) == labels)


def make_optimizer():
    return jstep.with_moving_average(
        jstep.chain(
            jstep.clip_gradients(by_global_norm=1.0),
            jstep.adam(jstep.exponential_decay(2e-3, decay_steps=200, decay_rate=0.7, staircase=True)),
        ),
        jstep.ExponentialMovingAverage(0.99, num_updates=True),
    )


def batch_at(step, images, labels, batch_size=64, seed=0):
    """Batch number `step`: a function of the step alone, so that its position needs no saving."""
    per_epoch = len(images) // batch_size
    epoch, i = divmod(step, per_epoch)
    rows = np.random.default_rng((seed, epoch)).permutation(len(images))[i * batch_size : (i + 1) * batch_size]
    return images[rows], labels[rows]


def main(steps=1500, seed=0):
    train_images, test_images, train_labels, test_labels = load()
    print(f"{len(train_images)} images to train on, {len(test_images)} to test on")

    optimizer = make_optimizer()
    state = jstep.TrainState.create(init_params(jax.random.key(seed)), optimizer)
    print(state)

    train_step = jstep.minimize(loss_fn, optimizer, has_aux=True, rng=jax.random.key(seed + 1), metrics=("grad_norm",))
    for step in range(steps):
        state, metrics = train_step(state, *batch_at(step, train_images, train_labels))
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1:5d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.3f}  "
                f"learning rate {metrics['learning_rate']:.2e}  gradient norm {metrics['grad_norm']:.3f}"
            )

    raw = accuracy(state.params, test_images, test_labels)
    averaged = accuracy(jstep.averaged_params(state), test_images, test_labels)
    print(f"test accuracy after {jstep.global_step(state)} updates: {raw:.4f} raw, {averaged:.4f} averaged weights")
    return float(raw), float(averaged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="how many updates (default 1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the dropout (default 0)")
    main(**vars(parser.parse_args()))
