"""Warnings of blocks that nothing finishes."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizer_table import TABLE

import jstep

KEY = jax.random.key(2)
UNFINISHED = "nothing multiplies its updates"
Make = Callable[[], jstep.Optimizer]

sgd, rate = jstep.sgd, jstep.scale_by_learning_rate
adam, chain, skip = jstep.scale_by_adam, jstep.chain, jstep.skip_nonfinite


def clip() -> jstep.Optimizer:
    return jstep.clip_gradients(by_global_norm=1.0)


def custom(inner: jstep.Optimizer) -> jstep.Optimizer:
    """A custom optimizer around another one, of which nothing is known."""
    return jstep.Optimizer(lambda p, step=0: inner.init(p, step), inner.update, lambda step: {})


def labelled(*optimizers: jstep.Optimizer) -> jstep.Optimizer:
    return jstep.partition({"ab"[i]: one for i, one in enumerate(optimizers)}, lambda path, leaf: "a")


CASES: dict[str, tuple[Make, list[str]]] = {
    "usual": (lambda: chain(clip(), sgd(0.1)), []),
    "usual_blocks": (lambda: chain(clip(), adam(), jstep.add_weight_decay(0.1), rate(0.1)), []),
    "scaled_gradients": (lambda: chain(jstep.scale(1 / 128), clip(), sgd(0.1)), []),
    "scaled_twice": (lambda: chain(jstep.scope("s", jstep.scale(-1.0)), clip(), adam(), jstep.scale(-0.1)), []),
    "unknown_then_clip": (lambda: chain(jstep.from_optax(optax.sgd(0.1)), clip()), []),
    "blocks": (lambda: chain(clip(), adam()), [UNFINISHED]),
    "block": (adam, [UNFINISHED]),
    "label_with_blocks": (lambda: labelled(sgd(0.1), chain(clip(), adam())), [UNFINISHED]),
    "clip_around_a_label_with_a_block": (lambda: chain(clip(), labelled(sgd(0.1), adam())), [UNFINISHED]),
    "late_clip_and_a_block": (lambda: labelled(chain(sgd(0.1), clip()), adam()), [UNFINISHED]),
    "finished_by_the_outer_chain": (lambda: chain(chain(clip(), adam()), rate(0.1)), []),
    "finished_by_a_hyperball": (lambda: chain(adam(), jstep.on_hyperball(0.1)), []),
    "guard_finished_outside": (lambda: chain(skip(adam()), rate(0.1)), []),
    "finished_below_labels": (lambda: chain(adam(), labelled(rate(0.1), sgd(0.1))), []),
    "beside_custom": (lambda: chain(adam(), custom(jstep.scope("s", adam()))), []),
    "beside_from_optax": (lambda: chain(clip(), jstep.from_optax(optax.sgd(0.1))), []),
    "custom": (lambda: custom(chain(clip(), adam())), []),
    "leafwise": (lambda: chain(clip(), jstep.leafwise(lambda g, p, s, h: (-g, s), hyper={})), []),
}

BLOCKS: dict[str, Make] = {
    "centralize_gradients": jstep.centralize_gradients,
    "orthogonalize": jstep.orthogonalize,
    "normalize_neurons": jstep.normalize_neurons,
    "scale_by_trust_ratio": jstep.scale_by_trust_ratio,
    "add_weight_decay": lambda: jstep.add_weight_decay(0.1),
}


def warnings_of(caplog: pytest.LogCaptureFixture, make: Make) -> list[str]:
    optimizer = make()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.minimize(lambda params: jnp.sum(params["w"] ** 2), optimizer)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", CASES)
def test_minimize_warns_once(caplog: pytest.LogCaptureFixture, name: str) -> None:
    make, expected = CASES[name]
    found = warnings_of(caplog, make)
    assert [UNFINISHED for text in found if UNFINISHED in text] == expected
    assert len(found) == len(expected)
    assert all("jstep.chain(jstep.clip_gradients(…), jstep.adamw(rate))" in text for text in found)


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_needs_a_learning_rate(caplog: pytest.LogCaptureFixture, name: str) -> None:
    (text,) = warnings_of(caplog, lambda: chain(clip(), BLOCKS[name]()))
    assert UNFINISHED in text
    assert warnings_of(caplog, lambda: chain(clip(), BLOCKS[name](), rate(0.1))) == []


@pytest.mark.parametrize("name", TABLE)
def test_the_optimizers_of_the_table_are_in_order(caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert warnings_of(caplog, lambda: TABLE[name].make(0.1)) == []
