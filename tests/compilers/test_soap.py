"""SOAP for TPUs: programs that grow with the number of sizes, not with that of matrices, nor with their rows."""

import jax.numpy as jnp
import pytest
from compiled_steps import check, compiled, moved

import jstep

OPTIMIZER = jstep.soap(1e-3)


def program(mesh, *shapes, slot_axis=None):
    """An update alone, and the shapes of its state."""

    def params():
        return {f"w{i}": jnp.zeros(shape) for i, shape in enumerate(shapes)}

    state = jstep.TrainState.create(params, OPTIMIZER, mesh=mesh, slot_axis=slot_axis)
    step = jstep.TrainStep(lambda state, grads: (jstep.apply_gradients(state, grads, OPTIMIZER), {}))
    return compiled(step, state, state.params), state


def size(program):
    return program.memory_analysis().generated_code_size_in_bytes


@pytest.mark.tpu_compiler
def test_many_leaves_are_no_more_to_compile_than_one():
    many, state = program(jstep.topology("v5e:1x1"), *[(256, 256)] * 12)
    check(many, state)
    assert size(many) < 15_000_000  # with a QR of XLA's for each matrix alone 28 MB
    # Bases turn in place: what is held besides is less than a second copy of matrices and bases.
    matrices = 2 * 2 * 12 * 256 * 256 * 4
    assert many.memory_analysis().temp_size_in_bytes < matrices


@pytest.mark.tpu_compiler
def test_large_matrices_are_little_more_to_compile_than_small_ones():
    """XLA's own QR of 1024 rows is 15 MB of code, that of 256 rows 1.2 MB; its eigh of 512 rows takes minutes."""
    large, state = program(jstep.topology("v5e:1x1"), (512, 256), (256, 1024), (1024, 1024))
    check(large, state)
    assert size(large) < 20_000_000  # with XLA's QR of the three matrices of 1024 rows alone 45 MB


@pytest.mark.tpu_compiler
def test_split_slots():
    mesh = jstep.topology("v5e:2x4")
    zero1, state = program(mesh, (512, 256), (256, 512), slot_axis="data")
    check(zero1, state)
    # Matrices are gathered for their decompositions; nothing is exchanged in the loops of these.
    assert sum(one.number for one in moved(zero1).values()) < 40


@pytest.mark.gpu_compiler
def test_gpus_call_their_library():
    found, state = program(jstep.topology("h100:1"), (512, 256), (512, 256))
    check(found, state)
    text = found.as_text()
    assert text.count('custom_call_target="cusolver_syevd_ffi"') == 4
