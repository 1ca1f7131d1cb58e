"""A run whose sequence length, batch size, data mixture and learning rate change with the step.

    python examples/score.py                              # less than a minute on two CPU cores
    python examples/score.py --checkpoint-dir runs/score  # kill it at any time: it resumes

The small transformer of char_lm.py is trained on characters of Python's standard library and of its
language reference, in four phases of equal length:

    phase   length   batch   mixture            learning rate
    1       16       8       mostly code        warm-up, plateau
    2       64       8       mostly code        plateau
    3       64       16      mostly code        plateau
    4       64       16      mostly prose       decay to zero

Each of these is a function of the global step, so checkpoints need not store them: a run that is
killed in any phase (try --kill-at) and started again ends with the same fingerprint as an
uninterrupted one. The train step and the batch shape of the next phase are compiled while the
current one runs.
"""

import argparse
import os
import pydoc_data.topics
import signal
import sys
import time

import jax
import numpy as np
from char_lm import CHARACTERS, CONTEXT, init_params, load, loss_fn

import jstep

SHORT = 16


def load_prose():
    """Training and held-out windows of CONTEXT + 1 characters of Python's language reference."""
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    text = text[text < CHARACTERS]  # ASCII
    cut = len(text) * 19 // 20
    return [
        np.lib.stride_tricks.sliding_window_view(part, CONTEXT + 1)
        for part in (text[:cut], text[cut:])
    ]


def short(params, windows):
    """Loss on the first SHORT characters of each row."""
    return loss_fn(params, windows[:, : SHORT + 1])


def long(params, windows):
    return loss_fn(params, windows)


def make_score(steps, code, prose, seed):
    """Train steps, batches and optimizer, which all change with the global step."""
    phase = steps // 4
    rate = jstep.warmup_stable_decay(5e-3, phase // 2, 3 * phase - phase // 2, steps - 3 * phase)
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(rate))
    train_step = {0: jstep.minimize(short, optimizer), phase: jstep.minimize(long, optimizer)}
    batches = jstep.mixture(
        {"code": code, "prose": prose},
        batch_size={0: 8, 2 * phase: 16},
        weights={0: {"code": 0.8, "prose": 0.2}, 3 * phase: {"code": 0.3, "prose": 0.7}},
        seed=seed,
    )
    return train_step, batches, optimizer


def killer(step_to_die_at, every, directory):
    """A hook that kills this process after a step.

    It waits until the preceding checkpoint is written (in the background).
    """

    def kill(step, state, metrics):
        if step == step_to_die_at:
            due = step // every * every
            name = f"model-{due}"
            while due and os.path.basename(jstep.latest_checkpoint(directory) or "") != name:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    return jstep.every(1, kill)


def main(steps=400, seed=0, checkpoint_dir=None, kill_at=None):
    if steps < 8:
        sys.exit(f"--steps {steps}: expected 8 or more, two per phase")
    if kill_at is not None and checkpoint_dir is None:
        sys.exit("--kill-at needs --checkpoint-dir, to resume from")
    (code, held_out_code), (prose, held_out_prose) = load(), load_prose()
    train_step, batches, optimizer = make_score(steps, code, prose, seed)

    every = max(2, steps // 16)
    hooks = [] if kill_at is None else [killer(kill_at, every, checkpoint_dir)]
    print(jstep.plan(optimizer, steps, train_step=train_step, batches=batches))

    state = jstep.TrainState.create(jax.jit(init_params)(jax.random.key(seed)), optimizer)
    state = jstep.train(
        train_step,
        state,
        batches,
        last_step=steps,
        hooks=hooks,
        checkpoint_dir=checkpoint_dir,
        save_checkpoint_steps=every,
        log_steps=max(1, steps // 8),
    )

    evaluate = jax.jit(loss_fn)
    for name, windows in (("code", held_out_code), ("prose", held_out_prose)):
        loss = float(evaluate(state.params, jstep.batches(windows, batch_size=256)[0]))
        print(f"held-out {name}: {loss:.4f} nats a character")
    # Two runs with the same fingerprint ended in bitwise the same state.
    fingerprint = "{:08x}{:08x}".format(*jax.jit(jstep.fingerprint)(state))
    print(f"fingerprint of the state after {steps} steps: {fingerprint}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of the run, a quarter per phase (default 400)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and batches (default 0)"
    )
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="save checkpoints here, and resume from them"
    )
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="kill the process (SIGKILL) after this step"
    )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:  # train has logged where it stopped, and saved if it has a directory
        sys.exit(130)
