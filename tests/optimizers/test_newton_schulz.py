"""Newton–Schulz presets, compared with the iteration in float64 and with known bounds of singular values."""

from typing import Any

import equations
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

POLAR = (
    (8.2373125, -23.1577474, 16.6805684),
    (4.0824420, -2.8930477, 0.5252849),
    (3.9263480, -2.8547468, 0.5318022),
    (3.2982187, -2.4245420, 0.4863201),
    (2.2970369, -1.6366256, 0.4002628),
    (1.8763805, -1.2347897, 0.3589189),
    (1.8564423, -1.2132450, 0.3568003),
    (1.8564423, -1.2132450, 0.3568003),
)
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
JORDAN = ((3.4445, -4.775, 2.0315),) * 5
LISTS: dict[str, tuple[Any, float]] = {"jordan": (JORDAN, 1.0), "dion": (DION, 1.0), "polar_express": (POLAR, 1.01)}


def with_spectrum(values: Any, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows, columns = (np.linalg.qr(rng.normal(size=(size, len(values))))[0] for size in shape)
    return (rows * np.asarray(values)) @ columns.T


def orthogonalized(x: Any, **arguments: Any) -> np.ndarray:
    optimizer = jstep.orthogonalize(scale=None, **arguments)
    params = {"w": jnp.ones(np.shape(x))}
    return np.asarray(optimizer.update({"w": jnp.asarray(x, jnp.float32)}, {}, params, jnp.int32(0))[0]["w"])


def singular(x: Any) -> np.ndarray:
    return np.linalg.svd(np.float64(x), compute_uv=False)


def spectrum(least: float) -> np.ndarray:
    """Return singular values from `least` up, with Frobenius norm 1."""
    values = np.geomspace(least, 0.5, 11)
    return np.append(values, np.sqrt(1 - np.sum(values**2)))


@pytest.mark.thorough(except_for=["dion-shape1-schatten"])
@pytest.mark.parametrize("normalization", ["frobenius", "schatten"])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (12, 12)])
@pytest.mark.parametrize("name", LISTS)
def test_presets_equal_their_coefficients(name: str, shape: tuple[int, int], normalization: str) -> None:
    triples, safety = LISTS[name]
    x = with_spectrum(np.linspace(0.4, 1.0, 12), shape)
    norm = np.linalg.norm(x) if normalization == "frobenius" else np.sum(singular(x) ** 4) ** 0.25
    expected = equations.polynomials(x / (safety * norm), triples)
    found = orthogonalized(x, ns_coefficients=name, normalization=normalization)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        orthogonalized(1e-4 * x, ns_coefficients=name, normalization=normalization), expected, atol=1e-4
    )


@pytest.mark.thorough(except_for=["polar_express-13-0.001-0.9999-1.0001"])
@pytest.mark.parametrize(
    ("name", "steps", "least", "low", "high"),
    [
        ("jordan", None, 1e-2, 0.677, 1.134),
        ("dion", None, 1e-2, 0.9775, 1.0325),
        ("polar_express", 6, 1e-3, 0.997, 1.002),
        ("polar_express", 13, 1e-3, 0.9999, 1.0001),
    ],
)
def test_bounds_of_singular_values(name: str, steps: Any, least: float, low: float, high: float) -> None:
    for normalization in ("frobenius", "schatten"):
        for values in (spectrum(1.02 * least), [1.0], np.ones(12)):
            x = with_spectrum(values, (20, 16))
            found = singular(orthogonalized(x, ns_steps=steps, ns_coefficients=name, normalization=normalization))
            nonzero = found[: len(values)]
            assert low - 1e-4 <= nonzero.min(), (normalization, len(values))
            assert nonzero.max() <= high + 1e-4, (normalization, len(values))
            assert found[len(values) :].max(initial=0.0) < 1e-2  # rounding errors grow at most a hundredfold


@pytest.mark.thorough(except_for=["dion-schatten"])
@pytest.mark.parametrize("normalization", ["frobenius", "schatten"])
@pytest.mark.parametrize("name", LISTS)
def test_zero_tiny_stacked_and_low_precision_matrices(name: str, normalization: str) -> None:
    arguments = {"ns_coefficients": name, "normalization": normalization}
    x = with_spectrum(np.linspace(0.5, 1.0, 4), (4, 6))
    stack = np.stack([x, 0 * x, 1e-14 * x, 5e-5 * x])
    found = orthogonalized(stack, **arguments)
    assert np.array_equal(found[1], 0 * x)
    assert np.max(np.abs(found[2])) < 1e-2  # below ε it is damped with either norm
    np.testing.assert_allclose(found[0], orthogonalized(x, **arguments), atol=1e-5)
    np.testing.assert_allclose(found[3], found[0], atol=1e-4)
    assert np.isnan(orthogonalized(np.where(x == x[0, 0], np.nan, x), **arguments)).any()
    low = orthogonalized(x, ns_dtype=jnp.bfloat16, **arguments)
    assert singular(low).min() > 0.6
    assert singular(low).max() < 1.2
