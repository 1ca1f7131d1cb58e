"""Summaries in a new process: imports, missing extras, and exit without `close`."""

import json
import os
import textwrap
from pathlib import Path

import pytest
from processes import python

from jstep import summary

PROGRAM = """
    import importlib.util, json, os, sys, threading, traceback
    import jax, jax.numpy as jnp
    import jstep

    def loaded(*names):
        return [module for module in sys.modules if module.startswith(names)]

    def first_import_inside_a_trace():
        assert not loaded("jstep.summary")

        def loss(w):
            jstep.summary.scalar("traced", w)
            return w * w

        jax.jit(jax.grad(loss))(2.0)
        jstep.summary.scalar("eager", 1.0)
        assert jstep.summary.merge_all().tags == ("eager",)

    def all_kinds():
        s = jstep.summary
        return s.merge([
            s.scalar("loss", 1.0), s.histogram("h", jnp.ones(3)), s.text("t", "x"), s.image("i", jnp.ones((1, 2, 2, 3)))
        ])

    def loss_is_traced_once_during_an_import():
        for name in loaded("jstep.summary"):
            del sys.modules[name]
        from jstep.differentiate import loss_outputs
        loss_outputs.SUMMARIES.clear()
        traced = []

        def loss(params, x):
            traced.append(None)
            thread = threading.Thread(target=lambda: importlib.import_module("jstep.summary").scalar)
            thread.start()
            thread.join()
            return params["w"] * x

        state = jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1))
        jstep.minimize(loss, jstep.gradient_descent(0.1)).trace(state, 1.0)
        assert loss_outputs.SUMMARIES and len(traced) == 1

    def creating_summaries_imports_no_extra():
        all_kinds()
        assert not loaded("tensorboard", "google_crc32c", "PIL", "matplotlib", "tensorflow", "orbax")

    def missing_extra_is_an_error():
        for missing in ("google_crc32c", "tensorboard"):
            sys.modules[missing] = None
            try:
                jstep.summary.SummaryWriter("logs")
            except ImportError as error:
                assert f"needs {missing}" in str(error) and "pip install jstep[summaries]" in str(error), error
            else:
                raise AssertionError("no error")
            finally:
                del sys.modules[missing]
            assert not os.path.exists("logs")

    def tensorflow_is_never_imported():
        assert importlib.util.find_spec("tensorflow") is not None
        with jstep.summary.SummaryWriter("logs", graph=lambda: jnp.ones(3)) as writer:
            writer.add_summary(all_kinds(), 1)
            writer.add_hparams({"rate": 0.1}, {"accuracy": 1.0})
            writer.add_session_log("START", 0)
        assert len(list(jstep.summary.summary_iterator(writer.path))) == 5
        from jstep.tools.cli import main
        sys.stdout = sys.stderr
        assert main(["plot", "logs", "-o", "loss.png"]) == main(["events", "logs"]) == 0
        sys.stdout = sys.__stdout__
        assert not loaded("tensorflow", "tensorboard.compat.tensorf")

    def nothing_is_lost_without_close():
        global writer
        writer = jstep.summary.SummaryWriter("left")
        writer.add_summary(jax.jit(lambda x: jstep.summary.scalar("loss", x))(2.0), 1)

    errors = {}
    for test in (first_import_inside_a_trace, loss_is_traced_once_during_an_import,
                 creating_summaries_imports_no_extra, missing_extra_is_an_error,
                 tensorflow_is_never_imported, nothing_is_lost_without_close):
        try:
            test()
            errors[test.__name__] = ""
        except BaseException:
            errors[test.__name__] = traceback.format_exc()
    print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of the program, and the errors of its parts, in order."""
    directory = tmp_path_factory.mktemp("process")
    trap = directory / "trap" / "tensorflow"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise AssertionError('tensorflow was imported')")
    path = os.pathsep.join([str(trap.parent), str(Path(__file__).parents[2])])
    out = python("-c", textwrap.dedent(PROGRAM), cwd=directory, PYTHONPATH=path)
    return directory, json.loads(out.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "part",
    [
        "first_import_inside_a_trace",
        "loss_is_traced_once_during_an_import",
        "creating_summaries_imports_no_extra",
        "missing_extra_is_an_error",
        "tensorflow_is_never_imported",
        "nothing_is_lost_without_close",
    ],
)
def test_part_of_the_program(finished, part):
    assert finished[1][part] == ""


@pytest.mark.thorough
def test_exit_without_close_loses_no_events(finished):
    (file,) = (finished[0] / "left").iterdir()
    assert [e.step for e in summary.summary_iterator(file)] == [0, 1]
