"""One writer of a prefix below a URL, whatever became of the one before."""

import os
import subprocess
import sys

import pytest
from object_states import state_at

import jstep
from jstep.checkpoint.store import object_claim, object_save, owner
from jstep.stores import Directory, objects


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"})


def test_a_second_writer_is_refused(store):
    with jstep.Saver(store.run) as first, jstep.Saver(store.run) as second:
        first.save(state_at(1))
        with pytest.raises(jstep.CheckpointError, match=r"is being written by process \d+ on .*, which is this one"):
            second.save(state_at(2))
        with pytest.raises(jstep.CheckpointError, match="is being written"):
            second.claim()
        jstep.Saver(store.run, prefix="best").save(state_at(2))
        assert second.all_steps() == [1]
    with jstep.Saver(store.run) as third:
        third.save(state_at(2))


def test_a_saver_that_nobody_holds_is_no_obstacle(store):
    jstep.Saver(store.run).save(state_at(1))
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(2))


def forge(store, monkeypatch, beat):
    monkeypatch.setattr(object_claim, "SILENT", 0.2)
    text = b'{"host": "elsewhere", "pid": 12, "id": "x", "beat": %d}'
    store.put("bkt", "run/~claims/model", text % 0)
    if beat:
        reads = []

        def renew(number):
            if "~claims" in store.seen[-1]:
                reads.append(number)
                with store.lock:
                    store.put("bkt", "run/~claims/model", text % len(reads))

        store.watch = renew


def test_a_claim_of_another_host_that_is_renewed_holds(store, monkeypatch):
    forge(store, monkeypatch, beat=True)
    with pytest.raises(jstep.CheckpointError, match="process 12 on elsewhere"):
        jstep.Saver(store.run).claim()


def test_a_claim_of_another_host_that_is_silent_does_not(store, monkeypatch):
    forge(store, monkeypatch, beat=False)
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))


def test_who_lost_the_claim_commits_nothing(store):
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
        saver.wait()
        with store.lock:
            store.put("bkt", "run/~claims/model", b'{"host": "elsewhere", "pid": 12, "id": "x"}')
        saver.save(state_at(2))
        with pytest.raises(jstep.CheckpointError, match="process 12 on elsewhere"):
            saver.wait()
        assert saver.all_steps() == [1]
    assert store.data("run/~claims/model").startswith(b'{"host": "elsewhere"')


def test_a_claim_is_renewed(store, monkeypatch):
    monkeypatch.setattr(object_claim, "BEAT", 0.01)
    with jstep.Saver(store.run) as saver:
        saver.claim()
        first = store.data("run/~claims/model")
        for _ in range(300):
            if store.data("run/~claims/model") != first:
                break
            saver._store._claimed._ended.wait(0.01)
        assert store.data("run/~claims/model") != first
        saver.save(state_at(1))


def test_two_writers_of_one_step(store):
    """Where both got past the claim, the manifest's condition holds one of them back."""
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
        saver.wait()
        theirs = store.data("run/model-1/manifest.json").replace(b'"step": 1', b'"step": 1 ')

        def commit(number):
            if "pack.0.0" in store.seen[-1]:
                with store.lock:
                    store.put("bkt", "run/model-1/manifest.json", theirs)

        store.watch = commit
        saver.save(state_at(1, 5))
        with pytest.raises(jstep.CheckpointError, match="another writer"):
            saver.wait()
        assert store.data("run/model-1/manifest.json") == theirs


def test_who_lost_the_claim_while_it_committed_takes_it_back(store):
    """A process that was suspended between its two requests: another one may have cleared its data meanwhile."""
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
        saver.wait()

        def take(number):
            if "manifest" in store.seen[-1] and store.seen[-1].startswith(("PUT", "POST")):
                with store.lock:
                    store.put("bkt", "run/~claims/model", b'{"host": "elsewhere", "pid": 12, "id": "x"}')

        store.watch = take
        saver.save(state_at(2))
        with pytest.raises(jstep.CheckpointError, match="process 12 on elsewhere"):
            saver.wait()
        store.watch = None
        assert saver.all_steps() == [1]


@pytest.mark.parametrize("beats", ["stopped", "go on", "not permitted"])
def test_the_others_wait_for_the_first_as_long_as_it_lives(gcs, monkeypatch, beats):
    """Where its network is down it cannot say how the save ended; without the right to replace it renews nothing."""
    for name, seconds in {"BEAT": 0.02, "_SILENT": 0.1, "_OTHERS": 1e9}.items():
        monkeypatch.setattr(object_save, name, seconds)
    gcs.put("bkt", "run/~claims/model", b'{"beat": %d}' % (beats != "not permitted"))
    reads = []

    def watch(number):
        reads.append("~claims" in gcs.seen[-1])
        with gcs.lock:
            if beats == "go on":
                gcs.put("bkt", "run/~claims/model", b'{"beat": %d}' % number)
            if beats != "stopped" and sum(reads) == 4:
                gcs.put("bkt", "run/model-1/data.1-a/outcome.json", b'{"failed": ""}')

    gcs.watch = watch
    nothing = lambda *args: b""  # noqa: E731
    save = object_save.ObjectSave(Directory("gs://bkt/run"), "model-1", "data.1-a", [], False, (1, 2), (nothing,) * 2)
    if beats == "stopped":
        with pytest.raises(jstep.CheckpointError, match="the first process has not reported the outcome"):
            save.wait()
    else:
        save.wait()


CHILD = """
import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)
import jstep
savers = [jstep.Saver(url) for url in sys.argv[1:]]
for saver in savers:
    saver.claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(gcs, s3):
    urls = ["gs://bkt/run", "s3://bkt/run"]
    code = [sys.executable, "-c", CHILD, *urls]
    child = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    savers = [jstep.Saver(url) for url in urls]
    try:
        assert child.stdout.readline() == "claimed\n"
        for saver in savers:
            with pytest.raises(jstep.CheckpointError, match=f"by process {child.pid} on "):
                saver.save(state_at(1))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, which is as dead
        assert owner.started(child.pid) is None
        for saver in savers:
            with saver:
                saver.save(state_at(1))
            assert saver.all_steps() == [1]
    finally:
        child.kill()
        child.communicate(timeout=60)
