"""Warnings of chains in an odd order: a clip of finished updates, and blocks that nothing finishes."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizer_table import TABLE

import jstep

KEY = jax.random.key(2)
LATE, UNFINISHED = "clips the finished updates", "nothing multiplies its updates"
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
    "late_clip": (lambda: chain(sgd(0.1), clip()), [LATE]),
    "late_clip_by_value": (lambda: chain(adam(), rate(0.1), jstep.clip_gradients(by_value=1.0)), [LATE]),
    "late_clip_behind_a_decay": (lambda: chain(sgd(0.1), jstep.decay_weights(0.1), clip()), [LATE]),
    "late_clip_behind_adafactor": (lambda: chain(jstep.adafactor(None), clip()), [LATE]),
    "late_clip_behind_scale": (lambda: chain(adam(), jstep.scale(-0.1), clip()), [LATE]),
    "late_clip_behind_a_guard": (lambda: chain(skip(sgd(0.1)), clip()), [LATE]),
    "late_clip_behind_a_chain": (lambda: chain(chain(adam(), rate(0.1)), clip()), [LATE]),
    "late_clip_behind_a_partition": (lambda: chain(labelled(sgd(0.1)), clip()), [LATE]),
    "late_clip_in_a_chain": (lambda: chain(sgd(0.1), chain(clip(), jstep.decay_weights(0.1))), [LATE]),
    "late_clip_in_a_scope": (lambda: chain(sgd(0.1), jstep.scope("s", clip())), [LATE]),
    "late_clip_below_a_label": (lambda: chain(sgd(0.1), labelled(clip())), [LATE]),
    "label_with_a_late_clip": (lambda: labelled(adam_of(0.1), chain(sgd(0.1), clip())), [LATE]),
    "guard_of_a_late_clip": (lambda: skip(jstep.master_weights(chain(sgd(0.1), clip()))), [LATE]),
    "late_clip_of_from_optax": (
        lambda: chain(jstep.from_optax(optax.sgd(0.1), {"learning_rate": 0.1}), clip()),
        [LATE],
    ),
    "two_late_clips": (lambda: chain(sgd(0.1), clip(), jstep.scope("s", clip())), [LATE]),
    "scaled_gradients": (lambda: chain(jstep.scale(1 / 128), clip(), sgd(0.1)), []),
    "scaled_twice": (lambda: chain(jstep.scope("s", jstep.scale(-1.0)), clip(), adam(), jstep.scale(-0.1)), []),
    "unknown_then_clip": (lambda: chain(jstep.from_optax(optax.sgd(0.1)), clip()), []),
    "blocks": (lambda: chain(clip(), adam()), [UNFINISHED]),
    "block": (adam, [UNFINISHED]),
    "clip": (clip, [UNFINISHED]),
    "decay": (lambda: jstep.decay_weights(0.1), [UNFINISHED]),
    "scaled_updates": (lambda: chain(adam(), jstep.scale_updates({"w": 0.5})), [UNFINISHED]),
    "guard_of_blocks": (lambda: skip(chain(clip(), adam())), [UNFINISHED]),
    "compact_blocks": (lambda: jstep.compact(jstep.scope("s", chain(clip(), adam()))), [UNFINISHED]),
    "label_with_blocks": (lambda: labelled(sgd(0.1), chain(clip(), adam())), [UNFINISHED]),
    "clip_around_a_label_with_a_block": (lambda: chain(clip(), labelled(sgd(0.1), adam())), [UNFINISHED]),
    "late_clip_and_a_block": (lambda: labelled(chain(sgd(0.1), clip()), adam()), [LATE, UNFINISHED]),
    "finished_by_the_outer_chain": (lambda: chain(chain(clip(), adam()), rate(0.1)), []),
    "finished_by_scale": (lambda: chain(adam(), jstep.scale(-0.1)), []),
    "finished_by_a_hyperball": (lambda: chain(adam(), jstep.on_hyperball(0.1)), []),
    "finished_in_a_chain": (lambda: chain(adam(), chain(clip(), rate(0.1))), []),
    "guard_finished_outside": (lambda: chain(skip(adam()), rate(0.1)), []),
    "partition_finished_outside": (lambda: chain(labelled(adam(), jstep.scale_by_lion()), rate(0.1)), []),
    "finished_below_labels": (lambda: chain(adam(), labelled(rate(0.1), sgd(0.1))), []),
    "beside_stateless": (lambda: chain(clip(), jstep.stateless(lambda u, p, n: u), adam()), []),
    "beside_custom": (lambda: chain(adam(), custom(jstep.scope("s", adam()))), []),
    "beside_from_optax": (lambda: chain(clip(), jstep.from_optax(optax.sgd(0.1))), []),
    "custom": (lambda: custom(chain(clip(), adam())), []),
    "leafwise": (lambda: chain(clip(), jstep.leafwise(lambda g, p, s, h: (-g, s), hyper={})), []),
}

BLOCKS: dict[str, Make] = {
    "centralize_gradients": jstep.centralize_gradients,
    "normalize_gradients": jstep.normalize_gradients,
    "add_noise": lambda: jstep.add_noise(0.1, 0.5, KEY),
    "trace": lambda: jstep.trace(0.9),
    "scale_by_rms": jstep.scale_by_rms,
    "scale_by_lion": jstep.scale_by_lion,
    "orthogonalize": jstep.orthogonalize,
    "normalize_neurons": jstep.normalize_neurons,
    "scale_by_trust_ratio": jstep.scale_by_trust_ratio,
    "add_weight_decay": lambda: jstep.add_weight_decay(0.1),
}


def adam_of(learning_rate: float) -> jstep.Optimizer:
    return jstep.scope("adam", jstep.adam(learning_rate))


def warnings_of(caplog: pytest.LogCaptureFixture, make: Make) -> list[str]:
    optimizer = make()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.minimize(lambda params: jnp.sum(params["w"] ** 2), optimizer)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", CASES)
def test_minimize_warns_once_of_each_odd_order(caplog: pytest.LogCaptureFixture, name: str) -> None:
    make, expected = CASES[name]
    found = warnings_of(caplog, make)
    assert [known for text in found for known in (LATE, UNFINISHED) if known in text] == expected
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


def test_a_late_clip_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings_of(caplog, lambda: chain(jstep.centralize_gradients(), sgd(0.1), clip()))
    assert text.startswith("chain: optimizers[2] clips the finished updates of optimizers[1], not the gradients. ")
