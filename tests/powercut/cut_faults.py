"""File calls that fail while jstep saves: what it reports, and what is left. Run by recorded
programs."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from typing import NamedTuple

import cut_runs
import jax
from cut_runs import WEIGHTS, Saves, bits, saved_state
from cut_verdicts import warnings_of_jstep
from file_calls import CHANGES, Kind, failing, recording

import jstep
from jstep.array_store.manifest import CheckpointError

_NEW = {
    Kind.CREATE, Kind.WRITE, Kind.TRUNCATE, Kind.SYNC, Kind.MKDIR, Kind.RENAME, Kind.LINK,
    Kind.CLOSE,
}  # fmt: skip
_FAILS = {
    errno.ENOSPC: _NEW,
    errno.EDQUOT: _NEW,
    errno.EIO: CHANGES | {Kind.OPEN},
    errno.ESTALE: CHANGES | {Kind.OPEN},
    errno.EROFS: CHANGES - {Kind.CLOSE},
}
"""Error number → the calls that may report it."""
ERRORS = tuple(_FAILS)
RAISED, LOGGED, UNSAID = "raised", "logged", "unsaid"
_DELETED, _TEMPORARY = (".jstep-deleted", ".jstep-replaced"), ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A call that failed, once or from then on, the outcome of the save, and what was wrong
    afterwards."""

    number: int
    lasts: bool
    call: str
    outcome: str
    defects: tuple[str, ...]

    @classmethod
    def parsed(cls, lines):
        """Return the faults that `main` printed."""
        found = [cls(**json.loads(line)) for line in lines]
        return [dataclasses.replace(one, defects=tuple(one.defects)) for one in found]

    def __str__(self):
        lasts = ", lasting" if self.lasts else ""
        return (
            f"{errno.errorcode[self.number]}{lasts} at {self.call}: {self.outcome}: "
            f"{'; '.join(self.defects)}"
        )


def faults_of(name, folder, errors=ERRORS, stride=1):
    """Let each call of a program fail, one a trial; for each error once, and lasting until the
    program has ended."""
    trial = TRIALS[name]
    for number in errors:
        for lasts in (False, True):
            at = 1
            while (
                fault := _tried(trial, folder, _Failing(at, number, _FAILS[number], lasts=lasts))
            ) is not None:
                yield fault
                at += stride


class _Failing(NamedTuple):
    """Which call fails; see `file_calls.failing`."""

    at: int
    number: int
    kinds: Collection[Kind]
    lasts: bool = False


class _Trial:
    """A program with a call that fails, and the checks after it, in a copy of the same folder."""

    def __init__(self, folder, fails):
        self.folder, self._fails = folder, fails
        self.said, self.call, self.defects, self.logged = "", "", list[str](), list[str]()
        self.could_remove = not (fails.lasts and Kind.UNLINK in fails.kinds)

    @contextlib.contextmanager
    def failing(self):
        """Within the block, the call fails; errors that jstep means to raise end it."""
        at, number, kinds, lasts = self._fails
        with warnings_of_jstep() as self.logged:
            try:
                with failing(at, number, kinds=kinds, lasts=lasts) as failure:
                    yield
            except (CheckpointError, OSError) as error:
                self.said = f"{type(error).__name__}: {error}"
        self.call = failure.call

    def check(self, holds, defect):
        """Note a defect."""
        if not holds:
            self.defects.append(defect)

    @contextlib.contextmanager
    def works(self, what):
        """Note a defect if the block fails."""
        try:
            yield
        except Exception as error:
            self.defects.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")


