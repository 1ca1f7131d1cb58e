"""What jstep makes of a state of the disk: whether it has all that was acknowledged, bit for
bit."""

import collections
import contextlib
import functools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable

import cut_runs
import jax
from cut_runs import ACKNOWLEDGED, EVERY, KEPT_BEST, LAST, LOSSES, bits
from disk_states import State, write
from scalar_points import read_scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.logs import fingerprint_log
from jstep.record.starts import FOLDER, read_starts

ACCEPTABLE = "acceptable"
REFUSED = "refused"
"""An error in place of a state."""
VANISHED = "vanished"
"""A fresh start, although a save was acknowledged."""
OLDER = "older"
"""An older save than the newest one that was acknowledged."""
WRONG = "wrong bits"
WARNED = "restored with a warning"
"""A file of an acknowledged checkpoint is corrupted, although it is not needed to restore."""
LEFTOVERS = "leftovers"
"""What an interrupted save or deletion left is there after the next writer has begun."""
NO_SAVE = "no further save"
BEST_LOST = "best checkpoint lost"
RECORDS_LOST = "records lost"
"""Summaries, fingerprints or times of steps before the newest checkpoint."""
SHOWN_OTHERWISE = "TensorBoard shows a step twice, or not at all"
OTHER_END = "another end"
"""The run that resumes from it does not end as one without a stop."""

Judge = Callable[[State, str], str]
"""A function of a state and the folder that holds it, which returns one of the words above."""


def judged(states, judge):
    """Return the states by verdict."""
    found = collections.defaultdict(list)
    # In memory, as nothing here needs a disk.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as above:
        folder = os.path.join(above, "disk")
        for state in states:
            write(state.tree, folder)
            with warnings_of_jstep():
                verdict = judge(state, folder)
            shutil.rmtree(folder)
            found[verdict].append(state)
    return dict(found)


def unacceptable(found):
    """Return each other verdict, with how many states have it and what is in the first one's
    words."""
    return {
        verdict: f"{len(states)} states, such as {states[0].why}, after {states[0].at} calls"
        for verdict, states in found.items()
        if verdict != ACCEPTABLE
    }


def acknowledged(state):
    """Return the last number or step that was acknowledged, -1 if there is none."""
    found = [
        int(text.removeprefix(ACKNOWLEDGED))
        for text in state.marks
        if text.startswith(ACKNOWLEDGED)
    ]
    return found[-1] if found else -1


def judge_of(name):
    """Return the judge of the states of a program of `cut_runs.RUNS`."""
    kind, _, rest = name.partition(", ")
    if kind == "saver":
        return saver_judge(cut_runs.SAVES[rest])
    if kind == "weights":
        return weights_judge(cut_runs.WEIGHTS[rest])
    return train_judge


def saver_judge(saves):
    """Judge states of a Saver; at every tenth state, it also saves again."""
    expected = [bits(cut_runs.saved_state(step, number)) for number, step in enumerate(saves.steps)]
    template = cut_runs.saved_state(0, 0)
    seen = 0

    def judge(state, folder):
        nonlocal seen
        seen += 1
        with jstep.Saver(cut_runs.checkpoints(folder), **saves.options) as saver:
            verdict = _judge_restored(saver, template, expected, acknowledged(state))
            if verdict != ACCEPTABLE:
                return verdict
            saver.claim()
            if _leftovers(saver.directory):
                return LEFTOVERS
            if seen % 10 == 0:
                new = cut_runs.saved_state(99, 99)
                saver.save(new)
                saver.wait()
                if bits(saver.restore(template)) != bits(new) or _leftovers(saver.directory):
                    return NO_SAVE
        return ACCEPTABLE

    return judge


@contextlib.contextmanager
def warnings_of_jstep():
    """Within the block, collect the warnings and errors that jstep logs, and print none of them."""
    logger, handler = logging.getLogger("jstep"), _Lines()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _judge_restored(saver, template, expected, newest):
    try:
        with warnings_of_jstep() as lines:
            restored = bits(saver.restore(template))
    except FileNotFoundError:
        return VANISHED if newest >= 0 else ACCEPTABLE
    except CheckpointError:
        return REFUSED
    if restored not in expected:
        return WRONG
    if lines:
        return WARNED
    return (
        OLDER
        if max(i for i, one in enumerate(expected) if one == restored) < newest
        else ACCEPTABLE
    )


def _leftovers(directory):
    return [name for name in os.listdir(directory) if re.match(r"(model|best)-\d+[^\d]", name)]


