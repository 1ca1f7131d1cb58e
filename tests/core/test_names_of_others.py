"""Names of other libraries: the error of `jstep.X` says what jstep has for them, and where it is
explained."""

import copy
import inspect
import operator
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint
import pytest
from source_files import ROOT, text_of

import jstep
from jstep.core.public_names import find_hint, pages

ALL = [
    (page, ours, name)
    for page, names in pages().items()
    for ours, their in names.items()
    for name in their.split()
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "AdamOptimizer",
            "module 'jstep' has no attribute 'AdamOptimizer'; "
            "use jstep.adam (see docs/from/tf-train.md)",
        ),
        (
            "MonitoredTrainingSession",
            "use jstep.Run, or jstep.train for a loop "
            "with an empty body (see docs/from/tf-train.md)",
        ),
        ("Trainer", "use jstep.train (see docs/from/lightning.md and docs/from/hf-trainer.md)"),
        ("fit", "use jstep.train (see docs/from/keras.md)"),
        ("inject_hyperparams", "use jstep.held (see docs/from/optax.md)"),
        ("FileWriter", "use jstep.summary.SummaryWriter (see docs/reference/summaries.md)"),
        ("CheckpointManager", "jstep.Saver (see docs/from/tf-train.md and docs/from/orbax.md)"),
        ("DynamicScale", "use jstep.dynamic_loss_scale (see docs/from/flax.md)"),
    ],
)
def test_a_name_of_others_is_explained(name, text):
    with pytest.raises(AttributeError, match=re.escape(text)) as error:
        getattr(jstep, name)
    assert (error.value.name, error.value.obj) == (name, None), (
        "or Python adds a name of jstep that is similar"
    )
    assert not hasattr(jstep, name)


def test_for_a_name_that_nobody_has_python_suggests_one():
    with pytest.raises(AttributeError, match=r"no attribute 'adamm'$") as error:
        _ = jstep.adamm
    assert (error.value.name, error.value.obj) == ("adamm", jstep)


def test_case_is_folded_but_a_row_of_its_own_comes_first():
    """`Adam` is also `ADAM`, and `Saver` also `saver`; `Adam` and `adamw` mean what their own rows
    say."""
    assert find_hint("ADAM") == find_hint("Adam") != ""
    assert find_hint("saver") == "; use jstep.Saver"
    assert find_hint("trainstate.STEP") == find_hint("TrainState.step") != ""
    for _, ours, typed in ALL:
        assert ours in find_hint(typed)
    assert not find_hint("adamm")


def test_what_the_table_names_exists():
    for page, ours in {(page, ours) for page, ours, _ in ALL}:
        assert (ROOT / page).is_file(), page
        paths = re.findall(r"jstep\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", ours)
        paths += [f"Saver.{name}" for name in re.findall(r"(?:Saver\(…\)|saver)\.(\w+)", ours)]
        for path in paths:
            operator.attrgetter(path)(jstep)


def owner_of(name):
    return getattr(jstep, name, None) or getattr(jstep.summary, name)


def test_what_the_table_explains_does_not_exist():
    """Neither an attribute of a class, nor an argument of a function, hides behind a row."""
    for _, _, typed in ALL:
        owner, _, attribute = typed.partition("(")[0].rpartition(".")
        if typed.endswith(("()", "(*)")) or typed.startswith("("):
            continue
        if typed.endswith("=)"):
            function = getattr(owner_of(owner), attribute) if owner else owner_of(attribute)
            assert typed.partition("(")[2][:-2] not in inspect.signature(function).parameters, typed
        elif owner:
            assert not hasattr(owner_of(owner), attribute), typed


