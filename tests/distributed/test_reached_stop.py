"""Whether JAX's preemption service has stopped the processes, once and for all."""

import threading
from typing import Any

import pytest
from doubles import raising

from jstep.distributed import processes


def test_a_stop_is_remembered_and_refuses_another_run(monkeypatch: Any) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(processes.multihost_utils, "reached_preemption_sync_point", lambda step: next(answers))
    monkeypatch.setattr(processes, "_has_stopped", threading.Event())
    assert not processes.should_stop()
    assert not processes.should_stop()
    processes.refuse_another_run()
    assert processes.should_stop()
    with pytest.raises(RuntimeError, match="a signal has stopped a run of these processes before"):
        processes.refuse_another_run()


def test_without_the_service_nothing_stops(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        processes.multihost_utils,
        "reached_preemption_sync_point",
        raising(RuntimeError("the preemption service is off")),
    )
    assert not processes.should_stop()
