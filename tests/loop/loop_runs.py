"""A small training run, a hook that records the calls of the loop, and a loader with a position."""

import os
import time

import jax
from comparisons import same as same
from positioned import Positioned
from problems import DATA, STEP, make_state
from problems import OPTIMIZER as OPTIMIZER
from problems import loss_fn as loss_fn

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.record.starts import read_starts


def train(last_step, batches=DATA, hooks=(), state=None, step=STEP, **kwargs):
    kwargs.setdefault("progress", False)
    state = make_state() if state is None else state
    return jstep.train(step, state, batches, last_step=last_step, hooks=hooks, **kwargs)


def by_hand(steps, state=None):
    state = make_state() if state is None else state
    for n in range(jstep.global_step(state), steps):
        state, _ = STEP(state, DATA[n])
    return state


class Calls(RunHook):
    def __init__(self, every_n=None, fail=None, stop=None):
        self.every_n, self.fail, self.stop = every_n, fail, stop
        self.seen, self.metrics, self.calls = [], {}, []

    def note(self, *event):
        self.seen.append(event)
        if self.fail == event:
            raise RuntimeError(f"failed at {event}")

    def begin(self, state):
        self.note("begin", jstep.global_step(state))
        self._run.poll(self, self.first_call)

    def first_call(self, *, wait=False):
        self.note("first", self._run.step)

    def before_step(self, step, state):
        self.calls.append(step)

    def after_step(self, step, state, metrics):
        self.metrics[step] = metrics
        assert jstep.global_step(state) == step
        assert type(step) is int
        self.note("step", step)
        return step == self.stop

    def before_save(self, step):
        self.note("save", step)

    def end(self, step, state):
        assert jstep.global_step(state) == step
        self.note("end", step)

    def close(self):
        super().close()
        self.note("close")

    def next_due(self, step):
        return None if self.every_n is None else (step // self.every_n + 1) * self.every_n

    def steps(self, what="step"):
        return [event[1] for event in self.seen if event[0] == what]


class Counted(Positioned):
    def __init__(self, kind=int, slow=0.0):
        super().__init__(DATA.__getitem__, kind)
        self.slow = slow

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self.slow)
        return super().__next__()


# Loops of one's own.


class BoomError(Exception):
    pass


def run_of(last_step, batches=DATA, **options):
    options.setdefault("progress", False)
    return jstep.Run(STEP, make_state(), batches, last_step, **options)


def start_of(directory):
    return read_starts(os.fspath(directory))["model"][-1]


def doubled(state):
    return state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))


def loop_to(last_step, *, directory, body=lambda run, step: None, **options):
    """Run a loop whose batches are those of `DATA`; the body is called at each step."""
    with run_of(last_step, checkpoint_dir=directory, **options) as run:
        for step in run:
            body(run, step)
    return run
