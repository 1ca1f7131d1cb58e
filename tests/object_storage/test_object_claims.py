"""Claims in object stores: one writer of a prefix below a URL, until it is closed or stops renewing
its claim."""

import os
import subprocess
import sys

import pytest
from comparisons import same
from object_states import state_at

import jstep
from jstep.array_store import claims
from jstep.checkpoint.saver import engine_of
from jstep.stores import owners

pytestmark = pytest.mark.usefixtures("fast_retries")


def test_a_second_writer_is_refused(store):
    with jstep.Saver(store.run) as first, jstep.Saver(store.run) as second:
        first.save(state_at(1))
        with pytest.raises(
            jstep.CheckpointError,
            match=r"is being written by process \d+ on .*, which is this one",
        ):
            second.save(state_at(2))
        with pytest.raises(jstep.CheckpointError, match="is being written"):
            second.claim()
        jstep.Saver(store.run, prefix="best").save(state_at(2))
        first.wait()
        assert second.all_steps() == [1]
    with jstep.Saver(store.run) as third:
        third.save(state_at(2))


def claim_of_another_host(store, monkeypatch, beat):
    monkeypatch.setattr(claims, "OBJECT_SILENT_SECS", 0.2)
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


def test_a_renewed_claim_of_another_host_holds(store, monkeypatch):
    claim_of_another_host(store, monkeypatch, beat=True)
    with pytest.raises(jstep.CheckpointError, match="process 12 on elsewhere"):
        jstep.Saver(store.run).claim()


def test_a_stale_claim_of_another_host_expires(store, monkeypatch):
    claim_of_another_host(store, monkeypatch, beat=False)
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))


def test_a_writer_that_lost_its_claim_does_not_commit(store):
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


def test_claims_are_renewed_periodically(store, monkeypatch):
    monkeypatch.setattr(claims, "RENEWAL_SECS", 0.01)
    with jstep.Saver(store.run) as saver:
        saver.claim()
        first = store.data("run/~claims/model")
        for _ in range(300):
            if store.data("run/~claims/model") != first:
                break
            engine_of(saver)._store._claim._ended.wait(0.01)
        assert store.data("run/~claims/model") != first
        saver.save(state_at(1))


def test_a_conditional_write_prevents_two_commits(store):
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
        saver.wait()
        other_manifest = store.data("run/model-1/manifest.json").replace(
            b'"step": 1', b'"step": 1 '
        )

        def commit(number):
            if "_CHECKPOINT_METADATA" in store.seen[-1]:
                with store.lock:
                    store.put("bkt", "run/model-1/manifest.json", other_manifest)

        store.watch = commit
        saver.save(state_at(1, 5))
        with pytest.raises(jstep.CheckpointError, match="another writer"):
            saver.wait()
        assert store.data("run/model-1/manifest.json") == other_manifest


@pytest.mark.parametrize("step", [1, 2])
def test_a_claim_lost_during_the_commit_reverts_it(step, store):
    """The process may have been suspended between two requests, while another one deleted its data.

    A checkpoint of the same step, which the commit has replaced, is there again.
    """
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
        saver.wait()

        def take(number):
            if "manifest.json" in store.seen[-1] and store.seen[-1].startswith(("PUT", "POST")):
                with store.lock:
                    store.put(
                        "bkt", "run/~claims/model", b'{"host": "elsewhere", "pid": 12, "id": "x"}'
                    )

        store.watch = take
        saver.save(state_at(step, 5.0))
        with pytest.raises(jstep.CheckpointError, match="process 12 on elsewhere"):
            saver.wait()
        store.watch = None
        assert saver.all_steps() == [1]
    assert same(jstep.Saver(store.run).restore(state_at(0)), state_at(1))


CHILD = """
import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)
import jstep
savers = [jstep.Saver(url) for url in sys.argv[1:]]
for saver in savers:
    saver.claim()
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.thorough
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
        # It is still a zombie, which counts as dead.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owners.start_time(child.pid) is None
        for saver in savers:
            with saver:
                saver.save(state_at(1))
            assert saver.all_steps() == [1]
    finally:
        child.kill()
        child.communicate(timeout=60)
