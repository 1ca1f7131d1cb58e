"""Lists of a store that has no end, and keys that no bucket of jstep has."""

import json

import pytest

import jstep
from jstep.look.cli import main
from jstep.stores.objects import Bucket, EndlessListError, Objects


def endless_list(store, keys_per_page):
    """Return the page of a list that is never the last one."""
    numbers = iter(range(10**9))

    def page():
        return [f"run/model-{next(numbers)}/manifest.json" for _ in range(keys_per_page)]

    def list_s3(bucket, query):
        keys = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in page())
        token = "<IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"
        return 200, f"<ListBucketResult>{token}{keys}</ListBucketResult>".encode(), {}

    def list_gcs(objects, query):
        items = [{"name": key, "generation": "1", "size": "1"} for key in page()]
        return 200, json.dumps({"items": items, "nextPageToken": "6d6f7265"}).encode(), {}

    return list_s3 if store.run.startswith("s3") else list_gcs


@pytest.mark.parametrize("keys_per_page", [0, 3])
def test_a_list_of_small_pages_without_end_is_an_error(each_store, keys_per_page):
    each_store.list = endless_list(each_store, keys_per_page)
    with pytest.raises(
        EndlessListError,
        match=r"run: cannot list: the list has not ended after \d+ pages",
    ):
        Objects(each_store.run).list()


def test_pages_of_the_usual_size_are_bounded_by_their_bytes(store, monkeypatch):
    monkeypatch.setattr("jstep.stores.objects._MAX_LIST_BYTES", 2**22)
    store.list = endless_list(store, 1000)
    with pytest.raises(
        EndlessListError,
        match=r"with \d+\.\d MB\. Pass a URL further below in the bucket",
    ):
        Objects(store.run).list()


@pytest.mark.parametrize("command", ["runs", "inspect"])
def test_commands_report_an_endless_list_in_a_line(store, capsys, command):
    store.list = endless_list(store, 3)
    assert main([command, store.run]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the list has not ended after" in line


def test_a_run_does_not_begin_on_an_endless_list(store):
    store.list = endless_list(store, 3)
    with jstep.Saver(store.run) as saver, pytest.raises(EndlessListError):
        saver.restore(None)


def test_reads_and_writes_beside_a_list_are_not_its_pages(store, monkeypatch):
    """What the process receives meanwhile is more than the pages of a list."""
    monkeypatch.setattr("jstep.stores.objects._MAX_SMALL_PAGES", 12)
    monkeypatch.setattr("jstep.stores.objects._MAX_LIST_BYTES", 2**21)
    monkeypatch.setattr("jstep.stores.objects._POLL_SECS", 0.01)
    bucket = Bucket(store.run)
    for number in range(9):
        bucket.write(f"a/{number}", b"x" * 10**6)
    list_page = store.list

    def list_beside_others(*arguments):
        store.lock.release()  # of the request for this page: the others are served meanwhile
        try:
            for _ in range(8):
                bucket.read("a/1")
                bucket.write("0", b"1")
        finally:
            store.lock.acquire()
        return list_page(*arguments)

    store.list = list_beside_others
    assert bucket.list("a/", "a0") == [f"a/{number}" for number in range(9)]


@pytest.mark.parametrize("name", ["9" * 5000, "0" * 5000, "1" * 20])
def test_keys_that_are_no_steps_are_no_checkpoints(store, name, capsys):
    for key in (
        f"run/model-{name}/manifest.json",
        f"run/~attempts/model-{name}/data.1",
        f"run/model.{name}-writer",
    ):
        store.put("bkt", key, b"{}")
    with jstep.Saver(store.run) as saver:
        assert saver.latest_step() is None
    assert main(["inspect", store.run]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint" in line
