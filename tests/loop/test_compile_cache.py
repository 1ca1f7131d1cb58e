"""`train(compile_cache=…)`: JAX's persistent compilation cache, enabled during a run."""

import contextlib
import logging
import os
import stat
import threading

import jax
import pytest
from doubles import raising
from loop_runs import train
from processes import python

import jstep

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def settings():
    return [getattr(jax.config, name) for name in NAMES]


RUN = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jstep

seen = []
optimizer = jstep.adam(0.1)
near = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
far = jstep.minimize(lambda params, x: jnp.sum((params["w"] + x) ** 2), optimizer)
state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
evaluate = jstep.evaluator(lambda params, x: {"size": jnp.sum(x)}, [np.ones(3, np.float32)])
prints = jstep.FingerprintHook(every_n_steps=4, path=sys.argv[1] + "/prints")
hooks = [jstep.EvaluationHook(evaluate, every_n_steps=4), prints]
batches = [np.full(3, n, np.float32) for n in range(12)]
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
jstep.train({0: near, 6: far}, state, batches, 12, hooks=hooks, checkpoint_dir=sys.argv[1],
            compile_cache=True, steps_per_call=3, progress=False)
print(seen.count("/jax/compilation_cache/compile_requests_use_cache"), seen.count("/jax/compilation_cache/cache_hits"))
"""  # noqa: E501


def cache_requests_and_hits(directory):
    """Run a program in a new process; return the number of requests to the cache and of hits."""
    return tuple(map(int, python("-c", RUN, directory).split()))


@pytest.mark.thorough
def test_a_second_start_finds_every_program(tmp_path):
    cold = cache_requests_and_hits(tmp_path / "a")
    (tmp_path / "b").mkdir()
    # Entries do not depend on the path.
    os.rename(tmp_path / "a" / "compile_cache", tmp_path / "b" / "compile_cache")
    warm = cache_requests_and_hits(tmp_path / "b")
    assert cold[0] > cold[1]
    assert warm[0] == warm[1] > 0


@pytest.mark.parametrize(
    ("hooks", "ends"),
    [
        ([], contextlib.nullcontext()),
        (
            [jstep.every(1, raising(KeyError("on purpose")))],
            pytest.raises(KeyError, match="on purpose"),
        ),
    ],
    ids=["complete", "failing"],
)
def test_settings_are_restored(hooks, ends, tmp_path):
    before = settings()
    seen = [jstep.every(1, lambda *_: during.append(settings()))]
    during = []
    with ends:
        train(2, hooks=[*seen, *hooks], compile_cache=tmp_path / "cache")
    assert during[0] == [str(tmp_path / "cache"), True, 0.0, -1]
    assert settings() == before


def test_overlapping_runs_use_the_settings_of_the_first(tmp_path):
    before, during, latest = settings(), [], []
    inside, first_ended = threading.Event(), threading.Event()

    def second():
        def wait(*_):
            inside.set()
            assert first_ended.wait(60)
            during.append(settings())

        latest.append(train(1, hooks=[jstep.every(1, wait)], compile_cache=tmp_path / "second"))

    thread = threading.Thread(target=second, daemon=True)

    def start_the_second(*_):
        thread.start()
        assert inside.wait(60)
        during.append(settings())

    train(1, hooks=[jstep.every(1, start_the_second)], compile_cache=tmp_path / "first")
    first_ended.set()
    thread.join(60)
    assert during == [[str(tmp_path / "first"), True, 0.0, -1], before]
    assert settings() == before
    assert jstep.global_step(latest[0]) == 1
    # The cache is free: a later run has its own.
    train(
        1,
        hooks=[jstep.every(1, lambda *_: during.append(settings()))],
        compile_cache=tmp_path / "second",
    )
    assert (during[2][0], settings()) == (str(tmp_path / "second"), before)


def test_none_does_not_change_the_settings_of_jax(tmp_path):
    during = []
    before = settings()
    train(1, hooks=[jstep.every(1, lambda *_: during.append(settings()))], checkpoint_dir=tmp_path)
    assert during == [before]
    assert not (tmp_path / "compile_cache").exists()


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    before = settings()
    assert jstep.global_step(train(2, compile_cache=tmp_path / "file" / "cache")) == 2
    assert "compiles its programs without a cache" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert settings() == before


def test_the_cache_is_in_the_directory_of_a_saver(tmp_path):
    with jstep.Saver(tmp_path) as saver:
        train(1, checkpoint_dir=saver, compile_cache=True)
    assert stat.S_ISDIR(os.stat(tmp_path / "compile_cache").st_mode)
    assert jstep.Saver(tmp_path).all_steps() == [1]
