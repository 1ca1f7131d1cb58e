"""What torch, transformers and Keras compute on the pages "From …", stored, so that the quick tests
need none of them.

    python tests/docs/peer_numbers.py  # with all three and accelerate: writes peer_numbers.json
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
LOSSES = [1.0] * 7
PAGES = {
    "pytorch": ("torch",),
    "hf-trainer": ("torch", "transformers", "accelerate"),
    "keras": ("keras",),
}
"""The pages that compare two programs, and what the other one needs."""
NEEDS = {
    "patience of Keras": PAGES["keras"],
    "short batch of the Trainer": PAGES["hf-trainer"],
    **PAGES,
}
"""What each case needs."""


def _patience_of_keras():
    """The learning rates that ReduceLROnPlateau makes of `LOSSES`, and whether EarlyStopping has
    stopped."""
    os.environ["KERAS_BACKEND"] = "jax"
    # Keras creates keys of two uint32 and promotes dtypes.
    with (
        warnings.catch_warnings(),
        jax.legacy_prng_key("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        import keras

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
        stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
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
    """The weights after one update, of rate 1, from microbatches of 16 and 10 rows; they begin as
    zeros."""
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
        rows = [
            {"x": torch.tensor(x), "labels": int(y)} for x, y in zip(*short_epoch(), strict=True)
        ]
        constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda n: 1.0)
        transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(sgd, constant)
        ).train()
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
    "patience of Keras": _patience_of_keras,
    "short batch of the Trainer": _short_batch_of_the_trainer,
    **{name: _of_page(name) for name in PAGES},
}


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
