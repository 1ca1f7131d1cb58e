"""Rows of the pages "From …" that are measured: the original's code beside jstep's, over 60 updates
or 150 rates.

A table whose last column is "off by" is measured: the first code of a row is evaluated with the
original library, the second with jstep, so that the page *is* the table of this test.
`dev/peers.sh` installs the other libraries and runs all rows. A page names the day on which that
was done last, and the versions.

    python tests/docs/measured_rows.py  # prints how far each row of the installed libraries is off
"""

import copy
import functools
import importlib
import math
import os
import pathlib
import re
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jstep

os.environ.setdefault("KERAS_BACKEND", "jax")
PAGES = pathlib.Path(__file__).parents[2] / "docs" / "from"
UPDATES, KEPT = 60, (9, 59)
"""The number of updates, and those after which parameters are compared."""
RATES = (*range(UPDATES), 60, 61, 65, 70, 80, 90, 100, 110, 119, 120, 121, 125, 130, 140, 149)
"""The updates whose rates are compared, also beyond the end of a schedule, or up to the last one
that there is."""
AVERAGED = (0, 100, 110, 159)
"""The updates after which averages are compared: ema_pytorch's begins at the 101st."""
SIZES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Of the gradients, one leaf for each."""
BOUND = 1e-5
"""Of the distance that a leaf has moved; a row that is off by more says by how much."""
RATE = (1e-2, 5e-3, UPDATES // 2)
"""`lr` on the pages: halved in the middle, since optimizers differ in what a new rate applies
to."""
MODULES = {
    "torch": ["torch"],
    "nn": ["torch.nn"],
    "lr_scheduler": ["torch.optim.lr_scheduler"],
    "swa_utils": ["torch.optim.swa_utils"],
    "optax": ["optax"],
    "keras": ["keras"],
    "transformers": ["transformers.optimization"],
    "tf": ["tensorflow.compat.v1"],
    "edm": ["torch"],
    "get_lr": [],
    "diffusers": ["diffusers.optimization", "diffusers.training_utils"],
    "timm": ["timm.scheduler", "timm.utils"],
    "ema_pytorch": ["ema_pytorch"],
}
"""The first part of a dotted name on the pages, and what is imported for it."""


MOMENTUM = "momentum"
"""The end of the code of a row, whose first cell says "its momentum", not its rate."""


class Row(NamedTuple):
    page: str
    theirs: str
    ours: str
    off_by: float


def rows():
    """Return the measured rows of all pages."""
    found = []
    for page in sorted(PAGES.glob("*.md")):
        is_measured = False
        for line in page.read_text("utf-8").splitlines():
            cells = line.strip().strip("|").split(" | ") if line.startswith("|") else []
            if not cells:
                is_measured = False
            elif cells[-1].strip() == "off by":
                is_measured = True
            elif is_measured and not set(line) <= set("|- :"):
                theirs, ours = (re.search(r"`([^`]+)`", cell) for cell in cells[:2])
                share = re.match(r"([\d.]+) %", cells[2].strip()) if len(cells) > 2 else None
                off_by = float(share.group(1)) / 100 if share else 0.0
                code = theirs.group(1) + f" {MOMENTUM}" * ("its momentum" in cells[0])
                found.append(Row(page.stem, code, ours.group(1), off_by))
    return found


def gradients(n):
    """The gradients of update n, one leaf for each size; none depends on the parameters."""
    rng = np.random.default_rng(n)
    return {f"leaf{i}": size * rng.normal(size=(2, 3)) for i, size in enumerate(SIZES)}


def initial():
    rng = np.random.default_rng(1000)
    return {f"leaf{i}": 0.1 * rng.normal(size=(2, 3)) for i in range(len(SIZES))}


def rate_of(update):
    return RATE[update >= RATE[2]]


# The originals.


def modules_of(code):
    """Return what the code needs, by the names that it uses."""
    return {name: MODULES[name] for name in re.findall(r"\b[a-z_]+\b", code) if name in MODULES}


@functools.cache
def computed(code):
    """Return what an original computes: rates of the updates, or how far parameters have moved,
    [`KEPT`, leaf, …]."""
    names = {}
    for name, modules in modules_of(code).items():
        imported = [importlib.import_module(module) for module in modules]
        names[name] = SCRIPTS[name] if name in SCRIPTS else sys.modules.get(name, imported[0])
    if code.endswith(f" {MOMENTUM}"):
        code, names[MOMENTUM] = code.removesuffix(f" {MOMENTUM}"), True
    if "get_lr" in names:
        return np.array([eval(code, names)(n) for n in RATES])
    run = {"optax": _of_optax, "keras": _of_keras, "tf": _of_tensorflow}.get(
        next(iter(names)), _of_torch
    )
    with warnings.catch_warnings(), jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        with jax.legacy_prng_key("allow"):
            return np.asarray(run(code, names), np.float64)


def _of_torch(code, names):
    import torch

    model = torch.nn.ParameterDict(
        {k: torch.nn.Parameter(torch.tensor(v)) for k, v in initial().items()}
    )
    p = list(model.values())
    opt = torch.optim.SGD(p, lr=RATE[0])
    given = {**names, "p": p, "lr": RATE[0], "model": model, "opt": opt}
    if "clip_grad" in code:
        return _trajectory_of_torch(torch, model, opt, before=lambda: eval(code, dict(given)))
    made = eval(code, given)
    if isinstance(made, torch.optim.Optimizer):
        return _trajectory_of_torch(torch, model, made)
    if hasattr(made, "get_last_lr") or hasattr(made, "step_update"):
        return _rates_of_torch(opt, made, MOMENTUM in names)
    return _trajectory_of_torch(torch, model, opt, average=made)


def _rates_of_torch(opt, scheduler, of_momentum):
    rates = []
    for n in range(RATES[-1] + 1):
        rates += [opt.param_groups[0][MOMENTUM if of_momentum else "lr"]] * (n in RATES)
        opt.step()
        try:
            scheduler.step_update(n + 1) if hasattr(scheduler, "step_update") else scheduler.step()
        except ValueError:  # OneCycleLR has no rate after its end
            return rates[:UPDATES]
    return rates


def _trajectory_of_torch(torch, model, opt, before=lambda: None, average=None):
    kept, wanted = [], KEPT if average is None else AVERAGED
    for n in range(wanted[-1] + 1):
        for name, gradient in gradients(n).items():
            model[name].grad = torch.tensor(gradient)
        for group in opt.param_groups:
            group["lr"] = rate_of(n)
        before()
        opt.step()
        if average is not None:
            _update_average(average, model, n)
        if n in wanted:
            kept.append(_values(model if average is None else _averaged(average, model)))
    return kept


def _update_average(average, model, n):
    if hasattr(average, "update_parameters"):
        average.update_parameters(model)
    elif hasattr(average, "optimization_step"):  # diffusers
        average.step(model.parameters())
    elif hasattr(average, "ema_model"):
        average.update()
    else:  # timm, as its train.py calls it
        average.update(model, step=n + 1)


class EDM:
    """The average of NVlabs/edm, whose training loop is one function: half-lives in images, of a
    batch of 64."""

    def __init__(self, model, *, halflife, rampup_ratio):
        self.module, self.images = copy.deepcopy(model), 0
        self.halflife, self.rampup_ratio = halflife, rampup_ratio

    def update(self, model, step):
        del step
        halflife = min(self.halflife, self.images * self.rampup_ratio)
        beta = 0.5 ** (64 / max(halflife, 1e-8))
        for average, p in zip(self.module.parameters(), model.parameters(), strict=True):
            average.data.copy_(p.detach().lerp(average.data, beta))
        self.images += 64


def get_lr_of(learning_rate, warmup_iters, lr_decay_iters, min_lr):
    """nanoGPT's `get_lr`, whose arguments are globals of its script."""

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
        return min_lr + coeff * (learning_rate - min_lr)

    return get_lr


