"""What whole runs log, write and leave behind, line by line; `python
tests/loop/test_lines_of_runs.py` writes it anew.

The lines are in lines_of_runs.txt beside this file: a change of a message, of an order or of a
field is a change of that file, to be looked at. Times and paths are masked.
"""

import logging
import os
import pathlib
import re
import signal
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
from scalar_points import read_scalars

import jstep
from jstep.record.starts import load_setup, read_starts

FILE = pathlib.Path(__file__).with_name("lines_of_runs.txt")
OPTIMIZER = jstep.momentum(jstep.exponential_decay(0.1, 10, 0.5), 0.9)


def loss_fn(params, x):
    return jnp.mean((x["x"] @ params["w"] - 1.0) ** 2)


def later_loss(params, x):
    return 2.0 * loss_fn(params, x)


STEP, LATER = jstep.minimize(loss_fn, OPTIMIZER), jstep.minimize(later_loss, OPTIMIZER)
ROWS = np.linspace(-1.0, 1.0, 40, dtype=np.float32).reshape(20, 2)
DATA = jstep.batches({"x": ROWS}, 4, seed=3)


class AfterStep(jstep.Hook):
    """A hook that does something after a step."""

    def __init__(self, at, what):
        self._at, self._what = at, what

    def after_step(self, step, state, metrics):
        if step == self._at:
            self._what()