def _tried(trial, folder, fails):
    base = os.path.join(folder, f"base of {trial.__name__}")
    if not os.path.exists(base):
        os.makedirs(base)
        _BASES[trial](base)
    place = os.path.join(folder, "trial")
    shutil.copytree(base, place)
    with recording(place), warnings_of_jstep():
        made = _Trial(place, fails)
        trial(made)
    kind, _, path = made.call.partition(" ")
    is_flush = kind == "SYNC" or (
        kind == "OPEN" and (os.path.isdir(path) or path.endswith(_TEMPORARY))
    )
    shutil.rmtree(place)
    if not made.call:
        return None
    outcome = RAISED if made.said else LOGGED if made.logged else UNSAID
    if outcome == UNSAID and is_flush and not any(word in path for word in _DELETED):
        made.defects.append("an error of a flush is not reported")
    if any("None" in text for text in (made.said, *made.logged)):
        made.defects.append(f"a message names None: {made.said or made.logged}")
    return Fault(
        fails.number,
        fails.lasts,
        f"{kind} {os.path.relpath(path, place)}",
        outcome,
        tuple(made.defects),
    )


_BASE = Saves((1, 2), {"max_to_keep": 2})


def _saver(trial):
    """Save step 3, which evicts step 1, after steps 1 and 2; then, without an error, step 4."""
    template = saved_state(0, 0)
    saver = jstep.Saver(cut_runs.checkpoints(trial.folder), **_BASE.options)
    with trial.failing():
        saver.save(saved_state(3, 3))
        saver.wait()
    with jstep.Saver(saver.directory) as reader:
        found = reader.all_steps()
        trial.check(2 in found, "step 2 is gone")
        trial.check(1 in found or 3 in found, "step 1 is gone, and step 3 is not there")
        trial.check(bool(trial.said) or 3 in found, "step 3 is not there, and nothing was raised")
        for step in found:
            with trial.works(f"step {step}"):
                expected = saved_state(step, {1: 0, 2: 1, 3: 3}[step])
                trial.check(
                    bits(reader.restore(template, step)) == bits(expected),
                    f"step {step} has wrong bits",
                )
    with trial.works("the next save"):
        saver.save(saved_state(4, 4))
        saver.wait()
        trial.check(
            bits(saver.restore(template)) == bits(saved_state(4, 4)), "step 4 has wrong bits"
        )
    with trial.works("close"):
        saver.close()
    with trial.works("the next Saver"), jstep.Saver(saver.directory, **_BASE.options) as other:
        other.claim()
        left = [
            name
            for name in os.listdir(saver.directory)
            if name not in (f"model-{s}" for s in other.all_steps())
        ]
        trial.check(not [name for name in left if name.startswith("model")], f"left behind: {left}")


def _weights(trial):
    """Save weights in shards over older ones; then again."""
    path = cut_runs.path_of_weights(trial.folder)
    folder = os.path.dirname(path)
    with trial.failing():
        jstep.save_weights(path, cut_runs.weights(1), max_shard_bytes=WEIGHTS["shards"][1])
    template = jax.eval_shape(lambda: cut_runs.weights(0))
    with trial.works("loading"):
        found = bits(jstep.load_weights(folder, template))
        expected = [bits(cut_runs.weights(1))] + [bits(cut_runs.weights(0))] * bool(trial.said)
        trial.check(found in expected, "wrong weights")
    with trial.works("the next save"):
        jstep.save_weights(path, cut_runs.weights(2))
        trial.check(
            bits(jstep.load_weights(folder, template)) == bits(cut_runs.weights(2)), "wrong weights"
        )
        # Files that could not be removed are left to the next process.
        left = set(os.listdir(folder)) - {"model.safetensors"}
        trial.check(not left or not trial.could_remove, f"left behind: {left}")


_BASES = {
    _saver: lambda folder: cut_runs.save(folder, _BASE),
    _weights: lambda folder: cut_runs.save_weights(folder, WEIGHTS["shards"][:1]),
}
TRIALS = {"saver": _saver, "weights": _weights}


def main(name, numbers, stride):
    """Print the faults of a program, one JSON object a line."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        place = os.path.realpath(folder)
        for fault in faults_of(name, place, json.loads(numbers), int(stride)):
            print(json.dumps(dataclasses.asdict(fault)))


if __name__ == "__main__":
    main(*sys.argv[1:])
