"""What a restart and `diff` say of another traced step: which part, the optimizer, the rate, the
first lines."""

import logging
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.look import cli
from jstep.record.differences import differing_lines
from jstep.record.starts import compressed, read_programs

X = np.ones((8, 4), np.float32)


def run(where, last_step, *, activation=jax.nn.silu, optimizer=None, metrics=(), rates=None):
    optimizer = jstep.adam(0.1) if optimizer is None else optimizer

    def loss(params, x):
        return jnp.mean(activation(x @ params["w"]) ** 2)

    step = jstep.minimize(loss, optimizer, metrics=metrics)
    if rates is not None:
        step = {
            first: jstep.minimize(loss, jstep.adam(rate))
            for first, rate in zip((0, 2), rates, strict=True)
        }
    state = jstep.TrainState.create({"w": jnp.ones((4, 2))}, optimizer)
    return jstep.train(step, state, lambda n: X, last_step, checkpoint_dir=where, progress=False)


def decaying(steps):
    return jstep.adam(jstep.exponential_decay(0.1, steps, 0.5))


def two_parts(rate):
    """Return an optimizer of two parts, whose rates may be equal."""
    return jstep.partition(
        {"a": jstep.adam(0.1), "b": jstep.gradient_descent(rate)}, lambda path, leaf: "b"
    )


CASES = {
    "activation": (
        {}, {"activation": jax.nn.relu}, ["in its loss and gradients;", "name=silu → name=relu"],
        ["update"],
    ),
    "optimizer": (
        {}, {"optimizer": jstep.adamw(0.1)},
        ["in its update; adam(learning_rate=0.1) before, adamw(learning_rate=0.1) now"],
        ["loss and gradients"],
    ),
    "decay": (
        {"optimizer": jstep.adamw(0.1, weight_decay=0.1)},
        {"optimizer": jstep.adamw(0.1, weight_decay=0.2)},
        ["weight_decay: 0.1 before, 0.2 now", "the traced step differs (in its update)"],
        ["adamw", "learning_rate"],
    ),
    "rate of the second stage": (
        {"rates": (0.1, 0.3)}, {"rates": (0.1, 0.4)},
        ["learning_rate[2]: 0.3 before, 0.4 now", "the traced step differs (in its update)"],
        ["adam", "at step"],
    ),
    "rate of a part": (
        {"optimizer": two_parts(0.1)}, {"optimizer": two_parts(0.2)},
        ["b/learning_rate: 0.1 before, 0.2 now", "the traced step differs (in its update)"],
        ["partition", "a/"],
    ),
    "decay and activation": (
        {"optimizer": jstep.adamw(0.1, weight_decay=0.1)},
        {"optimizer": jstep.adamw(0.1, weight_decay=0.2), "activation": jax.nn.relu},
        ["weight_decay: 0.1 before, 0.2 now", "in its loss and gradients and its update;",
         "name=silu → name=relu"],
        ["adamw"],
    ),
    "schedule": (
        {"optimizer": decaying(1500)}, {"optimizer": decaying(2400)},
        ["in its update", "decay_steps=1500", "i32[] = div 1500:i32[] → i32[] = div 2400:i32[]",
         "learning_rate at step 3: 0.0999076 before, 0.0999423 now"],
        ["loss and gradients"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_differs_in_a_step(name, tmp_path, caplog, capsys):
    before, after, said, unsaid = CASES[name]
    run(tmp_path, 3, **before)
    run(tmp_path, 6, **after)
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert "the traced step differs (in its " in warning
    assert all(words in warning for words in said), warning
    assert not any(words in warning for words in unsaid)
    assert os.path.getsize(tmp_path / "starts/model.000001.programs") < 2**16
    assert cli.main(["diff", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert all(words.split(" →")[0] in out for words in said if "at step" not in words)


def test_another_metric_is_no_difference(tmp_path, caplog):
    run(tmp_path, 3)
    run(tmp_path, 6, metrics=[lambda gradients, updates, params: {"b": jnp.sum(gradients["w"])}])
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


def test_the_text_of_programs_is_bounded():
    noise = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 2**20)))
    for programs in ({"0": noise}, {"0": "a b\nc", "5": "d"}, {"0": "x" * 10**7}):
        assert len(data := compressed(programs)) <= 2**16
        assert zlib.decompress(data)
    assert read_programs("/no/such/file") == {}


def test_bombs_and_other_files_are_no_programs(tmp_path):
    for name, data in (
        ("bomb", zlib.compress(b"x" * 10**8)),
        ("text", b"x"),
        ("empty", b""),
        ("large", b"x" * 10**6),
    ):
        (tmp_path / name).write_bytes(data)
        assert sum(map(len, read_programs(str(tmp_path / name)).values())) < 10**7


def test_names_of_variables_do_not_count():
    before = "a:f32[] = sin b\nc:bool[] = ge a 0.0\nd:f32[] = neg a"
    assert (
        differing_lines(
            before, before.replace("a", "xa").replace("d:", "ge:").replace("necg", "neg")
        )
        == []
    )
    keys = "ab:key<fry>[] = random_fold_in c 1", "b:key<rbg>[] = random_fold_in cd 1"
    assert differing_lines(keys[0], keys[0].replace("ab", "b")) == []
    assert differing_lines(*keys) == [
        "key<fry>[] = random_fold_in c 1 → key<rbg>[] = random_fold_in cd 1"
    ]
    assert differing_lines(keys[0], keys[1].replace("cd", "c"), any_keys=True) == []
    assert differing_lines("a:bool[] = ge a 0.0", "a:bool[] = gt a 0.0") == [
        "bool[] = ge 0.0 → bool[] = gt 0.0"
    ]
    assert differing_lines("a:f32[] = sin 1.0", "a:f32[] = sin 1.0\nb:f32[] = neg a") == [
        "nothing → f32[] = neg"
    ]
    assert (
        len(differing_lines("\n".join(map(str, range(99))), "\n".join(map(str, range(100, 199)))))
        == 5
    )


def test_an_address_of_a_coordinator_is_no_change():
    from jstep.record.differences import changes

    one, other = (
        {"setup": {"environment": {"JAX_COORDINATOR_ADDRESS": place, "JAX_X": 1}}}
        for place in ("a:1", "b:2")
    )
    assert changes(one, other).lines == []
