"""Codes of blocks, and bfloat16 with a remainder: errors, means over steps, and what must stay
exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.slots import compact_numbers
from jstep.slots.compact_numbers import Blocks, Turn, blocks_between, choose_blocks

# One program for each, not one for each of their operations.
decode = jax.jit(compact_numbers.decode)
block_scales = jax.jit(compact_numbers.block_scales, static_argnums=1)
fractions_at = jax.jit(compact_numbers.fractions_at, static_argnums=0)
join_halves, split_halves = (
    jax.jit(compact_numbers.join_halves),
    jax.jit(compact_numbers.split_halves),
)


def encode(x, blocks, dtype, fractions=0.5):
    static = (1, 2, 3) if isinstance(fractions, float) else (1, 2)
    return jax.jit(compact_numbers.encode, static_argnums=static)(x, blocks, dtype, fractions)


@pytest.mark.thorough(except_for=["shape8-32-blocks8"])
@pytest.mark.parametrize(
    ("shape", "near", "blocks"),
    [
        ((4, 512), 128, Blocks(1, 128)),
        ((4, 100), 128, Blocks(1, 100)),
        ((3, 480), 128, Blocks(1, 120)),
        ((4, 200), 128, Blocks(1, 100)),  # 200 is below 2 · 128, too, and farther
        ((256, 3), 128, Blocks(0, 128)),  # the last axis has no such divisor
        ((7, 257), 128, Blocks(1, 257)),  # nor has any other: the last axis is one block
        ((2, 128, 3, 3), 128, Blocks(1, 128)),
        ((8192,), 1024, Blocks(0, 1024)),
        ((5000, 1), 32, Blocks(0, 40)),
    ],
)
def test_blocks_lie_along_the_last_axis_with_a_divisor(shape, near, blocks):
    assert choose_blocks(shape, near) == blocks
    _, scales = jax.eval_shape(lambda: encode(jnp.zeros(shape), blocks, np.dtype("int8")))
    assert blocks_between(shape, scales.shape) == blocks


def values(kind, shape=(16, 256), seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
    return np.float32(np.square(x) if kind == "uint8" else x)


@pytest.mark.thorough(except_for=["uint8-0.008"])
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.008), ("int16", 3.2e-5), ("uint8", 0.008)])
def test_the_nearest_codes_have_a_small_error_and_are_their_own_codes(dtype, bound):
    x = values(dtype)
    codes, scales = encode(x, Blocks(1, 128), np.dtype(dtype))
    assert (codes.dtype, codes.shape, scales.shape) == (dtype, x.shape, (16, 2))
    back = decode(codes, scales)
    largest = np.repeat(np.abs(x).reshape(16, 2, 128).max(2), 128, 1)
    assert np.max(np.abs(back - x) / largest) < bound
    # The largest of each block is exact, but for the last bit.
    np.testing.assert_allclose(np.abs(back).reshape(16, 2, 128).max(2), scales, rtol=1e-6)
    again, same = encode(back, Blocks(1, 128), np.dtype(dtype))
    assert np.array_equal(again, codes)
    np.testing.assert_allclose(same, scales, rtol=1e-6)


@pytest.mark.thorough(except_for=["uint8-0.0002"])
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 1e-4), ("int16", 5e-7), ("uint8", 2e-4)])
def test_the_mean_over_steps_of_rounded_values_is_the_value(dtype, bound):
    x = values(dtype, (4, 256), seed=1)

    @jax.jit
    def at(step):
        fractions = fractions_at(x.shape, Turn(step, np.uint32(3)))
        return decode(*encode(x, Blocks(1, 128), np.dtype(dtype), fractions))

    mean = np.mean(np.stack([at(step) for step in range(1000)]).astype(np.float64), 0)
    largest = np.repeat(np.abs(x).reshape(4, 2, 128).max(2), 128, 1)
    error = (mean - x) / largest
    # A square between 0 and its smallest code becomes that code.
    assert np.max(np.abs(error)) < bound
    assert np.max(np.abs(np.mean(error, 1))) < bound / 10


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-20, 1.0, 1e30])
def test_the_scales_of_decoded_values_are_those_of_their_codes(dtype, size):
    """So that a block of which no value changes keeps its codes."""
    blocks, x = Blocks(1, 128), jnp.asarray(values(dtype, (64, 1024)) * np.float32(size))
    for fractions in (0.0, 0.5, fractions_at(x.shape, Turn(3, 1)), 1 - 2.0**-24):
        codes, scales = encode(x, blocks, np.dtype(dtype), fractions)
        for _ in range(2):
            assert np.array_equal(block_scales(decode(codes, scales), blocks), scales)
            codes, _ = encode(decode(codes, scales), blocks, np.dtype(dtype))


@pytest.mark.thorough
def test_a_positive_square_never_becomes_0_and_0_stays_0():
    x = jnp.zeros((1, 128)).at[0, 0].set(1.0).at[0, 1].set(1e-30).at[0, 2].set(1e-12)
    for fractions in (0.0, 0.5, 1 - 2**-24):
        codes, _ = encode(x, Blocks(1, 128), np.dtype("uint8"), fractions)
        assert codes[0, :4].tolist() == [255, 1, 1, 0]
    for dtype in ("int8", "int16", "uint8"):
        codes, scales = encode(jnp.zeros((1, 128)), Blocks(1, 128), np.dtype(dtype), 1 - 2**-24)
        assert not np.any(codes)
        assert not np.any(decode(codes, scales))


@pytest.mark.thorough(except_for=["int8-1e-35", "int16-1e+37"])
@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-20, 1e20, 1e37])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
def test_the_range_is_that_of_float32(dtype, scale):
    x = values(dtype) / np.max(np.abs(values(dtype))) * np.float32(scale)
    back = decode(*encode(x, Blocks(1, 128), np.dtype(dtype)))
    assert np.max(np.abs(back - x)) < 0.012 * scale


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_alone(bad):
    x = values("int8")
    x[3, 5] = bad
    for dtype in ("int8", "int16", "uint8"):
        back = np.asarray(
            decode(*encode(np.abs(x) if dtype == "uint8" else x, Blocks(1, 128), np.dtype(dtype)))
        )
        spoiled = ~np.isfinite(back)
        assert spoiled[3, 5]
        spoiled[3, :128] = False
        assert not np.any(spoiled)


def test_fractions_of_a_part_are_those_of_the_whole():
    turn = Turn(jnp.int32(7), np.uint32(5))
    whole = fractions_at((8, 6), turn)
    assert np.array_equal(fractions_at((3, 2), turn, (4, 1)), whole[4:7, 1:3])
    assert np.min(whole) >= 0
    assert np.max(whole) < 1
    for other in (Turn(jnp.int32(8), np.uint32(5)), Turn(jnp.int32(7), np.uint32(6))):
        assert not np.any(fractions_at((8, 6), other) == whole)


def test_a_float32_is_a_bfloat16_and_a_remainder():
    x = np.concatenate(
        [values("int8").ravel(), np.float32([0.0, -0.0, 1.0, -1.0, 1e-38, 1e-42, 3e38])]
    )
    top, low = split_halves(x)
    assert (top.dtype, low.dtype) == (jnp.bfloat16, np.int8)
    back = np.asarray(join_halves(top, low))
    assert np.max(np.abs(back - x) / np.maximum(np.abs(x), 1e-38)) < 2**-16
    assert np.array_equal(np.signbit(back), np.signbit(x))
    # The parameter is the nearest bfloat16 to its master, half up.
    whole = np.asarray(top.astype(jnp.float32))
    assert np.max(np.abs(whole - back) / np.maximum(np.abs(back), 1e-38)) <= 2**-8
    again = split_halves(back, 1 - 2**-24)  # nothing to round
    assert np.array_equal(again[0], top)
    assert np.array_equal(again[1], low)


def test_a_tie_is_rounded_up_and_an_untouched_parameter_has_no_remainder():
    tie = jnp.float32(1 + 2**-8)
    top, low = split_halves(tie)
    assert (float(top), int(low)) == (1 + 2**-7, -128)
    assert join_halves(top, low) == tie
    assert join_halves(jnp.bfloat16(1.5), jnp.int8(0)) == 1.5


def test_another_parameter_keeps_its_value_to_half_a_unit():
    tops = jnp.array(
        [0.0, -0.0, 1.0, -3.0, 2.0**-120, 3.3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16
    )
    for low in (-128, -1, 0, 1, 127):
        back = join_halves(tops, jnp.full(tops.shape, low, jnp.int8))
        finite = np.isfinite(np.float32(tops))
        assert np.array_equal(np.isfinite(back), finite)
        near = (
            np.abs(np.float32(tops) - back)[finite]
            <= np.abs(np.float32(tops))[finite] * 2**-8 + 1e-38
        )
        assert np.all(near)


@pytest.mark.thorough
def test_what_is_not_finite_has_no_remainder():
    top, low = split_halves(jnp.array([jnp.inf, -jnp.inf, jnp.nan], jnp.float32), 0.99)
    assert not np.any(low)
    assert np.array_equal(np.float32(top), [np.inf, -np.inf, np.nan], equal_nan=True)


@pytest.mark.thorough
def test_the_mean_over_steps_of_a_split_number_is_the_number():
    x = jnp.full((64,), 1.0 + 2**-20 + 2**-22, jnp.float32)
    means = [
        np.mean(
            np.float64(
                join_halves(*split_halves(x, fractions_at(x.shape, Turn(step, np.uint32(0)))))
            )
        )
        for step in range(300)
    ]
    assert abs(np.mean(means) - float(x[0])) < 2**-24
