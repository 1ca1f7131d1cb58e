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
from jstep.core.public_names import pages


def test_both_programs_on_the_page_of_tf_train_have_the_same_numbers():
    programs, _, _ = (DOCS / "from" / "tf-train.md").read_text(encoding="utf-8").partition("\n## ")
    lines = re.compile(r"exponential_decay.*|last_step=\d+|% \d|0\.9")
    theirs, ours = map(lines.findall, programs.split('=== "')[1:])
    numbers = [sorted(re.findall(r"\d[\d.]*", line)) for line in theirs]
    assert numbers == [sorted(re.findall(r"\d[\d.]*", line)) for line in ours]
    assert numbers == [["0.1", "0.5", "10"], ["0.9"], ["25"], ["5"]]


SYMBOLS = """
    Variable create_global_step get_global_step get_or_create_global_step global_step assign_add
    GraphKeys GLOBAL_STEP GLOBAL_VARIABLES get_collection MonitoredTrainingSession MonitoredSession
    StepCounterHook CheckpointSaverHook LoggingTensorHook NanTensorHook StopAtStepHook
    SummarySaverHook log_every_n INFO placeholder feed_dict GradientDescentOptimizer
    AdagradOptimizer MomentumOptimizer AdamOptimizer FtrlOptimizer RMSPropOptimizer
    initial_accumulator_value use_locking name minimize var_list compute_gradients apply_gradients
    grads_and_vars IndexedSlices GATE_NONE GATE_OP GATE_GRAPH get_slot get_slot_names gradients
    grad_ys gate_gradients colocate_gradients_with_ops aggregation_method AggregationMethod ADD_N
    DEFAULT LookupError stop_gradient clip_by_value clip_value_min clip_value_max clip_by_norm
    clip_by_average_norm clip_by_global_norm t_list use_norm global_norm exponential_decay
    ExponentialMovingAverage num_updates apply average average_name variables_to_restore
    control_dependencies group Saver save my-model restore Coordinator should_stop request_stop join
    stop_grace_period_secs wait_for_stop QueueRunner create_threads exceptions_raised
    add_queue_runner start_queue_runners enqueue_many scalar_summary image_summary histogram_summary
    OutOfRange zero_fraction merge_summary merge_all_summaries SummaryWriter graph_def max_queue
    flush_secs add_summary add_event add_graph flush close summary_iterator write_graph
""".split()  # noqa: SIM905
"""The symbols of classic `tf.train`, and of what its programs call besides."""


