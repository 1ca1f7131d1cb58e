"""Newton–Schulz presets, compared with the iteration in float64 and with known bounds of singular
values."""

import contextlib
import re

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.optimizers import soap
from jstep.optimizers.muon import MatrixLayout, distribute_matrices, layout_of_matrix

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
LISTS = {"jordan": (JORDAN, 1.0), "dion": (DION, 1.0), "polar_express": (POLAR, 1.01)}


def with_spectrum(values, shape, seed=0):
    rng = np.random.default_rng(seed)
    rows, columns = (np.linalg.qr(rng.normal(size=(size, len(values))))[0] for size in shape)
    return (rows * np.asarray(values)) @ columns.T


def orthogonalized(x, **arguments):
    optimizer = jstep.orthogonalize(scale=None, **arguments)
    params = {"w": jnp.ones(np.shape(x))}
    return np.asarray(
        optimizer.update({"w": jnp.asarray(x, jnp.float32)}, {}, params, jnp.int32(0))[0]["w"]
    )


def singular(x):
    return np.linalg.svd(np.float64(x), compute_uv=False)


def spectrum(least):
    """Return singular values from `least` up, with Frobenius norm 1."""
    values = np.geomspace(least, 0.5, 11)
    return np.append(values, np.sqrt(1 - np.sum(values**2)))


@pytest.mark.thorough(except_for=["dion-shape1-schatten"])
@pytest.mark.parametrize("normalization", ["frobenius", "schatten"])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (12, 12)])
@pytest.mark.parametrize("name", LISTS)
def test_presets_equal_their_coefficients(name, shape, normalization):
    triples, safety = LISTS[name]
    x = with_spectrum(np.linspace(0.4, 1.0, 12), shape)
    norm = np.linalg.norm(x) if normalization == "frobenius" else np.sum(singular(x) ** 4) ** 0.25
    expected = equations.polynomials(x / (safety * norm), triples)
    found = orthogonalized(x, ns_coefficients=name, normalization=normalization)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        orthogonalized(1e-4 * x, ns_coefficients=name, normalization=normalization),
        expected,
        atol=1e-4,
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
def test_bounds_of_singular_values(name, steps, least, low, high):
    for normalization in ("frobenius", "schatten"):
        for values in (spectrum(1.02 * least), [1.0], np.ones(12)):
            x = with_spectrum(values, (20, 16))
            found = singular(
                orthogonalized(x, ns_steps=steps, ns_coefficients=name, normalization=normalization)
            )
            nonzero = found[: len(values)]
            assert low - 1e-4 <= nonzero.min(), (normalization, len(values))
            assert nonzero.max() <= high + 1e-4, (normalization, len(values))
            # Rounding errors grow at most a hundredfold.
            assert found[len(values) :].max(initial=0.0) < 1e-2


@pytest.mark.thorough(except_for=["jordan-schatten"])
@pytest.mark.parametrize("normalization", ["frobenius", "schatten"])
@pytest.mark.parametrize("name", LISTS)
def test_zero_tiny_huge_stacked_and_low_precision_matrices(name, normalization):
    arguments = {"ns_coefficients": name, "normalization": normalization}
    x = with_spectrum(np.linspace(0.5, 1.0, 4), (4, 6))
    stack = np.stack([x, 0 * x, 1e-14 * x, 5e-5 * x])
    found = orthogonalized(stack, **arguments)
    assert np.array_equal(found[1], 0 * x)
    assert np.max(np.abs(found[2])) < 1e-2  # below ε it is damped with either norm
    np.testing.assert_allclose(found[0], orthogonalized(x, **arguments), atol=1e-5)
    np.testing.assert_allclose(found[3], found[0], atol=1e-4)
    assert np.isnan(orthogonalized(np.where(x == x[0, 0], np.nan, x), **arguments)).any()
    assert np.array_equal(orthogonalized(1e30 * x, **arguments), 0 * x)  # the squares overflow
    low = orthogonalized(x, ns_dtype=jnp.bfloat16, **arguments)
    assert singular(low).min() > 0.6
    assert singular(low).max() < 1.2