SCRIPTS = {"edm": EDM, "get_lr": get_lr_of}
"""What is part of a script in the original, and cannot be imported."""


def _averaged(average, model):
    if hasattr(average, "shadow_params"):
        return dict(zip(model.keys(), average.shadow_params, strict=True))
    return getattr(average, "ema_model", getattr(average, "module", None))


def _values(tree):
    leaves = {
        name: np.array(leaf.detach() if hasattr(leaf, "detach") else leaf)
        for name, leaf in tree.items()
    }
    return [leaves[name] - start for name, start in initial().items()]


def _of_optax(code, names):
    optax = names["optax"]
    scheduled = optax.join_schedules([lambda n: RATE[0], lambda n: RATE[1]], [RATE[2]])
    made = eval(code, {**names, "lr": scheduled, "jnp": jnp})
    if not isinstance(made, optax.GradientTransformation):
        return [made(jnp.asarray(n)) for n in RATES]
    if "clip" in code:
        made = optax.chain(made, optax.sgd(scheduled))
    params = {name: jnp.asarray(leaf) for name, leaf in initial().items()}
    memory, kept = made.init(params), []

    @jax.jit
    def step(params, memory, grads):
        updates, memory = made.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory

    for n in range(UPDATES):
        params, memory = step(params, memory, jax.tree.map(jnp.asarray, gradients(n)))
        if n in KEPT:
            kept.append(_values(params))
    return kept


