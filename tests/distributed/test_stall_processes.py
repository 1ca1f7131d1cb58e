"""`StallHook` on several processes: each says what it waits for, and who is elsewhere."""

import os
import re
import signal
import time

import pytest
from processes import start, wait_for

import jstep
from jstep.look.cli import main
from jstep.record.stall_files import read_stalls

TRAIN = """
mode, late = sys.argv[5], int(sys.argv[6])
state = jstep.TrainState.create(init, optimizer, mesh=mesh, slot_axis="data")
step = jstep.minimize(loss_fn, optimizer)

def batch(number):
    time.sleep(0.01)
    if number == 30 and process == late:
        print("late", flush=True)
        if mode == "loader":
            time.sleep(60)
        elif mode != "hook":
            os.kill(os.getpid(), signal.SIGSTOP if mode == "stop" else signal.SIGKILL)
    return batches[number]

def hook(number, state, metrics):
    if number == 30 and process == late and mode == "hook":
        print("late", flush=True)
        time.sleep(60)

exit_secs = float(sys.argv[7]) or None
if mode == "denied" and process == late:
    def denied(self):
        raise PermissionError(13, "Permission denied", directory)
    jstep.Saver.latest_step = denied
jstep.train(step, state, batch, 10**6, checkpoint_dir=directory, save_checkpoint_secs=None, batch_sharding=rows,
            hooks=[jstep.every(1, hook), jstep.StallHook(warn_secs=0.5, exit_secs=exit_secs)])
"""  # noqa: E501


def lines_of(one):
    return [line for line in one.err.splitlines() if "has been" in line]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("loader", "waiting for batch 30"),
        (
            "hook",
            r"in the hook every\(1, hook\) at step 30",
        ),
    ],
)
@pytest.mark.parametrize("late", [0, 2])
def test_the_process_that_is_late_is_named_by_the_first_one(tmp_path, mode, what, late):
    processes = start(TRAIN, 4, tmp_path, mode, late, 6.0)
    until = time.monotonic() + 60
    while time.monotonic() < until and not read_stalls(str(tmp_path))[0]:
        time.sleep(0.1)
    assert main(["stalls", str(tmp_path)]) == 1
    ended = wait_for(processes)
    assert ended[late].code == 75, ended[late].err[-3000:]
    assert re.search(rf"process {late} of 4 \(host \S+\) has been {what} for ", ended[late].err)
    # The first process tells who is elsewhere: the others only say what they wait for.
    said = [lines_of(one) for one in ended]
    assert all(said), [one.err[-3000:] for one in ended]
    others = (
        r"; 3 others are in steps? " if late == 0 else (rf"; process {late} \(host \S+\) is {what}")
    )
    assert any(re.search(others, line) for line in said[0]), said
    assert not any(
        re.search(r"others are| is waiting", line) for each in said[1:] for line in each
    ), said
    assert main(["stalls", str(tmp_path)]) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["stop", "kill"])
def test_a_process_of_which_nothing_is_heard_is_named(tmp_path, mode):
    processes = start(TRAIN, 4, tmp_path, mode, 2, 8.0)
    for line in processes[2].stdout:
        if line.startswith("late"):
            break
    for one in processes[:2] + processes[3:]:
        one.wait(60)
    processes[2].send_signal(signal.SIGCONT)
    processes[2].send_signal(signal.SIGKILL)
    ended = wait_for(processes)
    said = [line for i in (0, 1, 3) for line in lines_of(ended[i])]
    if mode == "stop":
        assert any(line.endswith("no sign of life from process 2") for line in said), said
    # A process that is gone closes its connections, so that the collective of the others may fail
    # at once.
    assert [one.code for i, one in enumerate(ended) if i != 2 and one.code == 0] == []


@pytest.mark.thorough
def test_an_error_at_the_start_of_one_process_is_an_error_of_all(tmp_path):
    ended = wait_for(start(TRAIN, 2, tmp_path, "denied", 1, 0), timeout=60)
    assert "PermissionError: [Errno 13] Permission denied" in ended[1].err
    assert (
        "the checkpoints cannot be read: process 1: PermissionError: [Errno 13] Permission denied"
        in ended[0].err
    )
    assert all(one.code not in (0, None) for one in ended)
    assert jstep.latest_checkpoint(tmp_path) is None
    assert os.path.isdir(tmp_path)
