"""Claims of the pages "From PyTorch", "From the HF Trainer", "From Keras" and "From tf.train"."""

import ast
import inspect
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import peer_numbers
import pytest
from pages import DOCS, section_of

import jstep


def test_both_programs_on_the_page_of_tf_train_have_the_same_numbers():
    programs, _, _ = (DOCS / "from" / "tf-train.md").read_text(encoding="utf-8").partition("\n## ")
    lines = re.compile(r"exponential_decay.*|last_step=\d+|% \d|0\.9")
    theirs, ours = map(lines.findall, programs.split('=== "')[1:])
    numbers = [sorted(re.findall(r"\d[\d.]*", line)) for line in theirs]
    assert numbers == [sorted(re.findall(r"\d[\d.]*", line)) for line in ours]
    assert numbers == [["0.1", "0.5", "10"], ["0.9"], ["25"], ["5"]]


@pytest.mark.thorough
@pytest.mark.parametrize("name", peer_numbers.CASES)
def test_the_libraries_compute_the_stored_numbers(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # its import needs another one otherwise
    for module in peer_numbers.needed_by(name):
        pytest.importorskip(module)
    np.testing.assert_allclose(peer_numbers.computed(name), peer_numbers.stored(name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("coupled", [True, False])
def test_adam_with_weight_decay_is_coupled_in_torch(coupled):
    optimizer = (
        jstep.chain(jstep.add_weight_decay(0.1), jstep.scale_by_adam(), jstep.scale_by_learning_rate(1e-2))
        if coupled
        else jstep.adamw(1e-2, weight_decay=0.1)
    )
    state = jstep.TrainState.create({"w": np.float32(peer_numbers.START)}, optimizer)
    train_step = jstep.minimize(lambda params: jnp.sum(jnp.sin(params["w"])), optimizer)
    for _ in range(20):
        state, _ = train_step(state)
    np.testing.assert_allclose(state.params["w"], peer_numbers.stored("Adam" if coupled else "AdamW"), rtol=1e-5)


SCHEDULES = {
    "linear": lambda: jstep.join([jstep.linear(0.0, 1e-2, 3), jstep.linear(1e-2, 0.0, 17)], [3]),
    "cosine": lambda: jstep.warmup_cosine_decay(1e-2, 3, 20),
    "constant_with_warmup": lambda: jstep.linear(0.0, 1e-2, 3),
    "LinearLR": lambda: jstep.linear(1e-3, 1e-2, 5),
    "CosineAnnealingLR": lambda: jstep.cosine_decay(1e-2, 12),
    "LambdaLR": lambda: jstep.linear_warmup(1e-2, 10),
    "warmup of Keras": lambda: jstep.warmup_cosine_decay(1e-2, 3, 20),
}


@pytest.mark.thorough(except_for=["linear", "LambdaLR", "warmup of Keras"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_transformers_torch_and_keras(name):
    theirs = peer_numbers.stored(name)
    ours = [float(SCHEDULES[name]()(step)) for step in range(len(theirs))]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-9)
    assert (ours[0] == 0.0) == ("LR" not in name), "the learning rate of the first update"


def test_patience_in_keras():
    """The patience of EarlyStopping is the same as in Keras, that of ReduceOnPlateau is one less."""
    losses, theirs = peer_numbers.LOSSES, peer_numbers.stored("patience of Keras")
    optimizer = jstep.gradient_descent(jstep.held("learning_rate", 1.0))
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=2)
    early = jstep.EarlyStopping("loss", patience=3)
    ours, stopped = [], []
    for step, loss in enumerate(losses):
        state = reduce(step, state, {"loss": loss}) or state
        ours.append(float(jstep.get_hyperparameter(state, "learning_rate")))
        stopped.append(bool(early(step, state, {"loss": loss})))
    assert ours == theirs[: len(losses)]
    assert ours[-1] < 1.0
    assert stopped.index(True) == theirs[len(losses) :].index(1.0)


# Claims of the page "From Optax", checked against Optax.

optax = pytest.importorskip("optax")
PAGE = DOCS / "from" / "optax.md"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("squared_cosine", lambda: optax.cosine_decay_schedule(1e-3, 1000, alpha=0.1, exponent=2.0)),
        ("bounded_decay", lambda: optax.exponential_decay(1e-2, 100, 0.5, end_value=1e-3)),
    ],
)
def test_schedules_as_functions(page, name, theirs):
    steps = np.arange(0, 1200, 7)
    np.testing.assert_allclose(jax.vmap(page[name])(steps), jax.vmap(theirs())(1.0 * steps), rtol=1e-6, atol=1e-9)


def test_two_real_leaves_are_trained_like_a_complex_one():
    def loss_fn(z):
        return jnp.sum(jnp.abs(z * (1 + 2j) - (3 - 1j)) ** 2)

    theirs = optax.contrib.split_real_and_imaginary(optax.adamw(1e-1, weight_decay=1e-2))
    z = jnp.array([1 + 1j, 2 - 1j], jnp.complex64)
    memory = theirs.init(z)
    optimizer = jstep.adamw(1e-1, weight_decay=1e-2)
    state = jstep.TrainState.create({"real": z.real, "imag": z.imag}, optimizer)
    train_step = jstep.minimize(lambda p: loss_fn(jax.lax.complex(p["real"], p["imag"])), optimizer)
    for _ in range(10):
        with jax.numpy_dtype_promotion("standard"):
            updates, memory = theirs.update(jnp.conj(jax.grad(loss_fn)(z)), memory, z)
        z = optax.apply_updates(z, updates)
        state, _ = train_step(state)
    np.testing.assert_allclose(state.params["real"], z.real, rtol=0, atol=1e-4)
    np.testing.assert_allclose(state.params["imag"], z.imag, rtol=0, atol=1e-4)


# Claims of the page "From Flax" and of the recipe for NNX, checked against Flax.

pytest.importorskip("flax")


def test_the_loss_scale_changes_at_the_steps_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs = dynamic_scale.DynamicScale(growth_interval=4)
    optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(0.1), initial=2.0**16, period=5)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)

    def loss_fn(params, factor):
        return jnp.sum(params["w"]) * factor

    train_step = jstep.minimize(loss_fn, optimizer)
    of_flax = jax.jit(lambda scale, factor: scale.value_and_grad(loss_fn)({"w": jnp.ones(3)}, factor)[0])
    wanted, found = [], []
    for n in range(60):
        factor = jnp.float32(np.inf if n in (3, 4, 20, 41) else 1.0)
        theirs = of_flax(theirs, factor)
        state, _ = train_step(state, factor)
        wanted.append(float(theirs.scale))
        found.append(float(state.slots["loss_scale"]))
    assert found == wanted
    assert len(set(wanted)) > 5


