"""Eigenbases of SOAP: the loops that TPUs run, compared with the library routines of CPUs and GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.optimizers import soap

SHAPES = [(6, 4), (4, 6), (6, 6), (5, 2, 4)]


def matrix(n, rank, size=1.0):
    random = np.random.default_rng(n + rank)
    factors = random.normal(size=(n, max(rank, 1))), random.normal(size=(max(rank, 1), n))
    return (size * (rank > 0) * factors[0] @ factors[1]).astype(np.float32)


@pytest.mark.thorough(except_for=["40-7-16-1.0"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(("n", "rank", "width"), [(1, 1, 128), (3, 3, 128), (130, 130, 128), (40, 40, 16), (40, 7, 16)])
def test_householder_loop_is_a_qr_decomposition(n, rank, width, size):
    a = matrix(n, rank, size).astype(np.float64)
    q = np.asarray(soap.orthonormal(jnp.asarray(a, jnp.float32), width), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(n), atol=2e-6)
    r = q.T @ a
    assert np.abs(np.tril(r, -1)).max(initial=0) <= 1e-6 * np.linalg.norm(a)
    if rank == n <= 3:  # for a matrix of full rank it is unique up to signs
        np.testing.assert_allclose(np.abs(q), np.abs(np.linalg.qr(a)[0]), rtol=1e-4, atol=1e-5)


def test_the_basis_of_a_zero_matrix_is_the_identity():
    np.testing.assert_array_equal(np.abs(soap.orthonormal(jnp.zeros((5, 5)), 2)), np.eye(5))


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
            grads = {name: jnp.asarray(random.normal(size=leaf.shape), jnp.float32) for name, leaf in params.items()}
            state = step(state, grads)
        return state.params

    calls = run()
    used, loops_of = [], soap.in_loops

    def in_loops(turn, leaves):
        used.append(len(leaves))
        return loops_of(turn, leaves, library_eigh)

    monkeypatch.setattr(soap, "one_by_one", in_loops)
    loops = run()
    assert used == [len(SHAPES)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), loops, calls)


@pytest.mark.thorough
def test_tpus_compile_one_program_per_matrix_size():
    """In the lowered program, neither more leaves nor more rows add a decomposition."""

    def decompositions(shapes):
        optimizer = jstep.soap(0.01)
        state = jax.eval_shape(
            lambda: jstep.TrainState.create([jnp.zeros(shape, jnp.float32) for shape in shapes], optimizer)
        )
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        text = step.trace(state, state.params).lower(lowering_platforms=("tpu",)).as_text()
        assert "lapack" not in text
        return len(re.findall(r"custom_call @Eigh\(", text)), len(re.findall(r"custom_call @Qr\(", text))

    assert decompositions([(600, 300)]) == (2, 0)
    assert decompositions([(600, 300)] * 5 + [(600, 600), (300,)]) == (2, 0)


def test_cpus_and_gpus_call_their_libraries():
    optimizer = jstep.soap(0.01)
    state = jstep.TrainState.create([jnp.zeros((3, 2))] * 2, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer)).trace(state, state.params)
    for platform, library in (("cpu", "lapack_ssyevd"), ("cuda", "cusolver_syevd")):
        text = step.lower(lowering_platforms=(platform,)).as_text()
        assert library in text
        assert "@Eigh(" not in text
