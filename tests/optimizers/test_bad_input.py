"""Invalid arguments of optimizers and blocks, and the error messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}, "scale": jnp.ones(())}
GRADS = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}, "scale": jnp.ones(())}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jstep.adamw(float), TypeError, "learning_rate=float: .* got a class"),
        (lambda: jstep.adamw(amsgrad="no"), TypeError, "amsgrad='no': must be True or False"),
        (lambda: jstep.adamw(m_dtype=int), TypeError, "m_dtype=.*floating"),
        (lambda: jstep.adamw(m_dtype="bf"), TypeError, "m_dtype='bf'.*floating"),
        (lambda: jstep.adamw(weight_decay=-0.1), ValueError, "weight_decay=-0.1"),
        (lambda: jstep.adamw(weight_decay_mask=3), TypeError, "weight_decay_mask=3"),
        (lambda: jstep.sgd(0.1, use_nesterov=True), ValueError, "use_nesterov=True.*momentum"),
        (lambda: jstep.sgd(0.1, 0.9, 0.5, True), ValueError, "use_nesterov=True.*dampening=0.5"),
        (lambda: jstep.sgd(0.1, 2.0), ValueError, "momentum=2"),
        (lambda: jstep.lion(beta2=1.0), ValueError, "beta2=1.0"),
        (lambda: jstep.lars(0.1, use_nesterov=1), TypeError, "use_nesterov=1"),
        (lambda: jstep.radam(threshold=3.0), ValueError, "threshold=3"),
        (lambda: jstep.nadam(momentum_decay=-1.0), ValueError, "momentum_decay=-1"),
        (lambda: jstep.adafactor(min_dim_size_to_factor=0), ValueError, "min_dim_size_to_factor=0"),
        (lambda: jstep.adafactor(epsilon=0.0), ValueError, "epsilon=0"),
        (lambda: jstep.adafactor(relative_step=None), TypeError, "relative_step=None"),
        (lambda: jstep.muon(ns_steps=0), ValueError, "ns_steps=0"),
        (lambda: jstep.muon(ns_coefficients=(1.0, 2.0)), TypeError, "ns_coefficients"),
        (lambda: jstep.muon(ns_coefficients=[(1.0, 2.0, 3.0)] * 4), ValueError, "got 4 for ns_steps=5"),
        (lambda: jstep.muon(ns_coefficients=(1.0, 2.0, np.nan)), TypeError, "ns_coefficients"),
        (lambda: jstep.muon(ns_coefficients="jordn"), ValueError, "'jordn': .*'jordan', 'dion', 'polar_express'"),
        (lambda: jstep.orthogonalize(6, "dion"), ValueError, "ns_steps=6: must be at most 5.*'polar_express'"),
        (lambda: jstep.orthogonalize(0, "polar_express"), ValueError, "ns_steps=0"),
        (lambda: jstep.orthogonalize("5"), TypeError, "ns_steps='5': must be an integer"),
        (lambda: jstep.muon(normalization="spectral"), ValueError, "normalization='spectral'.*'schatten'"),
        (lambda: jstep.muon(normalization=None), ValueError, "normalization=None"),
        (lambda: jstep.muon(scale="rsm"), ValueError, "scale='rsm'.*'rms'"),
        (lambda: jstep.muon(axes=(0, 1)), TypeError, r"axes=\(0, 1\): must be a function"),
        (lambda: jstep.muon(ns_dtype=jnp.int8), TypeError, "ns_dtype"),
        (lambda: jstep.schedule_free_adamw(beta1=lambda step: 0.9), TypeError, "beta1=.*fixed"),
        (lambda: jstep.schedule_free_sgd(beta1=0.0), ValueError, "beta1=0.0"),
        (lambda: jstep.soap(precondition_frequency=0), ValueError, "precondition_frequency=0"),
        (lambda: jstep.soap(precondition_frequency=2.5), TypeError, "precondition_frequency=2.5"),
        (lambda: jstep.prodigy(d0=0.0), ValueError, "d0=0"),
        (lambda: jstep.prodigy(growth_rate=0.5), ValueError, "growth_rate=0.5"),
        (lambda: jstep.prodigy(bias_correction=1.0), TypeError, "bias_correction=1.0"),
        (lambda: jstep.ademamix(alpha=-1.0), ValueError, "alpha=-1"),
        (lambda: jstep.rprop(lambda step: 0.1), TypeError, "learning_rate=.*got a function; it is fixed"),
        (lambda: jax.jit(jstep.rprop)(0.1), TypeError, "learning_rate=.*got a traced array; it is fixed"),
        (lambda: jstep.rprop(jstep.held("rate", 0.1)), TypeError, "learning_rate=.*got a held value; it is fixed"),
        (lambda: jstep.rprop(0.1, eta_plus=1.0), ValueError, "eta_plus=1"),
        (lambda: jstep.scale(np.nan), ValueError, "factor=nan"),
        (lambda: jstep.trace(1.5), ValueError, "momentum=1.5"),
        (lambda: jstep.add_weight_decay("x"), TypeError, "weight_decay='x'"),
    ],
)
def test_constructors_validate_arguments(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("make", [jstep.muon, jstep.orthogonalize])
def test_muon_on_a_vector_suggests_a_partition(make) -> None:
    with pytest.raises(
        ValueError, match=r"'dense/bias' has shape \(3,\).*jstep\.partition\(.*jstep\.muon.*jstep\.adamw"
    ):
        jstep.TrainState.create(PARAMS, make())


def test_the_suggested_partition_works() -> None:
    optimizer = jstep.partition(
        {"muon": jstep.muon(1e-3), "adamw": jstep.adamw(1e-3)},
        lambda path, leaf: "muon" if leaf.ndim == 2 and "embed" not in path else "adamw",
    )
    state = jstep.TrainState.create(PARAMS, optimizer)
    state = jstep.apply_gradients(state, GRADS, optimizer)
    assert jstep.get_slot(state, "muon/momentum", "dense/kernel").shape == (4, 3)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (lambda path, leaf: 1, r"axes: must return \(in, out\) for 'w'"),
        (lambda path, leaf: (0, 0), "two parts of different axes"),
        (lambda path, leaf: (0, 5), "must be axes of shape"),
        (lambda path, leaf: ((), 1), "two parts of different axes"),
    ],
)
def test_invalid_axes_of_muon(axes, message) -> None:
    with pytest.raises(ValueError, match=message):
        jstep.TrainState.create({"w": jnp.ones((4, 3))}, jstep.muon(axes=axes))


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: jstep.adamw(weight_decay_mask=mask),
        lambda mask: jstep.sgd(0.1, weight_decay_mask=mask),
        lambda mask: jstep.lars(0.1, weight_decay_mask=mask),
        lambda mask: jstep.soap(weight_decay_mask=mask),
        lambda mask: jstep.schedule_free_adamw(weight_decay_mask=mask),
        lambda mask: jstep.chain(jstep.add_weight_decay(0.1, mask), jstep.scale(-0.1)),
        lambda mask: jstep.lars(0.1, trust_ratio_mask=mask),
        lambda mask: jstep.partition({"all": jstep.adamw(weight_decay_mask=mask)}, lambda path, leaf: "all"),
    ],
)
def test_unmatched_masks_suggest_the_nearest_path(make) -> None:
    optimizer = make(["dense/kernle"])
    with pytest.raises(ValueError, match="mask: 'dense/kernle' matches no parameter; nearest: 'dense/kernel'"):
        jstep.TrainState.create(PARAMS, optimizer)  # before the first step


def test_unmatched_factors_raise_when_the_state_is_created() -> None:
    with pytest.raises(ValueError, match="factors: 'dense/kernle' matches no parameter; nearest: 'dense/kernel'"):
        jstep.TrainState.create(PARAMS, jstep.chain(jstep.adam(), jstep.scale_updates({"dense/kernle": 0.5})))


def test_schedule_free_params_without_its_slots() -> None:
    state = jstep.TrainState.create(PARAMS, jstep.adam())
    with pytest.raises(ValueError, match=r"\['m', 'start_step', 'v'\].*schedule_free_adamw and schedule_free_sgd"):
        jstep.schedule_free_params(state)
    with pytest.raises(TypeError, match="must be a TrainState"):
        jstep.schedule_free_params({"w": 1.0})
