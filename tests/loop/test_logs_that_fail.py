"""A log that cannot be written never prevents a checkpoint: a History, event files,
fingerprints."""

import errno
import os
import signal

import pytest
from loop_runs import train

import jstep
from jstep.logs import history_file
from jstep.stores import growing_files


class Full:
    """A disk for one kind of log that is full while `now` is true."""

    def __init__(self, monkeypatch):
        self._monkeypatch, self.now = monkeypatch, False

    def fills(self, kind, method):
        real = getattr(kind, method)

        def write(log, *args, **kwargs):
            if self.now:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *self.named(log))
            return real(log, *args, **kwargs)

        self._monkeypatch.setattr(kind, method, write)

    def named(self, log):
        return (
            []
            if isinstance(log, growing_files.LineFile)
            else [getattr(log, "path", None) or log._path]
        )


@pytest.fixture
def full(monkeypatch):
    return Full(monkeypatch)


def of_history(full, where):
    full.fills(history_file.HistoryFile, "sync")
    return {"hooks": [jstep.History(where / "history.jsonl", every_n_steps=1)]}, "history.jsonl"


def of_event_files(full, where):
    full.fills(growing_files.GrowingFile, "write")
    return {"logdir": where / "logs", "save_summaries_steps": 1}, "events.out.tfevents"


def of_fingerprints(full, where):
    full.fills(growing_files.LineFile, "write")
    full.fills(growing_files.LineFile, "sync")
    hook = jstep.FingerprintHook(every_n_steps=1, path=where / "fingerprints.jsonl")
    return {"hooks": [hook]}, "fingerprints.jsonl"


KINDS = [of_history, of_event_files, of_fingerprints]


def steps_in(where, prefix="model"):
    with jstep.Saver(where, prefix=prefix) as saver:
        return saver.all_steps()


def filling(full, at):
    def fill(step, state, metrics):
        full.now = full.now or step >= at

    return jstep.every(1, fill)


@pytest.mark.thorough(except_for=["of_event_files"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_due_checkpoint_is_saved_and_the_error_has_all_that_others_have(kind, full, tmp_path):
    """The disk is full from step 8 on, model-10 is due."""
    options, file = kind(full, tmp_path)
    hooks = [filling(full, 8), *options.pop("hooks", ())]
    with pytest.raises(OSError, match="No space left") as info:
        train(40, hooks=hooks, checkpoint_dir=tmp_path / "run", save_checkpoint_steps=5, **options)
    error, notes = info.value, " ".join(info.value.__notes__)
    steps = steps_in(tmp_path / "run")
    assert steps[0] == 5
    # Its first line that fails ends the run.
    assert steps[-1] == 10 or kind is of_fingerprints or steps[-1] >= 8
    assert file in str(error)
    assert int(error.state.global_step) == steps[-1] < 40
    assert f"jstep: at step {steps[-1]}, after the update with batch {steps[-1] - 1}, in " in notes
    assert f"and is saved as model-{steps[-1]}" in notes
    full.now = False
    assert train(40, checkpoint_dir=tmp_path / "run", **options).global_step == 40


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_last_checkpoint_is_saved(kind, full, tmp_path):
    options, file = kind(full, tmp_path)
    hooks = [filling(full, 7), *options.pop("hooks", ())]
    mine = jstep.CheckpointSaverHook(jstep.Saver(tmp_path / "mine", prefix="mine"), save_steps=100)
    with pytest.raises(OSError, match="No space left") as info:
        train(
            7,
            hooks=[*hooks, mine],
            checkpoint_dir=tmp_path / "run",
            save_checkpoint_steps=100,
            **options,
        )
    assert file in str(info.value)
    assert int(info.value.state.global_step) == 7
    assert steps_in(tmp_path / "run") == [7]
    assert steps_in(tmp_path / "mine", "mine") == [7]


@pytest.mark.thorough(except_for=["of_fingerprints"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_signal_saves(kind, full, tmp_path):
    options, file = kind(full, tmp_path)

    def stop(step, state, metrics):
        if step == 6:
            full.now = True
            signal.raise_signal(signal.SIGTERM)

    hooks = [jstep.every(1, stop), *options.pop("hooks", ())]
    with pytest.raises(OSError, match="No space left") as info:
        train(
            40, hooks=hooks, checkpoint_dir=tmp_path / "run", save_checkpoint_steps=100, **options
        )
    assert file in str(info.value)
    assert steps_in(tmp_path / "run") == [6]
    assert "is saved as model-6" in " ".join(info.value.__notes__)


def test_what_fails_when_the_run_closes_has_the_state(tmp_path, monkeypatch):
    close_it = history_file.HistoryFile.close

    def close(self):
        close_it(self)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    monkeypatch.setattr(history_file.HistoryFile, "close", close)
    hook = jstep.History(tmp_path / "history.jsonl")
    with pytest.raises(OSError, match=r"No space left.*history.jsonl") as info:
        train(4, hooks=[hook], checkpoint_dir=tmp_path / "run")
    assert int(info.value.state.global_step) == 4
    assert "at step 4, while the run closed" in " ".join(info.value.__notes__)
    with pytest.raises(KeyError) as info:
        train(
            8,
            hooks=[jstep.History(tmp_path / "other.jsonl"), jstep.every(6, lambda *_: {}["mine"])],
        )
    assert [note for note in info.value.__notes__ if "other.jsonl" in note]
