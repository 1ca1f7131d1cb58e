"""The tasks of `bench_whole_runs.py`: their data and settings, which all toolkits share."""

import dataclasses
import json
import sysconfig
from pathlib import Path

import numpy as np

CHARACTERS, CONTEXT = 128, 64


@dataclasses.dataclass(frozen=True)
class Task:
    """The settings of a task, and its examples: pairs of inputs and labels.

    Attributes:
        name: Name of the network.
        steps: The step at which a run ends.
        every: Interval between checkpoints, and between evaluations, in steps.
        log_every: Interval between TensorBoard's points, in steps.
        batch_size: Number of training examples in a step.
        eval_size: Number of examples in a batch of an evaluation; it divides the numbers of examples.
        rate: Adam's first learning rate; it is multiplied by 0.7 every `decay_steps` steps.
        decay_steps: See `rate`.
        patience: Number of evaluations without improvement after which a run stops: more than there are, so that no
            toolkit stops early by chance.
    """

    name: str
    steps: int
    every: int
    log_every: int
    batch_size: int
    eval_size: int
    rate: float
    decay_steps: int
    patience: int = 1000
    train: tuple = ()
    valid: tuple = ()
    test: tuple = ()

    @property
    def killed(self):
        """The step at which a run is killed: 70 %, halfway between two checkpoints."""
        return self.steps * 7 // 10 // self.every * self.every + self.every // 2


TASKS = {
    task.name: task
    for task in (
        Task("digits", 1000, 50, 20, 64, 50, 2e-3, 200),
        Task("transformer", 100, 50, 20, 32, 64, 3e-3, 50),
        Task("mlp", 2000, 200, 100, 32, 50, 2e-3, 500),
    )
}


def write(name, path, share=1.0):
    """Write a task to a file, of which programs make it with `read`: no run pays for reading images or sources.

    Args:
        name: A key of `TASKS`.
        path: The file, .npz.
        share: Which part of the steps to run.
    """
    task = TASKS[name]
    task = dataclasses.replace(task, steps=max(2, round(task.steps * share / task.every)) * task.every)
    sets = _characters() if name == "transformer" else _digits(is_flat=name == "mlp")
    arrays = {
        f"{part}_{kind}": array
        for part, pair in zip(("train", "valid", "test"), sets, strict=True)
        for kind, array in zip(("x", "y"), pair, strict=True)
    }
    settings = {key: value for key, value in vars(task).items() if not isinstance(value, tuple)}
    np.savez(path, settings=json.dumps(settings), **arrays)
    return task


def read(path):
    """Return the task in a file."""
    with np.load(path) as saved:
        sets = {part: (saved[f"{part}_x"], saved[f"{part}_y"]) for part in ("train", "valid", "test")}
        return Task(**json.loads(str(saved["settings"])), **sets)


def _digits(is_flat):
    """Images (n, 8, 8, 1), or (n, 64), in [0, 1], and labels, as in `examples/digits.py`."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16.0).astype(np.float32), labels.astype(np.int32)
    images = images if is_flat else images.reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=450, random_state=0, stratify=labels
    )
    images, valid_images, labels, valid_labels = train_test_split(
        images, labels, test_size=200, random_state=0, stratify=labels
    )
    return (images, labels), (valid_images, valid_labels), (test_images, test_labels)


def _characters():
    """Windows (n, CONTEXT) of the sources of Python's standard library, and the same, one character later."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in files])
    text = text[text < CHARACTERS].astype(np.int32)  # ASCII
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    windows = windows[np.random.default_rng(0).permutation(len(windows))]
    x, y = windows[:, :-1], windows[:, 1:]
    ends = (slice(768, 8960), slice(256), slice(256, 768))
    return [(x[part], y[part]) for part in ends]
