"""Trajectories compared with other libraries: Optax, torch, schedulefree, pytorch_optimizer."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden import (
    DECAY,
    DECAYED,
    RATE,
    STEPS,
    assert_close,
    gradients,
    initial_params,
    run_jstep,
    run_optax,
    run_torch,
    table_schedule,
)
from optax import contrib

import jstep

LR, WD, MASK = table_schedule(RATE), table_schedule(DECAY), list(DECAYED)
OPTAX_MASK = {name: name in DECAYED for name in "abc"}
ADAM = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6}
OPTAX_ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-6}
DECAYING = {"weight_decay": WD, "weight_decay_mask": MASK}
OPTAX_DECAY = {"weight_decay": WD, "mask": OPTAX_MASK}


def decayed(direction: optax.GradientTransformation) -> optax.GradientTransformation:
    """Add decoupled weight decay, multiplied by the rate, to a transformation without weight decay."""
    return optax.chain(direction, optax.add_decayed_weights(WD, mask=OPTAX_MASK), optax.scale_by_learning_rate(LR))


BY_OPTAX: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda: jstep.adamw(LR, **ADAM, **DECAYING), lambda: optax.adamw(LR, **OPTAX_ADAM, **OPTAX_DECAY)),
    "lion": (lambda: jstep.lion(LR, **DECAYING), lambda: optax.lion(LR, **OPTAX_DECAY)),
    "nadamw": (lambda: jstep.nadam(LR, **ADAM, **DECAYING), lambda: optax.nadamw(LR, **OPTAX_ADAM, **OPTAX_DECAY)),
    "radam": (lambda: jstep.radam(LR, **ADAM), lambda: optax.radam(LR, **OPTAX_ADAM)),
    "radam-decay": (lambda: jstep.radam(LR, **ADAM, **DECAYING), lambda: decayed(optax.scale_by_radam(**OPTAX_ADAM))),
    "lamb": (lambda: jstep.lamb(LR, **ADAM, **DECAYING), lambda: optax.lamb(LR, **OPTAX_ADAM, **OPTAX_DECAY)),
    "lars": (
        lambda: jstep.lars(LR, 0.8, trust_coefficient=0.1, trust_ratio_mask=MASK, weight_decay=0.1),
        lambda: optax.lars(LR, 0.1, True, 0.1, trust_ratio_mask=OPTAX_MASK, momentum=0.8),
    ),
    "adafactor": (
        lambda: jstep.adafactor(LR, min_dim_size_to_factor=3),
        lambda: optax.adafactor(LR, min_dim_size_to_factor=3),
    ),
    "adafactor-momentum": (
        lambda: jstep.adafactor(LR, momentum=0.9, clip_threshold=None, scale_parameter=False),
        lambda: optax.adafactor(LR, momentum=0.9, clipping_threshold=None, multiply_by_parameter_scale=False),
    ),
    "adafactor-without-rate": (jstep.adafactor, lambda: optax.adafactor()),
    "ademamix": (
        lambda: jstep.ademamix(LR, **ADAM, beta3=0.999, alpha=4.0, **DECAYING),
        lambda: contrib.ademamix(LR, 0.9, 0.99, 0.999, 4.0, eps=1e-6, **OPTAX_DECAY),
    ),
    "prodigy": (
        lambda: jstep.prodigy(LR, d0=1e-2, bias_correction=True, weight_decay=0.1),
        lambda: contrib.prodigy(LR, estim_lr0=1e-2, weight_decay=0.1),
    ),
    "prodigy-safeguard": (
        lambda: jstep.prodigy(LR, d0=1e-2, bias_correction=True, safeguard_warmup=True, beta3=0.9),
        lambda: contrib.prodigy(LR, estim_lr0=1e-2, safeguard_warmup=True, betas=(0.9, 0.999), beta3=0.9),
    ),
    "schedule_free": (
        lambda: jstep.schedule_free_adamw(0.1, **ADAM),
        lambda: contrib.schedule_free_adamw(0.1, **OPTAX_ADAM),
    ),
    "adadelta": (lambda: jstep.adadelta(LR, 0.9, 1e-6), lambda: optax.adadelta(LR, 0.9, 1e-6)),
    "adamax": (lambda: jstep.adamax(LR, **ADAM), lambda: optax.adamax(LR, **OPTAX_ADAM)),
    "adabelief": (
        lambda: jstep.adabelief(LR, 0.9, 0.99, 1e-6, 1e-8),
        lambda: optax.adabelief(LR, 0.9, 0.99, 1e-6, 1e-8),
    ),
    "madgrad": (
        lambda: jstep.madgrad(LR, 0.8, 0.01, 1e-4),
        lambda: contrib.madgrad(LR, 0.8, 0.01, 1e-4),
    ),
    "yogi": (lambda: jstep.yogi(LR, 0.9, 0.99), lambda: optax.yogi(LR, 0.9, 0.99)),
    "novograd": (lambda: jstep.novograd(LR, weight_decay=0.1), lambda: optax.novograd(LR, weight_decay=0.1)),
    "signum": (lambda: jstep.signum(LR, 0.9), lambda: optax.signum(LR, beta=0.9)),
    "adopt": (lambda: jstep.adopt(LR, 0.9, 0.99), lambda: contrib.adopt(LR, 0.9, 0.99)),
}


@pytest.mark.thorough(except_for=["adafactor-without-rate", "prodigy-safeguard"])
@pytest.mark.parametrize("name", BY_OPTAX)
def test_matches_optax(name: str) -> None:
    optimizer, reference = BY_OPTAX[name]
    assert_close(run_jstep(optimizer())[0], run_optax(reference()), rtol=1e-4, atol=1e-5)


def test_low_precision_moments_match_optax() -> None:
    with pytest.warns(DeprecationWarning, match="m_dtype"):
        optimizer = jstep.adamw(LR, **ADAM, m_dtype=jnp.bfloat16, **DECAYING)
    reference = optax.adamw(LR, **OPTAX_ADAM, mu_dtype=jnp.bfloat16, **OPTAX_DECAY)
    found, state = run_jstep(optimizer)
    assert state.slots["m"]["a"].dtype == jnp.bfloat16
    # Rounding m in the other direction changes it by one part in 256.
    assert_close(found, run_optax(reference), rtol=1e-2, atol=1e-2)


BY_TORCH: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda: jstep.sgd(LR, **DECAYING), lambda t, g: t.SGD(g, 0.1)),
    "sgd-momentum": (
        lambda: jstep.sgd(LR, 0.9, 0.3, **DECAYING),
        lambda t, g: t.SGD(g, 0.1, momentum=0.9, dampening=0.3),
    ),
    "sgd-nesterov": (
        lambda: jstep.sgd(LR, 0.9, use_nesterov=True, **DECAYING),
        lambda t, g: t.SGD(g, 0.1, momentum=0.9, nesterov=True),
    ),
    "adamw": (
        lambda: jstep.adamw(LR, **ADAM, **DECAYING),
        lambda t, g: t.AdamW(g, 0.1, betas=(0.9, 0.99), eps=1e-6),
    ),
    "amsgrad": (
        lambda: jstep.adamw(LR, **ADAM, **DECAYING, amsgrad=True),
        lambda t, g: t.AdamW(g, 0.1, betas=(0.9, 0.99), eps=1e-6, amsgrad=True),
    ),
    "nadam": (
        lambda: jstep.nadam(LR, **ADAM, momentum_decay=0.004, **DECAYING),
        lambda t, g: t.NAdam(g, 0.1, (0.9, 0.99), 1e-6, momentum_decay=0.004, decoupled_weight_decay=True),
    ),
    "adamax": (lambda: jstep.adamax(LR, **ADAM), lambda t, g: t.Adamax(g, 0.1, (0.9, 0.99), 1e-6)),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_matches_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    optimizer, reference = BY_TORCH[name]
    changing = {"lr": RATE} | ({} if name == "adamax" else {"weight_decay": DECAY})
    assert_close(
        run_jstep(optimizer())[0],
        run_torch(lambda groups: reference(torch.optim, groups), changing),
        rtol=1e-4,
        atol=1e-5,
    )


def test_rprop_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    assert_close(
        run_jstep(jstep.rprop(0.05))[0], run_torch(lambda groups: torch.optim.Rprop(groups, 0.05), {}), atol=1e-5
    )


def test_muon_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    shapes = {"a": (4, 6), "b": (6, 4)}
    found = run_jstep(jstep.muon(LR, **DECAYING), shapes)[0]
    reference = run_torch(
        lambda groups: torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw"),
        {"lr": RATE, "weight_decay": DECAY},
        shapes,
    )
    # torch multiplies in bfloat16, so that each step is off by one or two percent.
    assert_close(found, reference, rtol=0.0, atol=3e-2 * float(RATE.sum()))


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("power", [2.0, 1.0])
def test_schedule_free_matches_schedulefree(warmup: int, power: float) -> None:
    facebook, torch = pytest.importorskip("schedulefree"), pytest.importorskip("torch")
    free = {"weight_lr_power": power, "r": 0.5, "weight_decay": 0.1, "weight_decay_mask": MASK}
    rate = jstep.linear_warmup(0.1, warmup)
    for optimizer, reference in (
        (
            jstep.schedule_free_adamw(rate, 0.9, 0.99, **free),
            lambda g: facebook.AdamWScheduleFree(
                g, 0.1, (0.9, 0.99), weight_decay=0.1, warmup_steps=warmup, r=0.5, weight_lr_power=power
            ),
        ),
        (
            jstep.schedule_free_sgd(rate, 0.9, **free),
            lambda g: facebook.SGDScheduleFree(
                g, 0.1, 0.9, weight_decay=0.1, warmup_steps=warmup, r=0.5, weight_lr_power=power
            ),
        ),
    ):
        created = []

        def make(groups: Any, reference: Any = reference, created: list[Any] = created) -> Any:
            created.append(reference(groups))
            created[0].train()
            return created[0]

        found, state = run_jstep(optimizer)
        assert_close(found, run_torch(make, {}), rtol=1e-4, atol=1e-5)
        created[0].eval()
        averages = [g["params"][0].detach().numpy() for g in created[0].param_groups]
        for x, average in zip(jstep.schedule_free_params(state).values(), averages, strict=True):
            np.testing.assert_allclose(x, average, rtol=1e-4, atol=1e-5)
    assert torch


@pytest.mark.parametrize("guard", [False, True])
def test_prodigy_matches_pytorch_optimizer(guard: bool) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    optimizer = jstep.prodigy(0.7, d0=1e-2, growth_rate=1.5, safeguard_warmup=guard, weight_decay=0.1)
    assert_close(run_jstep(optimizer)[0], run_prodigy(library, guard), rtol=1e-4, atol=1e-5)


def run_prodigy(library: Any, guard: bool) -> list[dict[str, Any]]:
    import torch

    tensors = {n: torch.nn.Parameter(torch.tensor(x, dtype=torch.float32)) for n, x in initial_params().items()}
    optimizer = library.Prodigy(
        tensors.values(),
        lr=0.7,
        d0=1e-2,
        growth_rate=1.5,
        safeguard_warmup=guard,
        weight_decay=0.1,
        weight_decouple=True,
    )
    trajectory = []
    for n in range(STEPS):
        for name, grad in gradients(n).items():
            tensors[name].grad = torch.tensor(grad, dtype=torch.float32)
        optimizer.step()
        trajectory.append({name: tensor.detach().numpy().copy() for name, tensor in tensors.items()})
    return trajectory


@pytest.mark.parametrize("max_dim", [10000, 4])
def test_soap_matches_pytorch_optimizer(max_dim: int) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    shapes = {"a": (5,), "b": (4, 4) if max_dim > 4 else (4, 5), "c": ()}
    optimizer = jstep.soap(LR, weight_decay=0.1, precondition_frequency=3, max_precondition_dim=max_dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = run_torch(
            lambda groups: library.SOAP(
                [{**g, "weight_decay": 0.1} for g in groups], precondition_frequency=3, max_precondition_dim=max_dim
            ),
            {"lr": RATE},
            shapes,
        )
    assert_close(run_jstep(optimizer, shapes)[0], reference, rtol=1e-3, atol=1e-4)


def test_adan_matches_pytorch_optimizer() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    found = run_jstep(jstep.adan(LR, weight_decay=0.1))[0]
    reference = run_torch(
        lambda groups: library.Adan(
            [{**g, "weight_decay": 0.1} for g in groups], betas=(0.98, 0.92, 0.99), weight_decouple=False
        ),
        {"lr": RATE},
    )
    assert_close(found, reference, rtol=1e-3, atol=1e-4)
