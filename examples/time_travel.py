"""Time travel: find the step, the image, the operation and the line that made a run fail.

    python examples/time_travel.py  # at most a minute; writes to runs/time_travel

A run is a function of the global step, so any step can be replayed bitwise, and two runs can be
compared step by step. Two examples with the handwritten digits that come with scikit-learn:

1. A blank image in the training data. The network scales each image to length 1, and a blank image
   has length 0.
2. Two runs that should be identical but are not: one of them uses another seed for its noise.
"""

import argparse
import contextlib
import io
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import jstep
from jstep.look.cli import main as jstep_command

POISONED = 137
NOISE_FROM = 60


def load():
    """Images (1792, 64) in [0, 1] and their labels: fourteen batches of 128."""
    images, labels = load_digits(return_X_y=True)
    return (images[:1792] / 16.0).astype(np.float32), labels[:1792].astype(np.int32)


def init_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        name: {
            "kernel": jax.random.normal(key, shape) / np.float32(8.0),
            "bias": jnp.zeros(shape[1]),
        }
        for name, key, shape in zip(("hidden", "out"), keys, ((64, 64), (64, 10)), strict=True)
    }


def scale(images):
    """Scale each image to length 1. For a blank image this divides by zero and gives NaN."""
    length = jnp.sqrt(jnp.sum(images**2, axis=-1, keepdims=True))
    return images / length


def network(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def loss_fn(params, images, labels):
    logits = network(params, scale(images))
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def noisy_loss(params, images, labels, noise):
    return loss_fn(params, images + 0.05 * noise + 1e-3, labels)


OPTIMIZER = jstep.adam(jstep.cosine_decay(3e-3, 300))


def make_state():
    return jstep.TrainState.create(init_params(), OPTIMIZER)


def the_first_story(directory):
    say("1. A blank image")
    images, labels = load()
    clean = jstep.batches((images, labels), 128, seed=0)

    def batches(step):
        """Batches of the run, one of which contains a blank image."""
        images, labels = clean[step]
        if step == POISONED:
            images = images.copy()
            images[5] = 0.0
        return images, labels

    train_step = jstep.minimize(loss_fn, OPTIMIZER)
    print("Training for 300 steps, with a checkpoint every 50 steps and a NanLossHook …")
    try:
        jstep.train(
            train_step, make_state(), batches, 300, hooks=[jstep.NanLossHook()],
            checkpoint_dir=directory, save_checkpoint_steps=50, progress=False,
        )  # fmt: skip
    except jstep.NanLossDuringTrainingError as error:
        bad = error.step
        print(f"… stopped: {str(error).split('.')[0]}.")
    newest = pathlib.Path(jstep.latest_checkpoint(directory)).name
    print(
        f"\nThe newest checkpoint is {newest}. "
        f"Return to the state before the update {bad - 1} → {bad}:"
    )
    state, args = jstep.replay(train_step, make_state(), batches, directory, bad - 1)
    print(f"    replayed to step {state.global_step}, its fingerprint is {text(state)}")
    print(
        "    all numbers in that state are finite:",
        all(jnp.isfinite(x).all() for x in jax.tree.leaves(state)),
    )

    print("\nWhich operation of that step produces the first NaN?\n")
    found = jstep.find_nonfinite(train_step, state, *args)
    print(indented(str(found)))
    blank = [int(row) for row in np.flatnonzero(~np.any(args[0], axis=-1))]
    print(
        "\nIt divides by a length of 0. The batch of that step "
        f"has blank images in its rows {blank}."
    )

    def mended(params, images, labels):
        keep = jnp.sum(images**2, axis=-1) > 0
        return loss_fn(params, jnp.where(keep[:, None], images, 1.0), labels)

    print(
        "\nWith a loss that replaces blank images by uniform ones, "
        "the run resumes from its checkpoint:"
    )
    step = jstep.minimize(mended, OPTIMIZER)
    print(
        "    find_nonfinite of that step with that batch:", jstep.find_nonfinite(step, state, *args)
    )
    state = jstep.train(step, make_state(), batches, 300, checkpoint_dir=directory, progress=False)
    right = np.mean(np.asarray(network(state.params, scale(images)).argmax(-1)) == labels)
    print(f"    step {state.global_step}: {right:.1%} of all images are classified correctly")


def the_second_story(directory):
    say("2. Two runs that should be identical")
    images, labels = load()
    clean = jstep.batches((images, labels), 128, seed=0)

    def batches_with(seed):
        def batches(step):
            images, labels = clean[step]
            noise = np.random.default_rng((seed, step)).standard_normal(images.shape, np.float32)
            return images, labels, noise if step >= NOISE_FROM else np.zeros_like(noise)

        return batches

    train_step = jstep.minimize(noisy_loss, OPTIMIZER)
    runs = {"a": batches_with(seed=1), "b": batches_with(seed=2)}
    for name, batches in runs.items():
        where = directory / name
        jstep.train(
            train_step, make_state(), batches, 120, hooks=[jstep.FingerprintHook(every_n_steps=8)],
            checkpoint_dir=where, save_checkpoint_steps=40, logdir=where, progress=False,
        )  # fmt: skip
    print(
        f"Two runs of 120 steps add noise to the images from step {NOISE_FROM} on, with "
        "different seeds. Each logs a"
    )
    print(
        "fingerprint of every leaf every 8 steps, and saves a checkpoint every 40. "
        "Where do they diverge?"
    )
    command("diff", directory / "a" / "fingerprints.jsonl", directory / "b" / "fingerprints.jsonl")
    print("The checkpoints show by how much:")
    command("diff", directory / "a", directory / "b")
    print("To find the exact step, replay both runs to the steps in between:")
    for step in range(56, 65):
        a, b = (
            text(jstep.replay(train_step, make_state(), batches, directory / name, step).state)
            for name, batches in runs.items()
        )
        print(f"    step {step}: {a} {'=' if a == b else '≠'} {b}")
        if a != b:
            print(
                f"\nThe update {step - 1} → {step} is the first that differs: "
                f"the one that takes batch {step - 1}."
            )
            return


def command(*arguments):
    """Run `jstep …` and show its output."""
    words = [str(word) for word in arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        jstep_command(words)
    print(f"\n    $ jstep {' '.join(words)}\n{indented(out.getvalue())}\n")


def text(tree):
    a, b = jstep.fingerprint(tree)
    return f"{a:08x}{b:08x}"


def indented(lines):
    return "\n".join(f"    {line}" for line in lines.rstrip().splitlines())


def say(title):
    print(f"\n{title}\n{'─' * len(title)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("runs/time_travel"))
    where = parser.parse_args().directory
    shutil.rmtree(where, ignore_errors=True)  # both examples begin at step 0
    the_first_story(where / "blank")
    the_second_story(where / "seeds")
