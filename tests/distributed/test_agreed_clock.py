"""Which steps processes agree on by the clock of process 0: two clocks in one process, and a broadcast between them."""

from unittest import mock

from jstep.distributed import processes
from jstep.distributed.processes import AgreedClock

SECS = 10.0


class Two:
    """Process 0 and another one, whose clock runs at another speed; each step takes as long as is given."""

    def __init__(self, secs: float = SECS, speed: float = 3.0) -> None:
        self.now, self.sent, self.step, self.asked = 100.0, [0, 0], 0, ([], [])
        self.clocks = (
            AgreedClock(secs, lambda: self.now),
            AgreedClock(secs, lambda: 7.0 + speed * self.now),
        )

    def _send(self, *numbers: int) -> list[int]:
        self.asked[0].append(self.step)
        self.sent = [int(number) for number in numbers]
        return self.sent

    def _receive(self, *numbers: int) -> list[int]:
        self.asked[1].append(self.step)
        return self.sent

    def due(self, secs: float) -> bool:
        """Take a step; whether both say that the period is over."""
        self.step, self.now = self.step + 1, self.now + secs
        with mock.patch.object(processes, "broadcast_ints", self._send):
            first = self.clocks[0].due(self.step)
        with mock.patch.object(processes, "broadcast_ints", self._receive):
            second = self.clocks[1].due(self.step)
        assert first == second
        assert self.asked[0] == self.asked[1]  # or one of them would wait in a collective
        return first


def test_both_are_due_at_the_same_steps_by_the_clock_of_process_0() -> None:
    two, due = Two(), []
    for _ in range(400):
        if two.due(0.25):
            due.append(two.step)
            for clock in two.clocks:
                clock.done()
    gaps = [later - earlier for earlier, later in zip([0, *due], due, strict=False)]
    assert set(gaps) <= {40, 41, 42, 43, 44}  # 10 s, and at most a tenth of the period later
    assert len(two.asked[0]) <= 16 * len(due)  # of 40 steps: about ten times a period


def test_a_period_ends_exactly_with_its_last_second() -> None:
    two = Two()
    assert not two.due(9.999)
    assert two.due(0.001 + 1e-9)
    exact = Two(secs=16.0)
    assert exact.due(16.0)


def test_one_process_communicates_nothing() -> None:
    now = [0.0]
    clock = AgreedClock(1.0, lambda: now[0])
    assert not clock.due(1)
    now[0] = 1.0
    assert any(clock.due(step) for step in range(2, 200_000))
