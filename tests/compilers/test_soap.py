"""Program size of SOAP: it depends on the number of distinct shapes, not on the number of matrices
or their rows."""

import jax.numpy as jnp
import pytest
from compiled_steps import check, compiled
from compiled_text import collectives

import jstep

OPTIMIZER = jstep.soap(1e-3)


def program(mesh, *shapes, slot_axis=None):
    """Return a compiled update without a loss, and the shapes of its state."""

    def params():
        return {f"w{i}": jnp.zeros(shape) for i, shape in enumerate(shapes)}

    state = jstep.TrainState.create(params, OPTIMIZER, mesh=mesh, slot_axis=slot_axis)
    step = jstep.TrainStep(
        lambda state, grads: (jstep.apply_gradients(state, grads, OPTIMIZER), {})
    )
    return compiled(step, state, state.params), state


def code_size(program):
    return program.memory_analysis().generated_code_size_in_bytes


@pytest.mark.tpu_compiler
def test_many_leaves_compile_to_little_more_than_one():
    many, state = program(jstep.topology("v5e:1x1"), *[(256, 256)] * 12)
    check(many, state)
    assert code_size(many) < 15_000_000  # 28 MB with one XLA QR per matrix alone
    # Bases are rotated in place: temporaries take less than a second copy of matrices and bases.
    matrices = 2 * 2 * 12 * 256 * 256 * 4
    assert many.memory_analysis().temp_size_in_bytes < matrices


@pytest.mark.tpu_compiler
def test_sharded_slots():
    mesh = jstep.topology("v5e:2x4")
    zero1, state = program(mesh, (512, 256), (256, 512), slot_axis="data")
    check(zero1, state)
    # Matrices are gathered for their decompositions, whose loops contain no collectives.
    assert sum(one.number for one in collectives(zero1.as_text()).values()) < 40


@pytest.mark.gpu_compiler
def test_gpus_call_cusolver():
    found, state = program(jstep.topology("h100:1"), (512, 256), (512, 256))
    check(found, state)
    text = found.as_text()
    assert text.count('custom_call_target="cusolver_syevd_ffi"') == 4
