"""Detection of recomputation by the compiler to save memory."""

import jax
import jax.numpy as jnp
import pytest

from jstep.tools.compiled import parse_program, program_recomputes

PROGRAM = """\
HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: f32[600000,1024]) -> f32[600000,1024] {{
  %x = f32[600000,1024]{{1,0:T(8,128)}} parameter(0)
  %convolution_tanh_fusion.5 = f32[600000,1024]{{1,0:T(8,128)}} copy(%x)
  %{name} = f32[600000,1024]{{1,0:T(8,128)}} copy(%x), metadata={{op_name="{operation}"}}
  ROOT %r = f32[600000,1024]{{1,0:T(8,128)}} add(%convolution_tanh_fusion.5, %{name})
}}
"""


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        ("convolution_tanh_fusion.5.remat", True),  # from jax 0.10.2, libtpu 0.0.42.1, one v5e
        ("convolution_tanh_fusion.5.remat2.1", True),
        ("fusion.3.remat.clone", True),
        ("copy.7.remat_compressed", True),
        ("remat2.5", False),
        ("rematted_computation.3", False),
        ("fusion.rematerialized", False),
    ],
)
def test_recomputed_instructions(name, recomputed):
    operation = "jit(step)/transpose(jvp())/checkpoint/x.remat/mul"
    assert program_recomputes(parse_program(PROGRAM.format(name=name, operation=operation))) is recomputed


def test_jax_checkpoint_does_not_count():
    def loss(params, x):
        for weights in params:
            x = jax.checkpoint(lambda x, weights: jnp.tanh(x @ weights))(x, weights)
        return jnp.mean(x**2)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower([shapes] * 3, shapes).compile().as_text()
    assert "rematted_computation" in text
    assert not program_recomputes(parse_program(text))
