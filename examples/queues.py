"""The classic input pipeline: threads that read many files, a shuffle queue and a Coordinator.

    python examples/queues.py
    python examples/queues.py --fail    # a reader raises an error halfway

The corpus is Python's standard library. File names go through a FIFOQueue to four reader threads.
Each splits its file into windows of characters and puts them into a RandomShuffleQueue, from which
the training loop takes batches. The model predicts a character from the eight before it. If a
thread fails, all others stop, and `coord.join` raises the error with the traceback of that thread.
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jstep

CONTEXT, STRIDE, BATCH_SIZE, READERS = 8, 16, 128, 4


def corpus():
    """The modules of the standard library, in a fixed order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def windows(path):
    """Examples from one file: eight characters and the one that follows."""
    text = np.frombuffer(path.read_bytes(), np.uint8).clip(0, 127)
    for start in range(0, len(text) - CONTEXT, STRIDE):
        yield {"context": text[start : start + CONTEXT], "next": text[start + CONTEXT]}


def make_input(paths, fail_at=None):
    """Create both queues, add their runners to the default collection; return that of examples."""
    names = jstep.FIFOQueue(capacity=32)
    examples = jstep.RandomShuffleQueue(capacity=20_000, min_after_dequeue=10_000, seed=0)
    remaining = iter(paths)

    def enqueue_name():
        names.enqueue(next(remaining))  # StopIteration ends this op

    def read_file():
        path = names.dequeue()  # so does OutOfRangeError, when all names are read
        if fail_at is not None and path == paths[fail_at]:
            raise ValueError(f"cannot decode {path.name}")
        for example in windows(path):
            examples.enqueue(example)

    jstep.add_queue_runner(jstep.QueueRunner(names, [enqueue_name]))
    jstep.add_queue_runner(jstep.QueueRunner(examples, [read_file] * READERS))
    return examples


def init_params(key, characters=128, embedding=16, hidden=128):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (characters, embedding)),
        "hidden": jax.random.normal(keys[1], (CONTEXT * embedding, hidden))
        / np.float32(np.sqrt(CONTEXT * embedding)),
        "out": jax.random.normal(keys[2], (hidden, characters)) / np.float32(np.sqrt(hidden)),
    }


def loss_fn(params, batch):
    x = params["embed"][batch["context"]].reshape(len(batch["context"]), -1)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, batch["next"][:, None].astype(jnp.int32), axis=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--fail", action="store_true", help="let a reader raise halfway through the files"
    )
    args = parser.parse_args()

    paths = corpus()
    examples = make_input(paths, fail_at=len(paths) // 2 if args.fail else None)
    optimizer = jstep.adam(3e-3)
    train_step = jstep.minimize(loss_fn, optimizer)
    state = jstep.TrainState.create(init_params(jax.random.key(0)), optimizer)

    coord = jstep.Coordinator()
    threads = jstep.start_queue_runners(coord)
    with coord.stop_on_exception():  # OutOfRangeError, the end of the input, is a clean stop
        for step in range(1, args.steps + 1):
            state, metrics = train_step(state, examples.dequeue_many(BATCH_SIZE))
            if step % 200 == 0:
                print(f"step {step:5d}  loss {metrics['loss']:.3f} nats a character")
    coord.request_stop()
    coord.join(threads)
    print(f"done after {jstep.global_step(state)} steps; all threads have ended")


if __name__ == "__main__":
    main()
