"""A healthy run reads no table of hints, compiles no check in its thread, and exchanges nothing
with nobody."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.core import processes, public_names

SCHEDULED = jstep.adamw(jstep.warmup_cosine_decay(0.01, warmup_steps=10, decay_steps=500))


class Tell(jstep.Hook):
    def after_step(self, step, state, metrics):
        return None


class Stop(jstep.Hook):
    def after_step(self, step, state, metrics):
        return step == 8


def train(directory, last_step=16, *, mesh=None, **options):
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), SCHEDULED)
    state = jstep.TrainState.create({"w": jnp.zeros(8)}, SCHEDULED)
    batch = np.ones(8, np.float32)
    if mesh is not None:
        state = jstep.shard_state(state, mesh)
        options["batch_sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    return jstep.train(
        step, state, lambda n: batch, last_step, checkpoint_dir=directory, progress=False, **options
    )


def test_a_healthy_run_reads_no_table_of_hints(tmp_path):
    public_names._hints.cache_clear()
    public_names._folded_hints.cache_clear()
    train(tmp_path, hooks=[Tell()])
    assert public_names._hints.cache_info().currsize == 0
    assert public_names._folded_hints.cache_info().currsize == 0
    with pytest.raises(AttributeError, match=r"use jstep\.adam"):
        _ = jstep.AdamOptimizer
    assert public_names._hints.cache_info().currsize == 1


@pytest.fixture
def compiled():
    """The programs that were compiled, by thread: whether it is the loop's → their names."""
    found = {True: set(), False: set()}

    class Listener(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith("Compiling "):
                is_loop = threading.current_thread() is threading.main_thread()
                found[is_loop].add(message.split()[1].removeprefix("jit(").rstrip(")"))

    listener = Listener(logging.DEBUG)
    loggers = [logging.getLogger(f"jax._src.{name}") for name in ("interpreters.pxla", "dispatch")]
    for logger in loggers:
        logger.addHandler(listener)
    with jax.log_compiles():
        yield found
    for logger in loggers:
        logger.removeHandler(listener)


KINDS = {
    "plain": dict,
    "mesh": lambda: {"mesh": jax.make_mesh((8,), ("data",))},
    "several steps": lambda: {"steps_per_call": 8},
    "NaN": lambda: {"hooks": [jstep.NanLossHook()]},
}


@pytest.mark.thorough(except_for=["plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_checks_compile_nothing_in_the_thread_of_the_loop(kind, compiled, tmp_path):
    train(tmp_path, **KINDS[kind]())
    assert "largest_rate" in compiled[False]
    assert "largest_rate" not in compiled[True]


def test_a_restart_does_not_sample_the_rates_again(compiled, tmp_path):
    train(tmp_path, hooks=[Stop()])
    for names in compiled.values():
        names.clear()
    train(tmp_path)
    assert "largest_rate" not in compiled[True] | compiled[False]


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(
        processes, "_exchange", lambda *args: pytest.fail("an exchange with nobody")
    )
    assert processes.any_process(True)
    assert not processes.any_process(False)
    assert processes.max_over_processes(np.array([3, -3])).tolist() == [3, -3]
    assert processes.broadcast_ints(1, 2) == [1, 2]
    assert processes.broadcast_bytes(b"abc") == b"abc"
    assert processes.gather_texts("a") == ["a"]
    assert processes.share_errors(lambda: 7, "problem") == 7
    with pytest.raises(KeyError):
        processes.share_errors(lambda: {}["missing"], "problem")
