"""Without JAX, floating-point dtypes are recognized as by JAX, including those of ml_dtypes."""

import jax.numpy as jnp
import pytest

from jstep.tools.ranges import is_inexact

NAMES = (
    "bool_ int2 int4 int8 int64 uint4 uint64 float16 float32 float64 bfloat16 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn"
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES.split())
def test_inexact_dtypes_are_those_of_jax(name):
    dtype = jnp.dtype(getattr(jnp, name))
    assert is_inexact(dtype) == jnp.issubdtype(dtype, jnp.inexact)
