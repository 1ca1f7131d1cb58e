"""`train`: log lines, the progress bar and event files."""

import logging
import os
import sys

import jax.numpy as jnp
import pytest
from loop_runs import OPTIMIZER, train

import jstep

# Logging and progress


def test_lines_are_shown_without_logging_configuration(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    train(6, log_steps=2, progress=None)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines.pop(0).startswith("first step after ")
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4", "step 6"]
    assert "loss " in lines[0]
    assert "learning_rate 0.0" in lines[1]
    assert "beta1" not in err
    assert "steps/s)" in lines[1]


@pytest.mark.parametrize(
    "kwargs", [{"progress": False, "log_steps": 1}, {"progress": None, "log_steps": None}]
)
def test_nothing_is_printed_without_progress_or_log_steps(capsys, kwargs, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    train(4, **kwargs)
    assert capsys.readouterr() == ("", "")


class Terminal:
    def __init__(self, stream):
        self.stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self.stream, name)


def test_a_terminal_gets_a_progress_bar(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    train(6, progress=None, log_steps=1)
    err = capsys.readouterr().err
    assert "6/6" in err
    assert "step 2" not in err


def test_a_terminal_without_tqdm_gets_log_lines(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    train(2, progress=None, log_steps=1)
    assert capsys.readouterr().err.count("\nstep ") == 2


# Summaries


def test_summaries_created_in_the_step(tmp_path):
    pytest.importorskip("tensorboard")
    from jstep.summary import summary_iterator

    def loss(params, batch):
        value = jnp.mean((batch["x"] @ params["w"]) ** 2)
        return value, {"weights": jstep.summary.histogram("weights", params["w"], collections=())}

    step = jstep.minimize(loss, OPTIMIZER, has_aux=True)
    for steps_per_call in (1, 3):
        logdir = tmp_path / str(steps_per_call)
        train(
            6,
            step=step,
            logdir=logdir,
            save_summaries_steps=3,
            log_steps=None,
            steps_per_call=steps_per_call,
        )
        (name,) = (name for name in os.listdir(logdir) if name != "starts")
        events = [
            (e.step, v.tag) for e in summary_iterator(str(logdir / name)) for v in e.summary.value
        ]
        assert [step for step, tag in events if tag == "weights"] == [3, 6]
        assert [step for step, tag in events if tag == "loss"] == [3, 6]


def test_the_config_is_written_for_the_tab_of_hyperparameters(tmp_path):
    pytest.importorskip("tensorboard")
    from jstep.summary import summary_iterator

    train(1, logdir=tmp_path, log_steps=None, config={"rate": 0.1, "sizes": [2, 3]})
    (name,) = (name for name in os.listdir(tmp_path) if name != "starts")
    values = [
        value for event in summary_iterator(str(tmp_path / name)) for value in event.summary.value
    ]
    (content,) = (
        v.metadata.plugin_data.content for v in values if v.tag == "_hparams_/session_start_info"
    )
    assert [text in content for text in (b"rate", b"[2, 3]")] == [True, True]