class Recorded(logging.Handler):
    """The lines of the log of jstep."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines += [f"{record.levelname} {line}" for line in record.getMessage().splitlines()]


def run(folder, last_step=6, *, step=STEP, state=None, batches=DATA, **options):
    logger, log = logging.getLogger("jstep"), Recorded()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    where = os.path.join(folder, "run")
    known = len(record(where))
    options = {
        "checkpoint_dir": where,
        "save_checkpoint_steps": 3,
        "log_steps": 2,
        "progress": False,
    } | options
    try:
        state = jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER) if state is None else state
        done = jstep.train(step, state, batches, last_step, **options)
        end = [f"ends at step {int(done.global_step)}"]
    except BaseException as error:
        # The other notes are JAX's.
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("jstep")]
        end = [f"raises {type(error).__name__}: {error}", *(f"note: {note}" for note in notes)]
        end += [f"exit code {error.code}"] if isinstance(error, SystemExit) else []
    finally:
        logger.removeHandler(log)
        logger.setLevel(before)
    files = [
        f"file {os.path.relpath(path, folder)}"
        for path in sorted(map(str, pathlib.Path(where).glob("*")))
    ]
    return [*log.lines, *end, *record(where)[known:], *files]


def record(where):
    """Return ten named lines for each start of the run: what it was given, and how far it came."""
    lines = []
    for start in read_starts(where).get("model", ()):
        full = load_setup(where, start)
        setup = full["setup"] or {}
        arguments = setup.get("arguments") or {}
        given = [
            f"{name} {value}"
            for name, value in sorted(arguments.items())
            if value not in (None, [], False)
        ]
        state = setup.get("state") or {}
        named = {
            "steps": f"{full['step'][0]} to {full['step'][1]} of {full['last_step']}"
            if full["step"]
            else "",
            "end": ": ".join(full["end"] or []).rstrip(": "),
            "exception": full["exception"],
            "saved": ", ".join(
                f"{step} ({examples} examples)" for step, _, examples, _ in full["saved"]
            ),
            "phases": ", ".join(sorted(full["seconds"].keys() - {"before"})),
            "arguments": ", ".join(given),
            "state": f"{state['leaves']} leaves, slots {', '.join(state['slots'])}"
            if state
            else "",
            "stages": setup.get("stages"),
            "batches": (setup.get("batches") or {}).get("kind"),
            "optimizers": sorted({program["optimizer"] for program in setup.get("programs") or ()}),
        }
        lines += [
            f"start {full['number']}, {name}: {value or 'none'}" for name, value in named.items()
        ]
    return lines


# Runs.


def fresh_resumed_and_finished(folder):
    return [
        "-- fresh",
        *run(folder),
        "-- resumed",
        *run(folder, 10),
        "-- finished before",
        *run(folder, 10),
    ]


def with_stages_and_evaluations(folder):
    evaluate = jstep.evaluator(lambda params, x: {"loss": loss_fn(params, x)}, [{"x": ROWS}])
    hooks = [
        jstep.LoggingHook(every_n_steps=3),
        jstep.EvaluationHook(
            evaluate,
            every_n_steps=4,
            callbacks=[jstep.EarlyStopping("loss", patience=1, min_delta=9.0)],
        ),
    ]
    options = {"hooks": hooks, "logdir": os.path.join(folder, "log"), "save_summaries_steps": 2}
    lines = run(
        folder,
        20,
        step={0: STEP, 3: LATER},
        batches=jstep.batches({"x": ROWS}, {0: 4, 5: 5}, seed=3),
        **options,
    )
    return [*lines, *events(os.path.join(folder, "log"))]


def events(where):
    """Return the tags of the event files, each with its steps."""
    found = read_scalars(where)
    return [
        f"event {tag} at {[point.step for point in points]}"
        for tag, points in sorted(found.items())
    ]


def several_steps_per_call(folder):
    return run(folder, 9, steps_per_call=4, save_checkpoint_steps=6)


def stopped_by_a_signal(folder):
    hook = AfterStep(4, lambda: signal.raise_signal(signal.SIGTERM))
    return ["-- stopped", *run(folder, hooks=[hook]), "-- resumed", *run(folder)]


def a_loss_that_is_nan(folder):
    bad = np.full((4, 2), np.nan, np.float32)
    return run(folder, batches=lambda step: {"x": bad if step == 4 else ROWS[:4]})


def a_hook_that_raises(folder):
    def fails():
        raise OSError("the disk is away")

    return ["-- raised", *run(folder, hooks=[AfterStep(4, fails)]), "-- resumed", *run(folder)]


def batches_that_fail(folder):
    def batch(step):
        if step == 4:
            raise KeyError("no such row")
        return {"x": ROWS[:4]}

    return run(folder, batches=batch)


def batches_that_end_or_change(folder):
    ends = run(os.path.join(folder, "a"), batches=[{"x": ROWS[:4]}] * 4)
    return [
        "-- end",
        *ends,
        "-- change",
        *run(os.path.join(folder, "b"), batches=[{"x": ROWS[:4]}] * 2 + [{"y": ROWS}]),
    ]


def other_parameters_than_were_saved(folder):
    other = jstep.TrainState.create({"w": jnp.ones(3), "b": jnp.ones(2)}, OPTIMIZER)
    return run(folder)[:1] + run(folder, 8, state=other)


REPORTS = {
    one.__name__: one
    for one in (
        *(
            fresh_resumed_and_finished,
            with_stages_and_evaluations,
            several_steps_per_call,
            stopped_by_a_signal,
        ),
        *(a_loss_that_is_nan, a_hook_that_raises, batches_that_fail, batches_that_end_or_change),
        other_parameters_than_were_saved,
    )
}


def text_of(name):
    """Return what the runs of a report say, without what differs between machines and versions of
    JAX."""
    with tempfile.TemporaryDirectory() as folder:
        lines = REPORTS[name](folder)
        # Programs are compiled in the background, so that these lines may come earlier or later.
        text = "\n".join(line for line in lines if not line.startswith("INFO compiled "))
        text = (
            text.replace(os.path.realpath(folder), "FOLDER")
            .replace(folder, "FOLDER")
            .replace("__main__.", f"test_{FILE.stem}.")
        )
    text = re.sub(r"[\d.e+]+ (examples/s|steps/s|s old)", r"N \1", text)
    return re.sub(r"(\d\.\d{4})\d{6,}", r"\1…", text)


def stored():
    parts = re.split(r"^=== (\w+)\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: body.rstrip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.thorough(
    except_for=[
        "fresh_resumed_and_finished",
        "with_stages_and_evaluations",
        "stopped_by_a_signal",
        "a_loss_that_is_nan",
        "a_hook_that_raises",
        "batches_that_fail",
        "other_parameters_than_were_saved",
    ]
)
@pytest.mark.parametrize("name", REPORTS)
def test_each_line_of_a_run(name):
    assert text_of(name).splitlines() == stored()[name].splitlines()


def test_each_stored_text_is_compared():
    assert list(stored()) == list(REPORTS)


if __name__ == "__main__":
    FILE.write_text(
        "\n".join(f"=== {name}\n{text_of(name)}\n" for name in REPORTS), encoding="utf-8"
    )
