"""Names of other libraries: the error of `jstep.X` says what jstep has for them, and where it is explained."""

import re
import subprocess
import sys

import optax
import orbax.checkpoint
import pytest
from source_files import ROOT, text_of

import jstep
from jstep.core.public_names import explain, pages

ALL = [(page, ours, name) for page, names in pages().items() for ours, their in names.items() for name in their.split()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "AdamOptimizer",
            "module 'jstep' has no attribute 'AdamOptimizer'; use jstep.adam (see docs/from/tf-train.md)",
        ),
        (
            "MonitoredTrainingSession",
            "use jstep.Run, or jstep.train for a loop with an empty body (see docs/from/tf-train.md)",
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
    assert (error.value.name, error.value.obj) == (name, None), "or Python adds a name of jstep that is similar"
    assert not hasattr(jstep, name)


def test_for_a_name_that_nobody_has_python_suggests_one():
    with pytest.raises(AttributeError, match=r"no attribute 'adamm'$") as error:
        _ = jstep.adamm
    assert (error.value.name, error.value.obj) == ("adamm", jstep)


def test_what_the_table_names_exists():
    for page, ours, _ in ALL:
        assert (ROOT / page).is_file(), page
        paths = re.findall(r"jstep\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", ours)
        paths += [f"Saver.{name}" for name in re.findall(r"Saver\(…\)\.(\w+)", ours)]
        assert paths or ours.startswith("every_n_steps"), ours
        for path in paths:
            found = jstep
            for part in path.split("."):
                found = getattr(found, part)


def test_the_table_hides_no_name_of_jstep():
    rooms = {path.stem for path in (ROOT / "jstep").iterdir()}
    assert not [name for _, _, name in ALL if name in jstep.__all__ or name in rooms]
    assert sorted(dir(jstep)) == sorted(jstep.__all__)


def test_the_table_has_what_the_page_of_tf_train_lists():
    table = text_of(ROOT / "docs/from/tf-train.md").partition("| `tf.train.` | in jstep |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    names = [name for theirs, ours in rows if "not included" not in ours for name in re.findall(r"`(\w+)`", theirs)]
    assert len(names) > 50
    assert not [name for name in names if not (hasattr(jstep, name) or explain(name))]


def test_the_table_has_the_functions_of_optax_and_the_classes_of_orbax():
    table = {name for _, _, name in ALL}
    schedules = [name for name in dir(optax) if name.endswith("_schedule")]
    assert schedules
    assert not [name for name in schedules if name not in table]
    scalings = [name for name in dir(optax) if name.startswith("scale_by_")]
    assert not [name for name in scalings if name not in table and name not in jstep.__all__]
    managers = [
        name for name in dir(orbax.checkpoint) if re.fullmatch(r"(Standard|PyTree|Json)?Checkpoint(er|Manager)", name)
    ]
    assert managers
    assert not [name for name in managers if name not in table]


@pytest.mark.thorough
def test_a_miss_imports_nothing_heavy():
    code = "import sys, jstep; hasattr(jstep, 'AdamOptimizer'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
