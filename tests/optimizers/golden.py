"""Trajectories of jstep and of references: 12 steps with scheduled rate and decay, on leaves of
several shapes."""

import types

import jax
import jax.numpy as jnp
import numpy as np

import jstep

STEPS = 12
RATE = np.linspace(0.3, 0.05, STEPS)
DECAY = np.linspace(0.05, 0.2, STEPS)
RISING = np.linspace(0.5, 0.95, STEPS)
SHAPES = {"a": (3,), "b": (4, 3), "c": ()}
DECAYED = ("a", "b")
"""The leaves with weight decay; the mask excludes `c`."""


def table_schedule(values):
    """Return a schedule that reads a table, so that both sides use the same numbers."""
    return lambda step: jnp.asarray(values, jnp.float32)[step]


def initial_params(shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.float64(np.float32(rng.normal(size=shape))) for name, shape in shapes.items()}


def gradients(step, shapes=SHAPES):
    """Return random gradients of varying scale, with some exact zeros."""
    rng = np.random.default_rng(100 + step)
    drawn = {name: rng.normal(size=shape) * 1.5 ** (step % 5) for name, shape in shapes.items()}
    return {
        name: np.float64(np.float32(np.where(np.abs(x) < 0.1, 0.0, x))) for name, x in drawn.items()
    }


def run_jstep(optimizer, shapes=SHAPES, steps=STEPS, dtype=jnp.float32):
    """Return the parameters after each step, and the last state."""
    state = jstep.TrainState.create(jax.tree.map(dtype, initial_params(shapes)), optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    trajectory = []
    for n in range(steps):
        state = step(state, jax.tree.map(dtype, gradients(n, shapes)))
        trajectory.append(jax.tree.map(np.asarray, state.params))
    return trajectory, state


def run_equation(rule, hyper, shapes=SHAPES, steps=STEPS, **static):
    """Return the trajectory of a rule of equations.py; arrays in hyper are schedules, wd applies
    only to DECAYED."""
    params, memory = initial_params(shapes), {name: {} for name in shapes}
    trajectory, shared = [], {}
    for n in range(steps):
        grads = gradients(n, shapes)
        at = {
            name: value[n] if isinstance(value, np.ndarray) else value
            for name, value in hyper.items()
        }
        if "weight_lr_power" in at:
            shared["lr_max"] = max(shared.get("lr_max", 0.0), at["lr"])
            weight = (n + 1) ** at["r"] * shared["lr_max"] ** at["weight_lr_power"]
            shared["weight_sum"] = shared.get("weight_sum", 0.0) + weight
        for name in shapes:
            h = types.SimpleNamespace(**{"wd": 0.0, "t": n + 1, **at, **shared})
            h.wd = h.wd if name in DECAYED else 0.0
            h.trusts = name in DECAYED
            params[name] = rule(grads[name], params[name], memory[name], h, **static)
        trajectory.append(dict(params))
    return trajectory


def run_torch(make, hyper, shapes=SHAPES, steps=STEPS, decay="weight_decay"):
    """Return the trajectory of a torch optimizer; arrays in hyper are set in its groups before each
    step."""
    import torch

    tensors = {
        n: torch.nn.Parameter(torch.tensor(x, dtype=torch.float32))
        for n, x in initial_params(shapes).items()
    }
    groups = [
        {"params": [tensor], **({} if name in DECAYED else {decay: 0.0})}
        for name, tensor in tensors.items()
    ]
    optimizer = make(groups)
    trajectory = []
    for n in range(steps):
        for group, name in zip(optimizer.param_groups, tensors, strict=True):
            for key, values in hyper.items():
                if key != decay or name in DECAYED:
                    group[key] = float(values[n])
        for name, grad in gradients(n, shapes).items():
            tensors[name].grad = torch.tensor(grad, dtype=torch.float32)
        optimizer.step()
        trajectory.append(
            {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
        )
    return trajectory


def assert_close(found, expected, rtol=2e-5, atol=2e-6):
    """Check that both trajectories agree, leaf by leaf and step by step."""
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in one:
            np.testing.assert_allclose(
                one[name], other[name], rtol=rtol, atol=atol, err_msg=f"{name} after {n + 1}"
            )
