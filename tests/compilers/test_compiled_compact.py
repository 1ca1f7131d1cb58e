"""What `compact` moves through memory, by XLA's compilers for GPUs and TPUs."""

import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import pytest
from compiled_steps import total_bytes

import jstep

TESTS = pathlib.Path(__file__).parents[1]
LR = 1e-3
SIDE = 4096
CLIPPED = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(LR))
ELEMENTWISE = {
    "adamw": jstep.adamw(LR),
    "lion": jstep.lion(LR),
    "rmsprop": jstep.rmsprop(LR, momentum=0.9),
    "adopt": jstep.adopt(LR),
    "adadelta": jstep.adadelta(LR),
    "ademamix": jstep.ademamix(LR),
    "schedule_free": jstep.schedule_free_adamw(LR),
}
READ_BEFORE = {
    "clip": (CLIPPED, 1.55),  # gradients are read for their norm
    "prodigy": (jstep.prodigy(), 1.5),  # sums over all leaves
    # The momentum depends on the parameters.
    "decay": (jstep.sgd(LR, 0.9, use_nesterov=True, weight_decay=0.1), 1.65),
}


def update(optimizer, mesh):
    """Return a compiled update of one matrix, and its state."""
    params = {"w": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)}
    state = jstep.TrainState.create(params, jstep.compact(optimizer), mesh=mesh)
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, jstep.compact(optimizer)),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    return step.lower(state, state.params).compile(), state


def moved(text, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(TESTS)])
    return runpy.run_path(str(TESTS.parent / "benchmarks" / "bench_compilers.py"))["moved"](text)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", [*ELEMENTWISE, *READ_BEFORE])
def test_on_gpus_two_kernels_read_a_leaf_and_none_stores_it_in_float32(name, monkeypatch):
    optimizer, most = READ_BEFORE.get(name, (ELEMENTWISE.get(name), 1.4))
    compiled, state = update(optimizer, jstep.topology("h100:1"))
    least = 2 * total_bytes(state) + total_bytes(state.params)
    assert moved(compiled.as_text(), monkeypatch) <= most * least
    assert f"f32[{SIDE},{SIDE}]" not in compiled.as_text().partition("\nENTRY ")[2]
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.15 * SIDE * SIDE


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_on_tpus_a_loop_reads_and_writes_a_leaf_once(name, monkeypatch):
    compiled, state = update(ELEMENTWISE[name], jstep.topology("v5e:1x1"))
    least = 2 * total_bytes(state) + total_bytes(state.params)
    assert moved(compiled.as_text(), monkeypatch) <= 1.1 * least
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.1 * SIDE * SIDE
