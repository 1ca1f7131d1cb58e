"""The warnings of a page: what failed or is lost first and whole, what changed from start to start
in a folded list."""

import re

from written_runs import TIME, write_run

import jstep

REMEDY = "`mv model-60 model-60.aside.0`"


def warnings_of(page):
    """The items of the list, and those of the folded one."""
    section = page.partition("<h2>Warnings</h2>")[2].partition("<h2>")[0]
    loud, _, folded = section.partition("<details")
    return re.findall("<li>(.*?)</li>", loud), re.findall("<li>(.*?)</li>", folded)


def write_unlucky(folder):
    """A run that failed, failed again without a step, was killed in an evaluation, and was finished
    then."""
    times = [{"began": TIME + 100 * i, "now": TIME + 100 * i + 50} for i in range(6)]
    full = ["failed", "OSError: [Errno 28] No space left on device"]
    write_run(folder, 1, step=[0, 20], end=full, **times[0])
    write_run(folder, 2, step=None, end=full, **times[1])
    write_run(folder, 3, step=None, end=full, **times[2])
    write_run(folder, 4, step=[20, 36], end=None, phase="evaluating", **times[3])
    write_run(folder, 5, step=[30, 40], end=["interrupted", "SIGTERM"], other_batch=30, **times[4])
    seconds = {"stepping": 10.0, "saving": 9.0}
    write_run(folder, 6, step=[40, 60], config={"lr": 0.2}, seconds=seconds, **times[5])


UNLUCKY = [
    "start 1: steps 0 to 20, failed: OSError: [Errno 28] No space left on device",
    "starts 2 to 3: no step, failed: OSError: [Errno 28] No space left on device",
    "start 4: steps 20 to at least 36, killed (in the evaluation at 36)",
    "steps 30 to at least 36 were made again by a later start",
    "batch 30 does not match the one read before the restart (start 5)",
]


def test_failures_and_lost_steps_come_first_and_notes_are_folded(tmp_path):
    write_unlucky(tmp_path)
    page = jstep.report(tmp_path).html
    loud, folded = warnings_of(page)
    assert loud == UNLUCKY
    assert [line for line in folded if "config: lr: 0.1 before, 0.2 now" in line]
    assert [line for line in folded if line.startswith("saving: 0 → 450 ms a step")]
    assert "<details open>" in page.partition("<h2>Warnings</h2>")[2].partition("<h2>")[0]


def test_of_several_runs_only_those_that_failed_are_in_the_list(tmp_path):
    write_unlucky(tmp_path / "unlucky")
    for i in range(9):
        write_run(tmp_path / f"r{i}", 1, step=[0, 10], now=TIME)
        write_run(tmp_path / f"r{i}", 2, step=[10, 20], seconds={"stepping": 9.0, "saving": 9.0})
    loud, folded = warnings_of(jstep.report(tmp_path).html)
    assert loud == [f"<b>unlucky</b>: {'; '.join(UNLUCKY)}"]
    assert len(folded) == 10


def test_many_failed_starts_are_counted_and_the_newest_are_named(tmp_path):
    for i in range(30):
        write_run(
            tmp_path,
            i + 1,
            step=None,
            end=["failed", f"ValueError: {i}"],
            began=TIME + i,
            now=TIME + i,
        )
    loud, _ = warnings_of(jstep.report(tmp_path).html)
    assert loud[0] == "20 earlier starts failed, were killed or took no step"
    assert loud[1:] == [f"start {i + 1}: no step, failed: ValueError: {i}" for i in range(20, 30)]


def test_a_reason_is_whole(tmp_path):
    """Its end is the command that helps."""
    write_run(tmp_path, end=["failed", f"CorruptedCheckpointError: {'because ' * 110}{REMEDY}"])
    loud, _ = warnings_of(jstep.report(tmp_path).html)
    assert loud[0].endswith(REMEDY)


def test_a_start_that_began_too_early_is_named(tmp_path):
    write_run(tmp_path, 1, step=[0, 10], now=TIME + 60)
    write_run(tmp_path, 2, step=[10, 20], began=TIME + 48, now=TIME + 90)
    loud, _ = warnings_of(jstep.report(tmp_path).html)
    assert loud[0].startswith("start 2 began 12 s before start 1 ended")