# Eigenbases of SOAP: the loops that TPUs run, compared with the library routines of CPUs and GPUs.

SHAPES = [(6, 4), (4, 6), (6, 6), (5, 2, 4)]


def matrix(n, rank, size=1.0):
    random = np.random.default_rng(n + rank)
    factors = random.normal(size=(n, max(rank, 1))), random.normal(size=(max(rank, 1), n))
    return (size * (rank > 0) * factors[0] @ factors[1]).astype(np.float32)


@pytest.mark.thorough(except_for=["40-7-16-1.0"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(
    ("n", "rank", "width"), [(1, 1, 128), (3, 3, 128), (130, 130, 128), (40, 7, 16), (5, 0, 2)]
)
def test_householder_loop_is_a_qr_decomposition(n, rank, width, size):
    a = matrix(n, rank, size).astype(np.float64)
    q = np.asarray(soap.orthonormal(jnp.asarray(a, jnp.float32), width), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(n), atol=2e-6)
    r = q.T @ a
    assert np.abs(np.tril(r, -1)).max(initial=0) <= 1e-6 * np.linalg.norm(a)
    if rank == n <= 3:  # for a matrix of full rank it is unique up to signs
        np.testing.assert_allclose(np.abs(q), np.abs(np.linalg.qr(a)[0]), rtol=1e-4, atol=1e-5)


def test_the_slots_are_those_of_two_axes_or_as_many_as_there_are():
    for shape, axes in (((), 2), ((3, 2), 2), ((2, 2, 2), 3)):
        state = jstep.TrainState.create({"w": jnp.ones(shape)}, jstep.soap(0.01))
        names = {name for name in state.slots if name.startswith("q_")}
        assert {int(name.split("_")[-1]) for name in names} == set(range(axes)), names


def library_eigh(gram, basis):
    """Return the result of Jacobi's method, computed by a CPU routine."""
    return jnp.flip(jnp.linalg.eigh(gram)[1], 1), jnp.arange(gram.shape[0], dtype=jnp.int32)


@pytest.mark.thorough
def test_training_with_loops_equals_training_with_calls(monkeypatch):
    """Signs of eigenvectors differ; updates do not."""

    def run():
        optimizer = jstep.soap(0.01, precondition_frequency=2, weight_decay=0.0)
        random = np.random.default_rng(0)
        params = {str(shape): jnp.zeros(shape) for shape in SHAPES}
        state = jstep.TrainState.create(params, optimizer)
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        for _ in range(8):
            grads = {
                name: jnp.asarray(random.normal(size=leaf.shape), jnp.float32)
                for name, leaf in params.items()
            }
            state = step(state, grads)
        return state.params

    calls = run()
    used, loops_of = [], soap.update_in_loops

    def in_loops(turn, leaves):
        used.append(len(leaves))
        return loops_of(turn, leaves, library_eigh)

    monkeypatch.setattr(soap, "update_one_by_one", in_loops)
    loops = run()
    assert used == [len(SHAPES)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), loops, calls)


@pytest.mark.thorough
def test_tpus_compile_one_program_per_matrix_size():
    """In the lowered program, neither more leaves nor more rows add a decomposition."""

    def decompositions(shapes):
        optimizer = jstep.soap(0.01)
        state = jax.eval_shape(
            lambda: jstep.TrainState.create(
                [jnp.zeros(shape, jnp.float32) for shape in shapes], optimizer
            )
        )
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        text = step.trace(state, state.params).lower(lowering_platforms=("tpu",)).as_text()
        assert "lapack" not in text
        return len(re.findall(r"custom_call @Eigh\(", text)), len(
            re.findall(
                r"custom_call @Qr\(",
                text,
            )
        )

    assert decompositions([(600, 300)]) == (2, 0)
    assert decompositions([(600, 300)] * 5 + [(600, 600), (300,)]) == (2, 0)


def test_cpus_and_gpus_call_their_libraries():
    optimizer = jstep.soap(0.01)
    state = jstep.TrainState.create([jnp.zeros((3, 2))] * 2, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer)).trace(
        state, state.params
    )
    for platform, library in (("cpu", "lapack_ssyevd"), ("cuda", "cusolver_syevd")):
        text = step.lower(lowering_platforms=(platform,)).as_text()
        assert library in text
        assert "@Eigh(" not in text


