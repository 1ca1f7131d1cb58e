"""Whether a thread reads the batches ahead of the loop, decided all along by what either way costs the loop.

A thread hides the time that batches take, and costs time of its own: handing over, and the interpreter's lock, which
Python code of the thread and of the loop cannot hold at once. What this costs depends on the machine, its load, the
batches, and the step, so it is measured: now and then the other way is on trial for a few calls, and is kept if it
makes the calls quicker.
"""

from collections.abc import Sequence
from typing import NamedTuple

_SHARE = 0.05
"""The share of the time of a step that a change must gain."""
_LOSSES = 0.01
"""The share of the run's time that trials may cost."""
_APART = 16
"""The time between trials, as a multiple of the time of a trial that cost nothing."""
_MOST_CALLS = 64
"""The most calls from one decision to the next: enough for a good estimate."""
_HAND_OVER = 1e-4
"""The seconds that a step must wait for its batch before a thread is tried: handing a batch over wakes a thread twice
and moves the interpreter's lock as often, which takes tens of microseconds, and more beside busy processes."""
AHEAD = 2
"""The number of calls whose batches the thread reads ahead of the loop."""


TimedCall = tuple[float, float, int]
"""The seconds that the loop waited for the batches of a call, those until it needed the next ones, and its steps.

A plain tuple, because one is made at each call.
"""


class Choice(NamedTuple):
    """A way of reading batches, used until the next decision.

    Attributes:
        ahead: Whether a thread reads them ahead of the loop.
        calls: The number of calls until the next decision.
        is_trial: Whether this way of reading is on trial.
        usual: During a trial, the cost of the other way, in seconds per step.
        trial: The number of calls of the next trial.
        patience: The seconds until the next trial; negative if it is overdue.
    """

    ahead: bool = False
    calls: int = 4
    is_trial: bool = False
    usual: float = 0.0
    trial: int = 8
    patience: float = 0.0


def cost(calls: Sequence[TimedCall]) -> tuple[float, float]:
    """Return the typical seconds per step that the loop waited, and those of everything.

    Some waits are long by chance, such as those in which another process had the core: the longest eighth is left out.
    The others count on average, as loaders may be slow at every second or third batch. Of the rest, the median counts:
    some calls save or evaluate, which has nothing to do with the batches.
    """
    waits = sorted(waited / steps for waited, _, steps in calls)
    waits = waits[: len(waits) - len(waits) // 8]
    waited = sum(waits) / len(waits)
    return waited, waited + sorted(rest / steps for _, rest, steps in calls)[len(calls) // 2]


def decide(choice: Choice, calls: Sequence[TimedCall]) -> Choice:
    """Return how to read the next batches.

    Trials last longer and longer, for better estimates. After each, the next one waits until its loss is a small share
    of the time of the run. As long as the loop reads the batches itself and waits next to nothing for them, or less
    than handing them over would take, a thread could gain nothing and there is no trial.

    Args:
        choice: How batches were read.
        calls: The calls since the last decision.
    """
    waited, now = cost(calls)
    steps = sum(steps for _, _, steps in calls)
    if choice.is_trial:
        wins = now < (1 - _SHARE) * choice.usual
        patience = max((now - choice.usual) * steps / _LOSSES, _APART * now * steps)
        longer = min(2 * choice.trial, _MOST_CALLS)
        return Choice(choice.ahead if wins else not choice.ahead, calls=choice.trial, trial=longer, patience=patience)
    patience = choice.patience - now * steps
    if patience > 0 or not (choice.ahead or waited > max(_SHARE * now, _HAND_OVER)):
        return choice._replace(calls=min(2 * choice.calls, _MOST_CALLS), patience=patience)
    return Choice(not choice.ahead, calls=choice.trial, is_trial=True, usual=now, trial=choice.trial)


class ReadAhead:
    """The current choice of a run, revised as the times of its calls come in.

    Attributes:
        choice: How batches are read now.
    """

    def __init__(self) -> None:
        self.choice = Choice()
        self._calls: list[TimedCall] = []
        # Not representative: what precedes the first call, the first calls, which open files and compile, and those
        # after a change, whose batches are still read the other way.
        self._unsettled = AHEAD + 1

    def after_call(self, waited: float, rest: float, steps: int) -> bool:
        """Record the call that has ended, as in `TimedCall`; return whether the thread reads the next batches."""
        if self._unsettled:
            self._unsettled -= 1
            return self.choice.ahead
        self._calls.append((waited, rest, steps))
        if len(self._calls) >= self.choice.calls:
            before = self.choice.ahead
            self.choice = decide(self.choice, self._calls)
            self._calls.clear()
            self._unsettled = AHEAD if self.choice.ahead != before else 0
        return self.choice.ahead


class NeverAhead(ReadAhead):
    """For batches that must not be made ahead, whatever the times."""

    def after_call(self, waited: float, rest: float, steps: int) -> bool:
        """False."""
        return False
