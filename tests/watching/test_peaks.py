"""Peak FLOP/s of a device for the matrix products of a step."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from jstep.core.jaxprs import Product, body_of
from jstep.metering.work import Work, work_of
from jstep.planning.topologies import GPUS, TPUS
from jstep.watching.utilization import PEAKS, peak_rate

A100, V5E = "NVIDIA A100-SXM4-80GB", "TPU v5 lite"


def products(fn, *shapes):
    return work_of(body_of(jax.make_jaxpr(fn)(*shapes))).products


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def of(dtype, precision="DEFAULT", flops=1.0):
    return {Product(dtype, precision): flops}


def test_products_are_found_in_nested_programs():
    def fn(a, b, w):
        half, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), b, length=3)
        return jax.jit(jnp.dot)(a, a) + jnp.dot(a, a, precision="highest"), half

    found = products(fn, shape(4, 4), shape(4, 4, dtype="bfloat16"), shape(4, 4, dtype="bfloat16"))
    assert found == {
        Product("bfloat16", "DEFAULT"): 3 * 2 * 4**3,
        Product("float32", "DEFAULT"): 2 * 4**3,
        Product("float32", "HIGHEST"): 2 * 4**3,
    }
    assert products(jnp.sin, shape(4)) == {}


def test_products_of_ragged_dot_and_of_kernels():
    def fn(a, b):
        return jnp.sum(jax.lax.ragged_dot(a, b, jnp.array([24, 8], jnp.int32)))

    found = products(jax.grad(fn, (0, 1)), shape(32, 4), shape(2, 4, 8))
    # Of the forward pass and two gradients.
    assert found == {Product("float32", "DEFAULT"): 3 * 2 * 32 * 4 * 8}

    def kernel(a, estimate):
        out = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        return pallas.pallas_call(lambda x, y: None, out, cost_estimate=estimate)(a)

    estimate = pallas.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=0)
    for given, expected in ((estimate, 12345), (None, 8 * 128)):
        traced = jax.make_jaxpr(kernel, static_argnums=1)(shape(8, 128), given)
        assert work_of(body_of(traced)).flops == expected


def test_formats_are_read_from_jaxprs():
    def named(precision, *dtypes):
        fn = lambda a, b: jax.lax.dot(a, b, precision=precision)  # noqa: E731
        (found,) = products(fn, *(shape(2, 2, dtype=one) for one in dtypes or ("float32",) * 2))
        return found

    assert named(("default", "highest")).precision == "HIGHEST"
    assert named("BF16_BF16_F32_X3").precision == "BF16_BF16_F32_X3"
    assert named(None, "float8_e4m3fn", "bfloat16").dtype == "bfloat16"
    with jax.default_matmul_precision("tensorfloat32"):
        assert named(None).precision == "HIGH"
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "SAME", precision="high")  # noqa: E731
    assert set(products(conv, shape(1, 1, 8), shape(1, 1, 3))) == {Product("float32", "HIGH")}


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "teraflops"),
    [
        (A100, "bfloat16", "DEFAULT", 312),
        (A100, "float32", "DEFAULT", 156),
        (A100, "float32", "HIGHEST", 19.5),
        (A100, "int8", "DEFAULT", 624),
        (A100, "float8_e4m3fn", "DEFAULT", None),
        ("NVIDIA H200", "bfloat16", "ANY_F8", 1978.9),
        ("Tesla T4", "float32", "DEFAULT", 8.1),
        (V5E, "bfloat16", "DEFAULT", 197),
        (V5E, "float32", "HIGH", 197 / 3),
        (V5E, "float32", "HIGHEST", 197 / 6),
        ("TPU v3", "bfloat16", "DEFAULT", 61.5),  # a device is half a chip
        ("cpu", "float32", "DEFAULT", None),
        (A100, "float32", "NEW_NEW_F32", None),
    ],
)
def test_peak_of_a_format(kind, dtype, precision, teraflops):
    peak = peak_rate(kind, of(dtype, precision))
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_times_of_several_formats_add_up():
    both = of("bfloat16", flops=312.0) | of("float32", flops=156.0)
    assert peak_rate(A100, both) == pytest.approx(468e12 / 2)
    assert peak_rate(A100, {}) is None
    rate = peak_rate(A100, of("int32", flops=1.0) | of("bfloat16", flops=999.0))
    assert rate == pytest.approx(312e12)
    assert peak_rate(A100, of("int32", flops=1.0) | of("bfloat16", flops=9.0)) is None


def test_every_compilable_device_has_a_peak():
    for one in (
        *(tpu.device_kind for tpu in TPUS.values()),
        *(gpu.description for gpu in GPUS.values()),
    ):
        assert one in PEAKS
        assert peak_rate(one, of("bfloat16")) > 2e13
    assert "cpu" not in PEAKS


# The work of a program: its operations and bytes, once as it is written and as often as it runs.

X = jnp.ones((4, 3))
MOVED = 2 * 4 * 12
"""Bytes of an operation with one operand and one result like X."""


def work(fn, *args):
    return work_of(body_of(jax.make_jaxpr(fn)(*args)))


def looped(length, unroll):
    return lambda x: jax.lax.scan(lambda c, _: (-c, None), x, None, length=length, unroll=unroll)[0]


def test_work_of_an_operation_and_of_loops():
    assert work(jnp.negative, X) == Work(12, 12, MOVED, MOVED)
    for length, unroll, once in ((7, 1, 1), (7, 3, 4), (6, 3, 3), (2, 5, 2), (3, 3, 3)):
        assert work(looped(length, unroll), X) == Work(
            12 * once, 12 * length, MOVED * once, MOVED * length
        )
    assert work(lambda x: looped(3, 1)(jax.jit(looped(2, 1))(x)), X) == Work(
        24, 60, 2 * MOVED, 5 * MOVED
    )


def test_work_of_a_condition_is_that_of_its_larger_branch():
    found = work(lambda x: jax.lax.cond(True, lambda x: -x, looped(5, 1), x), X)
    assert (found.flops_once, found.flops) == (12, 60)


def test_loops_of_unknown_length_are_counted_once():
    found = work(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 3, jnp.negative, x), X)
    assert (found.flops_once, found.flops, found.unknown) == (13, 13, 1)
    twice = work(
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: looped(2, 1)(c) - 1, x), X
    )
    assert (twice.flops, twice.unknown) == (37, 1)
