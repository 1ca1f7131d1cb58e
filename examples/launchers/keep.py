"""One machine: restart a command while its exit code says that it helps, and the run advances.

    python keep.py runs/launched -- python train.py --checkpoint-dir runs/launched

Signals to keep.py, such as Ctrl-C, are passed on to the command, which saves and is not started
again. The command is the program itself; a shell script around it should end with `exec python …`.
"""

import json
import os
import signal
import subprocess
import sys

AGAIN = (143, 138, 129, 75)  # a signal or `stop_secs`: the state is saved; 75: it hung
KILLED = 137  # such as out of memory: started again, once
received = []


def start(command):
    """Run the command, pass signals on to it, and return its exit code as a shell shows it."""
    # In a session of its own: Ctrl-C in a terminal would reach it twice, which stops it without a
    # checkpoint.
    try:
        child, passed_on = subprocess.Popen(command, start_new_session=True), 0
    except OSError as error:
        print(f"keep.py: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)  # as a shell
    while True:
        try:
            code = child.wait(0.1)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            for number in received[passed_on:]:
                child.send_signal(number)
                passed_on += 1


def progress(run, python):
    """Return the step that the run has reached, None if unknown, and how its latest start ended."""
    try:
        command = [python, "-m", "jstep", "runs", run, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout or "[]")  # none if the command ended before `train`
    except (OSError, ValueError) as error:
        return None, f"{python} -m jstep: {error}"
    if done.returncode not in (0, 2):  # 2: there is no such directory yet
        problem = (done.stderr.strip().splitlines() or [done.returncode])[-1]
        return None, f"{python} -m jstep: {problem}"
    ends = [(one.get("starts") or [one])[-1] for one in found]
    words = "; ".join(f"{end['status']} {end['reason'] or ''}" for end in ends)
    return sum(one["step"] or 0 for one in found), words


def keep(run, command):
    # The interpreter of the command has jstep.
    python = command[0] if "python" in os.path.basename(command[0]) else sys.executable
    reached, idle, code = progress(run, python)[0] or 0, 0, 0
    while True:
        before, code = code, start(command)
        step, end = progress(run, python)
        if step is not None:  # an unknown step does not count as a lack of progress
            reached, idle = max(reached, step), 0 if step > reached else idle + 1
        at = "unknown" if step is None else step
        print(f"keep.py: exit code {code}, step {at}: {end or 'there is no run'}", file=sys.stderr)
        if received or (code not in AGAIN and (code != KILLED or before == KILLED)):
            return code
        if idle == 2:
            return f"keep.py: two starts without a step: {' '.join(command)} is not started again"


if __name__ == "__main__":
    if sys.argv[2:3] != ["--"] or not sys.argv[3:]:
        sys.exit("usage: keep.py RUN -- COMMAND…")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: received.append(number))
    sys.exit(keep(sys.argv[1], sys.argv[3:]))
