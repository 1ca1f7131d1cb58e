"""What torch, transformers and Keras compute on the pages "From …", stored, so that the quick tests need none of them.

python tests/docs/peer_numbers.py      # with all three and accelerate installed: writes peer_numbers.json
"""

import contextlib
import json
import os
import pathlib
import tempfile
import warnings

import jax
import numpy as np
from pages import DOCS, run_page

PATH = pathlib.Path(__file__).with_suffix(".json")
START = (1.0, -2.0, 0.5)
LOSSES = [1.0] * 7
PAGES = {"pytorch": ("torch",), "hf-trainer": ("torch", "transformers", "accelerate"), "keras": ("keras",)}
"""The pages that compare two programs, and what the other one needs."""


@contextlib.contextmanager
def keras():
    """Keras, on JAX: it creates keys of two uint32 and promotes dtypes."""
    os.environ["KERAS_BACKEND"] = "jax"
    with warnings.catch_warnings(), jax.legacy_prng_key("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        import keras

        yield keras


def _adam(name):
    """20 steps of an optimizer of torch with weight decay."""

    def run():
        import torch

        weight = torch.nn.Parameter(torch.tensor(START))
        optimizer = getattr(torch.optim, name)([weight], lr=1e-2, weight_decay=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            torch.sin(weight).sum().backward()
            optimizer.step()
        return weight.detach().numpy()

    return run


def _rates(make, count):
    """The learning rates of the first updates under a scheduler of torch."""

    def run():
        import torch

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        scheduler, rates = make(optimizer), []
        for _ in range(count):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    return run


def _of_torch(name, **arguments):
    def make(optimizer):
        import torch

        return getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)

    return _rates(make, 12)


def _of_transformers(name):
    def make(optimizer):
        import transformers

        return transformers.get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=20)

    return _rates(make, 20)


def _warmup_of_keras():
    with keras() as library:
        schedule = library.optimizers.schedules.CosineDecay(0.0, 17, warmup_target=1e-2, warmup_steps=3)
        return [float(schedule(step)) for step in range(20)]


def _patience_of_keras():
    """The learning rates that ReduceLROnPlateau makes of `LOSSES`, and whether EarlyStopping has stopped."""
    with keras() as library:
        model = library.Sequential([library.Input((1,)), library.layers.Dense(1)])
        model.compile(optimizer=library.optimizers.SGD(1.0), loss="mse")
        plateau = library.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
        stop = library.callbacks.EarlyStopping("val_loss", patience=3)
        for callback in (plateau, stop):
            callback.set_model(model)
            callback.on_train_begin()
        rates, stopped = [], []
        for epoch, loss in enumerate(LOSSES):
            for callback in (plateau, stop):
                callback.on_epoch_end(epoch, {"val_loss": loss})
            rates.append(float(model.optimizer.learning_rate))
            stopped.append(float(model.stop_training))
        return [*rates, *stopped]


def short_epoch():
    """26 rows of three numbers, and their classes."""
    x = np.random.default_rng(0).normal(size=(26, 3))
    return x, np.argmax(x, axis=1)


def _short_batch_of_the_trainer():
    """The weights after one update, of rate 1, from microbatches of 16 and 10 rows; they begin as zeros."""
    import torch
    import transformers

    class Classifier(torch.nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Classifier(3, 3, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        )
        rows = [{"x": torch.tensor(x), "labels": int(y)} for x, y in zip(*short_epoch(), strict=True)]
        constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda n: 1.0)
        transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(sgd, constant)).train()
    return model.weight.detach().numpy().T


def _of_page(name):
    """What the block that compares both programs expects, in its order."""

    def run():
        expected = []
        compare = np.testing.assert_allclose

        def recording(actual, desired, **tolerance):
            compare(actual, desired, **tolerance)
            expected.extend(np.ravel(desired).tolist())

        np.testing.assert_allclose = recording
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                run_page(DOCS / "from" / f"{name}.md")
        finally:
            np.testing.assert_allclose = compare
        return expected

    return run


CASES = {
    "Adam": _adam("Adam"),
    "AdamW": _adam("AdamW"),
    "LinearLR": _of_torch("LinearLR", start_factor=0.1, total_iters=5),
    "CosineAnnealingLR": _of_torch("CosineAnnealingLR", T_max=12),
    "LambdaLR": _of_torch("LambdaLR", lr_lambda=lambda n: min(1.0, (n + 1) / 10)),
    **{name: _of_transformers(name) for name in ("linear", "cosine", "constant_with_warmup")},
    "warmup of Keras": _warmup_of_keras,
    "patience of Keras": _patience_of_keras,
    "short batch of the Trainer": _short_batch_of_the_trainer,
    **{name: _of_page(name) for name in PAGES},
}


def needed_by(name):
    """Return the modules that a case needs."""
    if name in PAGES:
        return PAGES[name]
    if "Keras" in name:
        return ("keras",)
    if "Trainer" in name:
        return PAGES["hf-trainer"]
    return ("torch", "transformers") if name.islower() else ("torch",)


def computed(name):
    """Compute the numbers of a case with the libraries."""
    return [float(f"{x:.9g}") for x in np.ravel(np.asarray(CASES[name](), np.float64))]


def stored(name):
    """Return the same from the file."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    return found[name]


def main():
    """Write the file, one line for each case."""
    lines = [f"{json.dumps(name)}: {json.dumps(computed(name))}" for name in CASES]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
