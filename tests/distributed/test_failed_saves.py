"""A save that fails on one process alone ends all of them by its error, even if that process can
write nothing."""

import pytest
from processes import start, wait_for

RUN = """
import resource
who, fails, target = sys.argv[5], int(sys.argv[6]), sys.argv[7]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"))

def break_storage(step, state, metrics):
    if process != fails or step != 2:
        return
    if target == "begin":
        from jstep.array_store.directory_store import DirectoryStore
        def begin(*_, **__):
            raise OSError("a mount that is read-only")
        DirectoryStore.begin = begin
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

hooks = [jstep.every(1, break_storage)]
if who == "KeepBest":
    best = jstep.KeepBest(directory + "/best", "value", mode="max")
    hooks.append(jstep.EvaluationHook(lambda state: {"value": 1.0}, every_n_steps=2, callbacks=[best]))
jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, 6, hooks=hooks, checkpoint_dir=directory + "/run",
            log_steps=None, save_checkpoint_steps=2 if who == "run" else 3, save_checkpoint_secs=None,
            batch_sharding=rows)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("who", "fails", "target"),
    [
        ("run", 0, "write"),
        ("run", 1, "write"),
        ("run", 1, "begin"),
        ("KeepBest", 0, "write"),
        ("KeepBest", 1, "write"),
    ],
)
def test_one_process_that_cannot_write_ends_all(tmp_path, who, fails, target):
    """Its error cannot go by a file; the others would wait for two minutes and say that its write
    hangs."""
    ended = wait_for(start(RUN, 2, tmp_path, who, fails, target, patience=60), timeout=90)
    assert [one.code for one in ended] == [1, 1], ended[0].err[-3000:] + ended[1].err[-3000:]
    assert "was not saved: " in ended[fails].err
    error = "OSError: a mount" if target == "begin" else "ValueError: OUT_OF_RANGE: Error writing"
    assert f"process {fails}: {error}" in ended[1 - fails].err
    assert not any("hangs" in one.err for one in ended)
