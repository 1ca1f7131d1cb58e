"""The tasks of `bench_whole_runs.py`: their data, initial weights and settings, which all toolkits
share."""

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
        eval_size: Number of examples in a batch of an evaluation; it divides the numbers of
            examples.
        rate: AdamW's first learning rate; it is multiplied by 0.7 every `decay_steps` steps.
        decay_steps: See `rate`.
        patience: Number of evaluations without improvement after which a run stops: more than there
            are, so that no toolkit stops early by chance.
        order: The rows of the training set in each step, (steps, batch_size): those of
            `jstep.batches`.
        weights: Path of a parameter of `networks_jax.py` → its initial value.
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
    order: np.ndarray | None = None
    weights: dict = dataclasses.field(default_factory=dict)

    @property
    def killed(self):
        """The step at which a run is killed: 70 %, halfway between two checkpoints."""
        return self.steps * 7 // 10 // self.every * self.every + self.every // 2


# All activations are SiLU. With ReLU, losses of the same network would differ by 5e-4 after 120
# steps, because which side of a kink an activation is on depends on rounding; with SiLU they differ
# by less than 1e-6 after 320.
TASKS = {
    task.name: task
    for task in (
        Task("digits", 400, 40, 20, 64, 50, 5e-4, 100),
        Task("transformer", 80, 20, 10, 32, 64, 5e-4, 40),
        Task("mlp", 2000, 200, 100, 32, 50, 1e-3, 500),
    )
}


def write(name, path, share=1.0):
    """Write a task to a file, of which programs make it with `read`: no run pays for reading images
    or sources.

    Args:
        name: A key of `TASKS`.
        path: The file, .npz.
        share: Which part of the steps to run.
    """
    import jstep

    task = TASKS[name]
    task = dataclasses.replace(
        task, steps=max(2, round(task.steps * share / task.every)) * task.every
    )
    sets = _characters() if name == "transformer" else _digits(is_flat=name == "mlp")
    arrays = {
        f"{part}_{kind}": array
        for part, pair in zip(("train", "valid", "test"), sets, strict=True)
        for kind, array in zip(("x", "y"), pair, strict=True)
    }
    rows = jstep.batches(np.arange(len(sets[0][0]), dtype=np.int32), task.batch_size, seed=0)
    arrays["order"] = np.stack([np.asarray(rows[step]) for step in range(task.steps)])
    arrays |= {f"weights/{path}": array for path, array in _weights(name).items()}
    settings = {
        key: value for key, value in vars(task).items() if isinstance(value, str | int | float)
    }
    np.savez(path, settings=json.dumps(settings), **arrays)
    return task


def read(path):
    """Return the task in a file."""
    with np.load(path) as saved:
        sets = {
            part: (saved[f"{part}_x"], saved[f"{part}_y"]) for part in ("train", "valid", "test")
        }
        weights = {
            name.partition("/")[2]: saved[name]
            for name in saved.files
            if name.startswith("weights/")
        }
        return Task(
            **json.loads(str(saved["settings"])), **sets, order=saved["order"], weights=weights
        )


def _weights(name):
    """The initial weights of a network: He's normal kernels, zero biases."""
    if name == "digits":
        layers = {
            "conv1": (3, 3, 1, 32),
            "conv2": (3, 3, 32, 64),
            "dense1": (1024, 128),
            "dense2": (128, 10),
        }
    elif name == "mlp":
        layers = {"dense1": (64, 64), "dense2": (64, 10)}
    else:
        layers = {"embed": (128, 128), "position": (64, 128), "norm": (128,), "head": (128, 128)}
        block = {"qkv": (128, 384), "out": (128, 128), "up": (128, 512), "down": (512, 128)}
        block |= {"norm1": (128,), "norm2": (128,)}
        layers |= {f"block{i}/{part}": shape for i in (1, 2) for part, shape in block.items()}
    rng, found = np.random.default_rng(0), {}
    for path, shape in layers.items():
        if path in ("embed", "position"):
            found[path] = rng.normal(scale=0.1, size=shape)
        elif len(shape) == 1:
            found |= {f"{path}/scale": np.ones(shape), f"{path}/bias": np.zeros(shape)}
        else:
            kernel = rng.normal(scale=np.sqrt(2 / np.prod(shape[:-1])), size=shape)
            found |= {f"{path}/kernel": kernel, f"{path}/bias": np.zeros(shape[-1])}
    return {path: array.astype(np.float32) for path, array in found.items()}


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
    """Windows (n, CONTEXT) of the sources of Python's standard library, and the same, one character
    later."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in files])
    text = text[text < CHARACTERS].astype(np.int32)  # ASCII
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    windows = windows[np.random.default_rng(0).permutation(len(windows))]
    x, y = windows[:, :-1], windows[:, 1:]
    ends = (slice(768, 8960), slice(256), slice(256, 768))
    return [(x[part], y[part]) for part in ends]