def calls_in(name):
    for line in text_of(ROOT / "tests" / "core" / name).splitlines():
        if line and not line.startswith("#"):
            yield line.split(" | ")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The names that the calls use."""
    d = os.fspath(tmp_path_factory.mktemp("runs"))
    opt = jstep.momentum(0.1, 0.9)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, opt)
    train_step = jstep.minimize(lambda params: jnp.sum(params["w"] ** 2), opt, donate=False)
    queue = jstep.FIFOQueue(2)
    with jstep.Saver(d) as saver, jstep.summary.SummaryWriter(d) as writer:
        yield {
            "jstep": jstep,
            "jnp": jnp,
            "d": d,
            "opt": opt,
            "state": state,
            "train_step": train_step,
            "saver": saver,
            "writer": writer,
            "queue": queue,
            "coord": jstep.Coordinator(),
            "loss": lambda params: jnp.sum(params["w"] ** 2),
            "step": jstep.create_global_step(),
            "params": {"w": jnp.ones(2)},
            "grads": {"w": jnp.ones(2)},
            "ema": jstep.ExponentialMovingAverage(0.9),
            "runner": jstep.QueueRunner(queue, [len]),
            "run": jstep.Run(train_step, state, lambda n: (), 2),
            "train": lambda state=state, **options: jstep.train(
                train_step, state, lambda n: (), 2, **options
            ),
        }


@pytest.mark.parametrize("file", ["calls_of_tf_train.txt", "calls_of_others.txt"])
def test_calls_of_other_libraries_are_told_what_to_type(names, file):
    """Calls that somebody types who knows another library by heart. Python's own sentence is not an
    answer."""
    bare, calls = {}, list(calls_in(file))
    for call, needed in calls:
        try:
            answer = f"it returned {eval(call, dict(names))!r}"
        except Exception as error:
            answer = str(error)
        python = re.match(
            r".*?(unexpected keyword|no attribute|positional argument|multiple values)[^;.]*;?",
            answer,
        )
        if needed not in answer[python.end() if python else 0 :]:
            bare[call] = answer
    assert len(calls) > 100
    assert not bare


def test_the_table_hides_no_name_of_jstep():
    rooms = {path.stem for path in (ROOT / "jstep").iterdir()}
    assert not [name for _, _, name in ALL if name in jstep.__all__ or name in rooms]
    assert sorted(dir(jstep)) == sorted(jstep.__all__)


def test_the_table_has_the_functions_of_optax_and_the_classes_of_orbax():
    table = {name for _, _, name in ALL}
    schedules = [name for name in dir(optax) if name.endswith("_schedule")]
    assert schedules
    assert not [name for name in schedules if name not in table]
    scalings = [name for name in dir(optax) if name.startswith("scale_by_")]
    assert not [name for name in scalings if name not in table and name not in jstep.__all__]
    managers = [
        name
        for name in dir(orbax.checkpoint)
        if re.fullmatch(r"(Standard|PyTree|Json)?Checkpoint(er|Manager)", name)
    ]
    assert managers
    assert not [name for name in managers if name not in table]


@pytest.mark.thorough
def test_a_miss_imports_nothing_heavy():
    code = "import sys, jstep; hasattr(jstep, 'AdamOptimizer'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("make", ["state", "saver", "writer", "queue", "run", "opt", "ema"])
def test_other_objects_answer_protocols_as_any_object_does(names, make):
    """`hasattr`, `getattr` with a default, NumPy and JAX see no difference."""
    value = names[make]
    assert not hasattr(value, "no_such_name")
    assert getattr(value, "no_such_name", 3) == 3
    assert not hasattr(value, "__array__")
    assert type(jax.tree.map(lambda leaf: leaf, value)) is type(value)
    assert type(copy.copy(value)) is type(value)


def test_attributes_that_protocols_look_for_are_not_explained():
    """IPython, NumPy, copy and pickle ask for names that nobody types: a state answers like any
    object."""
    state = jstep.TrainState.create({"w": 1.0}, jstep.adam())
    for name in ("__array__", "__jax_array__", "_repr_png_", "__setstate_cython__", "_step"):
        with pytest.raises(AttributeError) as error:
            getattr(state, name)
        assert "use " not in str(error.value)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    assert copied == state
    assert not hasattr(jax.eval_shape(lambda: state), "step")