def weights_judge(limits):
    """Judge states of weights saved several times to one path, and read from its folder.

    While one file replaces shards, or shards a file, the folder has both, and reading it is
    refused. Then each of the two has to be all of a save, and one of them new enough.
    """
    expected = [bits(cut_runs.weights(number)) for number in range(len(limits))]
    template = jax.eval_shape(lambda: cut_runs.weights(0))

    def judge(state, folder):
        path, newest = cut_runs.path_of_weights(folder), acknowledged(state)
        where, two = os.path.dirname(path), [path, path + ".index.json"]
        try:
            sources = two if all(map(os.path.exists, two)) else [where]
            loaded = [bits(jstep.load_weights(source, template)) for source in sources]
        except FileNotFoundError:
            return VANISHED if newest >= 0 else ACCEPTABLE
        except ValueError:
            return REFUSED if newest >= 0 else ACCEPTABLE
        if not set(loaded) <= set(expected):
            return WRONG
        if max(map(expected.index, loaded)) < newest:
            return OLDER
        jstep.save_weights(path, cut_runs.weights(99))
        return ACCEPTABLE if os.listdir(where) == [os.path.basename(path)] else LEFTOVERS

    return judge


def train_judge(state, folder):
    """Judge a state of a run by what it restores and by its records; if in doubt, let the run
    resume."""
    newest, states = acknowledged(state), cut_runs.states_of_run()
    with jstep.Saver(cut_runs.checkpoints(folder)) as saver:
        expected = [states.get(step, b"") for step in range(LAST + 1)]
        verdict = _judge_restored(saver, cut_runs.new_state(), expected, newest)
        if verdict != ACCEPTABLE:
            return verdict
        restored = saver.latest_step() or 0
    if not _has_records(folder, restored, has_ended=newest == LAST):
        return RECORDS_LOST
    if _has_best(folder, restored):
        return ACCEPTABLE
    return BEST_LOST if restart_judge(state, folder) != ACCEPTABLE else ACCEPTABLE


def _has_best(folder, restored):
    """Return whether the best of the evaluations until a step, or better ones, are kept."""
    best = sorted(LOSSES[step] for step in range(EVERY, restored + 1, EVERY))[:KEPT_BEST]
    with jstep.Saver(os.path.join(folder, "best"), prefix="best") as saver:
        try:
            kept = {
                step: bits(saver.restore(cut_runs.new_state(), step=step))
                for step in saver.all_steps()
            }
        except CheckpointError:
            return False
    is_wrong = any(found != cut_runs.states_of_run()[step] for step, found in kept.items())
    if is_wrong or len(kept) < len(best):
        return False
    return all(
        found <= wanted
        for found, wanted in zip(sorted(LOSSES[step] for step in kept), best, strict=False)
    )


def _has_records(folder, restored, *, has_ended):
    """Return whether summaries, fingerprints and the record have all steps before a checkpoint: no
    run repeats them."""
    steps = set(range(1, restored + 1))
    logs = os.path.join(folder, "logs")
    if not steps:
        return True
    try:
        series = read_scalars(logs, on_corrupted=lambda error: None)  # what comes before it is kept
        logged = fingerprint_log.read_log(
            os.path.join(logs, fingerprint_log.FINGERPRINTS_FILE)
        ).entries
        starts = read_starts(cut_runs.checkpoints(folder)).get("model", [])
    except (OSError, ValueError):
        return False
    # Between two checkpoints, a start is replaced without a flush: a power cut may cost it, but
    # neither the others nor one that has ended.
    timed = max(
        (start["step"][1] for start in starts if not start["problem"] and start["step"]),
        default=restored,
    )
    is_lost = any(start["problem"] for start in starts) or len(starts) < _count_starts(folder)
    is_timed = timed >= restored or (is_lost and not has_ended)
    return (
        steps <= {point.step for point in series.get("loss", ())}
        and steps <= set(logged)
        and is_timed
    )


def _count_starts(folder):
    names = os.listdir(os.path.join(cut_runs.checkpoints(folder), FOLDER))
    return sum(re.fullmatch(r"model\.\d+\.json", name) is not None for name in names)


@functools.cache
def _end():
    with tempfile.TemporaryDirectory() as folder:
        state = cut_runs.train(folder)
        return bits(state), _best_steps(folder)


def _best_steps(folder):
    with jstep.Saver(os.path.join(folder, "best"), prefix="best") as saver:
        return saver.all_steps()


def restart_judge(state, folder):
    """Judge a state by the end of the run that resumes from it."""
    try:
        ended = cut_runs.train(folder)
    except CheckpointError:
        return REFUSED
    end, best = _end()
    # An eviction that did not reach the disk leaves one more, which is worse than these.
    if bits(ended) != end or not set(best) <= set(_best_steps(folder)):
        return OTHER_END
    shown = (
        EventAccumulator(os.path.join(folder, "logs"), size_guidance={"scalars": 0})
        .Reload()
        .Scalars("loss")
    )
    if [point.step for point in shown] != list(range(1, LAST + 1)):
        return SHOWN_OTHERWISE
    for where, prefix in (
        (cut_runs.checkpoints(folder), "model"),
        (os.path.join(folder, "best"), "best"),
    ):
        with jstep.Saver(where, prefix=prefix) as saver:
            saver.claim()  # a run that is at its last step does not write
        if _leftovers(where):
            return LEFTOVERS
    return ACCEPTABLE