def _of_keras(code, names):
    keras = names["keras"]
    keras.backend.set_floatx("float64")
    try:
        scheduled = keras.optimizers.schedules.PiecewiseConstantDecay([RATE[2] - 1], list(RATE[:2]))
        made = eval(code, {**names, "lr": scheduled})
        if isinstance(made, keras.optimizers.schedules.LearningRateSchedule):
            return [made(n) for n in RATES]
        variables = [
            keras.Variable(leaf, dtype="float64", name=f"p{i}")
            for i, leaf in enumerate(initial().values())
        ]
        made.build(variables)
        kept, wanted = [], AVERAGED if made.use_ema else KEPT
        for n in range(wanted[-1] + 1):
            made.apply([jnp.asarray(leaf) for leaf in gradients(n).values()])
            if n in wanted:
                averaged = made._model_variables_moving_average if made.use_ema else variables
                kept.append(_values(dict(zip(initial(), averaged, strict=True))))
        return kept
    finally:
        keras.backend.set_floatx("float32")


def _of_tensorflow(code, names):
    tf = names["tf"]
    step = tf.Variable(0, dtype=tf.int64)
    made = (
        None
        if "clip" in code
        else eval(code, {**names, "step": step, "lr": lambda: rate_of(int(step))})
    )
    if callable(made):
        rates = []
        for n in RATES:
            step.assign(n)
            rates.append(float(made()))
        return rates
    variables = [tf.Variable(leaf) for leaf in initial().values()]
    is_average = isinstance(made, tf.train.ExponentialMovingAverage)
    optimizer = tf.train.GradientDescentOptimizer(lambda: rate_of(int(step)))
    if is_average:
        made.apply(variables)  # creates the averages, as a graph does before the first update
    elif made is not None:
        optimizer = made
    kept, wanted = [], AVERAGED if is_average else KEPT
    for n in range(wanted[-1] + 1):
        g = [tf.constant(leaf) for leaf in gradients(n).values()]
        if made is None:
            g, _ = eval(code, {**names, "g": g})
        optimizer.apply_gradients(zip(g, variables, strict=True))
        if is_average:
            made.apply(variables)
        step.assign(n + 1)
        if n in wanted:
            found = [(made.average(v) if is_average else v).numpy() for v in variables]
            kept.append(_values(dict(zip(initial(), found, strict=True))))
    return kept


# jstep.


def in_jstep(row, shape):
    """Return what the code of jstep computes, like `computed`."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lr = jstep.join(list(RATE[:2]), [RATE[2]])
        public = {name: getattr(jstep, name) for name in jstep.__all__}
        made = eval(row.ours, {**public, "jstep": jstep, "jax": jax, "jnp": jnp, "lr": lr})
        if len(shape) == 1:
            return np.array([made(jnp.asarray(n)) for n in RATES[: shape[0]]], np.float64)
        wanted = KEPT
        if isinstance(made, jstep.ExponentialMovingAverage):
            wanted = AVERAGED
            made = jstep.with_moving_average(jstep.sgd(lr), made)
        elif row.ours.startswith("clip"):
            made = jstep.chain(made, jstep.sgd(lr))
        state = jstep.TrainState.create(
            {name: jnp.asarray(leaf) for name, leaf in initial().items()}, made
        )
        update = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, made))
        kept = []
        for n in range(wanted[-1] + 1):
            state = update(state, jax.tree.map(jnp.asarray, gradients(n)))
            if n in wanted:
                kept.append(
                    _values(state.params if wanted is KEPT else jstep.averaged_params(state))
                )
        return np.asarray(kept)


def difference(ours, theirs):
    """The largest difference of a leaf, as a share of the distance it has moved; of rates, of the
    largest."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if theirs.ndim == 1:
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    apart, moved = (np.sqrt(np.square(array).sum(axis=(2, 3))) for array in (ours - theirs, theirs))
    return float((apart / np.maximum(moved, 1e-30)).max())


def main():
    """Print how far each row is off."""
    for row in rows():
        try:
            theirs = computed(row.theirs)
        except ModuleNotFoundError as error:
            print(f"{error.name} is not installed: {row.theirs}")
            continue
        print(
            f"{difference(in_jstep(row, theirs.shape), theirs):9.1e}  {row.page}: "
            f"{row.theirs}  →  {row.ours}"
        )


if __name__ == "__main__":
    main()
