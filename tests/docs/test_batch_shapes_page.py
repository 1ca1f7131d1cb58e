"""The page "Batches of several shapes": its epochs, its padding, what is compiled, and runs that are cut."""

import logging

import jax
import numpy as np
import pytest
from pages import DOCS

import jstep

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("standard")]  # the page runs for seconds
PAGE = DOCS / "recipes" / "batch-shapes.md"


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_each_text_at_most_once(page, epoch):
    """All but those that do not fill a batch of their bucket; equal texts are counted."""
    count = len(page["parts"])
    seen = [tuple(row[row >= 0]) for i in range(count) for row in page["batches"](epoch * count + i)]
    texts = [tuple(text) for text in page["texts"]]
    assert len(seen) > len(texts) - sum(page["ROWS"].values())
    for text in seen:
        texts.remove(text)
    assert {page["batches"](i).shape for i in range(count)} == {(rows, n) for n, rows in page["ROWS"].items()}


def test_padding_changes_neither_loss_nor_gradients(page):
    texts = [text for text in page["texts"] if 3 < len(text) <= 8][:16]
    gradients = jax.value_and_grad(page["loss_fn"])
    short, long = (gradients(page["make_params"](), page["padded"](texts, n)) for n in (8, 32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), short, long)
    # The mean over tokens of single texts, without padding.
    total, tokens = 0.0, 0
    for text in texts:
        total += float(page["loss_fn"](page["make_params"](), np.int32(text)[None])) * (len(text) - 2)
        tokens += len(text) - 2
    assert float(short[0]) == pytest.approx(total / tokens, rel=1e-5)


def run(page, last_step, steps_per_call=1, directory=None):
    return jstep.train(
        page["train_step"],
        page["make_state"](),
        page["batches"],
        last_step,
        steps_per_call=steps_per_call,
        checkpoint_dir=directory,
    )


def test_each_shape_is_compiled_once(page, caplog):
    train_step = jstep.minimize(page["loss_fn"], page["optimizer"])
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.train(train_step, page["make_state"](), page["batches"], 200)
    assert sum("compiled train_step again" in record.message for record in caplog.records) == 2


def test_runs_that_are_cut_and_calls_of_several_steps_have_the_same_bits(page, tmp_path):
    whole = jstep.fingerprint(run(page, 40))
    for stop in (7, 23):
        run(page, stop, directory=tmp_path)
    np.testing.assert_array_equal(jstep.fingerprint(run(page, 40, directory=tmp_path)), whole)
    fingerprints = [jstep.fingerprint(run(page, 40, steps_per_call=k)) for k in (4, 8)]
    np.testing.assert_array_equal(*fingerprints)