def rows_of_symbols():
    """Return the cells of the tables of symbols: TensorFlow's, jstep's, and what differs."""
    _, _, tables = (
        (DOCS / "from" / "tf-train.md")
        .read_text(encoding="utf-8")
        .partition("\n## Symbol by symbol\n")
    )
    lines = [
        line
        for line in tables.splitlines()
        if line.startswith("| ") and "what differs, and why" not in line
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_of_tf_train_lists_every_symbol():
    subjects = " ".join(row[0] for row in rows_of_symbols())
    assert not [name for name in SYMBOLS if not re.search(rf"(?<![\w-]){name}(?!\w)", subjects)]


def test_each_row_of_the_page_of_tf_train_has_a_subject_a_line_and_a_reason():
    classes = [value for name in jstep.__all__ if isinstance(value := getattr(jstep, name), type)]
    owners = [jstep, jstep.summary, jstep.summary.SummaryWriter, *classes]
    hinted = set(
        re.findall(
            r"\w+", " ".join(theirs for rows in pages().values() for theirs in rows.values())
        )
    )
    for theirs, ours, differs in rows_of_symbols():
        assert re.match(r"`|[A-Z]\w+ (error )?of |a loss |steps of ", theirs), theirs
        assert ours, theirs
        assert differs or not ours.startswith("not "), f"{theirs}: why not?"
        if not ours.startswith("not "):
            named = re.findall(r"`(?:Saver|ema|Optimizer)?\.?(\w+)[`(]", theirs)
            assert not [
                name
                for name in named
                if name not in hinted and not any(hasattr(o, name) for o in owners)
            ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", peer_numbers.CASES)
def test_the_libraries_compute_the_stored_numbers(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # its import needs another one otherwise
    for module in peer_numbers.NEEDS[name]:
        pytest.importorskip(module)
    np.testing.assert_allclose(
        peer_numbers.computed(name), peer_numbers.stored(name), rtol=1e-5, atol=1e-7
    )


def test_patience_in_keras():
    """The patience of EarlyStopping is the same as in Keras, that of ReduceOnPlateau is one
    less."""
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


def test_the_trainer_takes_the_mean_of_the_means_of_microbatches():
    """With the line of the page, the same; with a mean over rows, 1 % to 50 % of the update
    apart."""
    page = (DOCS / "from" / "hf-trainer.md").read_text(encoding="utf-8")
    weights = eval(re.search(r"`(np\.where\(np\.arange\(26\).*?)`", page).group(1))
    x, y = peer_numbers.short_epoch()
    theirs = np.reshape(peer_numbers.stored("short batch of the Trainer"), (3, 3))

    def update(weights):
        def loss_fn(params):
            losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ params), y[:, None], axis=1)[:, 0]
            return jnp.sum(losses * weights)

        return -jax.grad(loss_fn)(jnp.zeros((3, 3)))

    with jax.enable_x64(True):
        np.testing.assert_allclose(update(weights), theirs, rtol=1e-7)
        apart = np.abs(update(np.full(26, 1 / 26)) - theirs).max() / np.abs(theirs).max()
    assert 0.01 < apart < 0.5


# Claims of the page "From Optax", checked against Optax.

optax = pytest.importorskip("optax")
PAGE = DOCS / "from" / "optax.md"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        (
            "squared_cosine",
            lambda: optax.cosine_decay_schedule(1e-3, 1000, alpha=0.1, exponent=2.0),
        ),
        ("bounded_decay", lambda: optax.exponential_decay(1e-2, 100, 0.5, end_value=1e-3)),
    ],
)
def test_schedules_as_functions(page, name, theirs):
    steps = np.arange(0, 1200, 7)
    np.testing.assert_allclose(
        jax.vmap(page[name])(steps), jax.vmap(theirs())(1.0 * steps), rtol=1e-6, atol=1e-9
    )


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
    of_flax = jax.jit(
        lambda scale, factor: scale.value_and_grad(loss_fn)({"w": jnp.ones(3)}, factor)[0]
    )
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

ROW = re.compile(
    r"^\| `([\w.]+)` \| `(\w+)` \| (\S+) \| `(\w+)`: `(\w+)` \| (\S+) \|$", re.MULTILINE
)

IN_BOTH = [name for name in jstep.__all__ if name.islower() and callable(getattr(jstep, name))]
PAIRS = {name: name for name in IN_BOTH if hasattr(optax, name)}
PAIRS |= {f"contrib.{name}": name for name in IN_BOTH if hasattr(optax.contrib, name)}
PAIRS |= {"nadamw": "nadam", "ema": "ExponentialMovingAverage"}
ARGUMENTS = {
    "b1": "beta1", "b2": "beta2", "b3": "beta3", "beta": "momentum", "eps": "epsilon",
    "eps_root": "epsilon_root", "nesterov": "use_nesterov", "clipping_threshold": "clip_threshold",
    "weight_decay_rate": "weight_decay", "debias": "zero_debias", "ns_coeffs": "ns_coefficients",
    "estim_lr0": "d0", "estim_lr_coef": "d_coef",
}  # fmt: skip
MEANS_NOTHING = {"learning_rate", "ns_steps", "weight_decay_mask", "trust_ratio_mask", "mask"}
"""Optax's rate has no default; jstep's steps are as many as the coefficients give; masks have
another grammar."""


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
        of_theirs, of_ours = (
            defaults(operator.attrgetter(theirs)(optax)),
            defaults(getattr(jstep, ours)),
        )
        for argument, value in of_theirs.items():
            name = ARGUMENTS.get(argument, argument)
            if (
                name in of_ours
                and name not in MEANS_NOTHING
                and (value or 0) != (of_ours[name] or 0)
            ):
                yield theirs, argument, value, ours, name, of_ours[name]


def test_the_page_about_optax_has_all_of_them():
    assert rows_of("optax.md") == set(differing())