# How matrices of one shape are batched, or distributed over the devices of a mesh: the layouts of
# the stack.

CUBE = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
AXES = (0, 1), (2,)
MERGED = (8, 2, 4)


def test_layouts_of_matrices():
    def of(spec, shape=MERGED, axes=AXES, devices=8):
        mesh = jax.make_mesh(
            (devices // 2 or 1, 2 if devices > 1 else 1),
            ("x", "y"),
            devices=jax.devices()[:devices],
        )
        found = layout_of_matrix(NamedSharding(mesh, spec), shape, axes)
        return None if found is None else (found.mesh is mesh, *found[1:])

    assert layout_of_matrix(None, MERGED, AXES) is None
    assert of(P("x"), devices=1) is None
    assert of(P("y"), devices=2) == (True, (), ("y",), ())
    assert of(P()) == (True, (), (), ())
    assert of(P(("x", "y"))) == (True, (), ("x", "y"), ())
    assert of(P("x", None, "y")) == (True, (), ("x",), ("y",))
    assert of(P(None, "x")) is None  # the second of two axes that are merged
    assert of(P("x", "y")) is None
    assert of(P("x", "y"), (8, 4), ((0,), (1,))) == (True, (), ("x",), ("y",))
    assert of(P("x", "y", None), (8, 4), ((0,), (1,))) is None
    assert of(P("x", None, "y"), axes=((1,), (2,))) == (True, ("x",), (), ("y",))


@pytest.mark.thorough(except_for={"is_set": [True]})
@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(
    ("layout", "shapes", "hops"),
    [
        ("/a/b", [()], [" a b", "b a ", "ba  "]),
        ("/a/b", [(2, 3), ()], [" a b", "c a b", "cb a ", "cba  "]),
        ("c/a/b", [(2,), (4,)], ["c a b", "cb a ", "cba  "]),
        ("/ab/", [(4,)], [" ab ", "b a ", "ba  "]),
        ("//", [(8,)], ["  ", "abc  "]),
        ("//", [(3,)], ["  ", "ab  "]),
        ("//", [()], ["  "]),
    ],
)
def test_a_stack_is_resharded_one_axis_at_a_time(layout, shapes, hops, is_set):
    """There and back, to one matrix on each device or a few; the values are those of each
    matrix."""
    numbers = np.random.default_rng(0)
    members = [jnp.asarray(numbers.normal(size=(*shape, 4, 2)), jnp.float32) for shape in shapes]
    names = [tuple(part) for part in layout.split("/")]

    def compute(stack):
        return stack + jnp.sum(jnp.abs(stack), (1, 2), keepdims=True)

    def run(members):
        return distribute_matrices(members, MatrixLayout(CUBE, *names), compute)

    with jax.set_mesh(CUBE) if is_set else contextlib.nullcontext():
        program = jax.make_jaxpr(run)(members)
    specs = [
        eqn.params["sharding"].spec
        for eqn in program.eqns
        if eqn.primitive.name == "sharding_constraint"
    ]
    found = [
        " ".join("".join(axis if isinstance(axis, tuple) else (axis or "",)) for axis in spec)
        for spec in specs
    ]
    assert found == [*hops, *hops[::-1]]
    for one, member in zip(jax.jit(run)(members) if is_set else (), members, strict=is_set):
        np.testing.assert_allclose(
            one, member + np.sum(np.abs(member), (-2, -1), keepdims=True), rtol=1e-6
        )