def test_the_defaults_of_the_loss_scale_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    default = dynamic_scale.DynamicScale()
    names = ("scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale")
    assert [float(getattr(default, name)) for name in names] == [2.0**16, 2000, 2, 0.5, 2.0**-126]


# The tables of defaults that differ between Optax and jstep, compared with the signatures of both.

ROW = re.compile(r"^\| `([\w.]+)` \| `(\w+)` \| (\S+) \| `(\w+)`: `(\w+)` \| (\S+) \|$", re.MULTILINE)

IN_BOTH = [name for name in jstep.__all__ if name.islower() and callable(getattr(jstep, name))]
PAIRS = {name: name for name in IN_BOTH if hasattr(optax, name)}
PAIRS |= {f"contrib.{name}": name for name in IN_BOTH if hasattr(optax.contrib, name)}
PAIRS |= {"nadamw": "nadam", "ema": "ExponentialMovingAverage"}
ARGUMENTS = {
    "b1": "beta1", "b2": "beta2", "b3": "beta3", "beta": "momentum", "eps": "epsilon", "eps_root": "epsilon_root",
    "nesterov": "use_nesterov", "clipping_threshold": "clip_threshold", "weight_decay_rate": "weight_decay",
    "debias": "zero_debias", "ns_coeffs": "ns_coefficients", "estim_lr0": "d0", "estim_lr_coef": "d_coef",
}  # fmt: skip
MEANS_NOTHING = {"learning_rate", "ns_steps", "weight_decay_mask", "trust_ratio_mask", "mask"}
"""Optax's rate has no default; jstep's steps are as many as the coefficients give; masks have another grammar."""


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def rows_of(page):
    text = (DOCS / "from" / page).read_text("utf-8")
    begin, end = section_of(text, "Defaults that differ")
    rows = {
        (theirs, argument, ast.literal_eval(value), ours, name, ast.literal_eval(default))
        for theirs, argument, value, ours, name, default in ROW.findall(text[begin:end])
    }
    assert len(rows) == text[begin:end].count("\n| ") - 1  # each line below the head is a row
    return rows


def differing():
    for theirs, ours in PAIRS.items():
        of_theirs, of_ours = defaults(operator.attrgetter(theirs)(optax)), defaults(getattr(jstep, ours))
        for argument, value in of_theirs.items():
            name = ARGUMENTS.get(argument, argument)
            if name in of_ours and name not in MEANS_NOTHING and (value or 0) != (of_ours[name] or 0):
                yield theirs, argument, value, ours, name, of_ours[name]


def test_the_page_about_optax_has_all_of_them():
    assert rows_of("optax.md") == set(differing())
