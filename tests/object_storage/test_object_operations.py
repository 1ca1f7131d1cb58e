"""Operations on objects (read, write, delete, list), their errors, and when a list is complete."""

import re

import pytest

from jstep.stores import objects
from jstep.stores.objects import ABSENT, Bucket, Objects, StoreError


@pytest.fixture
def store(each_store):
    return each_store


def test_read_write_delete_list(store):
    directory = Objects(store.run)
    assert directory.read("a").data is None
    stamp = directory.write("a", b"1")
    assert directory.read("a") == objects.ReadResult(b"1", stamp)
    for i in range(7):
        directory.write(f"d/{i}", b"x" * i)
    assert directory.list() == ["a", *(f"d/{i}" for i in range(7))]
    assert directory.list("d/2", "d/5") == ["d/2", "d/3", "d/4"]
    assert directory.delete("a")
    assert directory.delete("a")
    assert store.keys() == [f"run/d/{i}" for i in range(7)]


def test_keys_with_special_characters(store):
    directory = Objects(store.run)
    keys = ["a b%25+&=;.x", "ключ/é", "\U0010fffd~", "~x", "x/#1"]
    for key in keys:
        directory.write(key, key.encode())
    assert directory.list() == sorted(keys)
    assert all(directory.read(key).data == key.encode() for key in keys)


def test_conditional_writes_and_deletes(store):
    directory = Objects(store.run)
    first = directory.write_if("a", b"1", ABSENT)
    assert first
    assert directory.write_if("a", b"2", ABSENT) is None
    second = directory.write_if("a", b"3", first)
    assert second
    assert directory.write_if("a", b"4", first) is None
    assert not directory.delete("a", first)
    assert directory.read("a").data == b"3"
    assert directory.delete("a", second)
    assert directory.read("a").data is None


def test_a_lost_response_is_not_a_failed_condition(store, fast_retries):
    directory = Objects(store.run)
    store.fail = [("POST|PUT", "", 0, 1)]
    stamp = directory.write_if("a", b"own", ABSENT)
    assert stamp == directory.read("a").stamp
    store.fail = [("POST|PUT", "", 0, 1)]
    assert directory.write_if("a", b"next", stamp)
    assert directory.read("a").data == b"next"


def operations(directory):
    return {
        "read": lambda: directory.read("a"),
        "write": lambda: directory.write("a", b"1"),
        "delete": lambda: directory.delete("a"),
    }


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (401, PermissionError, "credentials are not valid, or have expired"),
        (403, PermissionError, "right"),
        (503, StoreError, "HTTP 503"),
        (429, StoreError, "HTTP 429"),
        (400, StoreError, "HTTP 400"),
    ],
)
def test_errors_name_the_operation_and_the_object(store, fast_retries, status, kind, text):
    directory = Objects(store.run)
    for operation, call in operations(directory).items():
        store.fail = [("", "", status, 99)]
        with pytest.raises(kind, match=text) as caught:
            call()
        message = str(caught.value)
        assert f"{store.run}/a: cannot {operation}" in message
        assert "secret" not in message
        assert "AKIA" not in message
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_a_missing_bucket(store, fast_retries):
    directory = Bucket(store.run.replace("bkt", "nope"))
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        directory.write("a", b"1")
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        directory.mark()


def test_an_unreachable_host_is_named(monkeypatch, fast_retries):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:1")
    with pytest.raises(ConnectionError, match=re.escape("127.0.0.1")):
        Objects("gs://bkt/run").read("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k" * 16)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s" * 16)
    with pytest.raises(ConnectionError, match="AWS_ENDPOINT_URL"):
        Objects("s3://bkt/run").read("a")


def test_a_store_that_does_not_respond_times_out(store):
    directory = Objects(store.run)
    directory.write("a", b"1")
    store.fail = [("GET", "", -1, 1)]
    with directory.time_limit(0.2), pytest.raises(ConnectionError, match="no response"):
        directory.read("a")
    assert directory.read("a").data == b"1"


def test_s3_reports_expired_keys_as_400(s3, fast_retries):
    s3.code, s3.fail = "ExpiredToken", [("", "", 400, 99)]
    with pytest.raises(PermissionError, match="expired"):
        Objects("s3://bkt/run").read("a")
    s3.code, s3.fail = "PermanentRedirect", [("", "", 301, 99)]
    with pytest.raises(StoreError, match="AWS_REGION"):
        Objects("s3://bkt/run").write("a", b"")


# Lists.


def test_a_list_must_contain_its_marker(store):
    directory = Bucket(store.run)
    assert directory.listing() == []
    directory.mark()
    for key in "abcdefg":
        directory.write(key, b"")
    directory.mark()
    assert directory.listing() == list("abcdefg")
    directory.write("я-1", b"")
    assert directory.listing() == [*"abcdefg", "я-1"]


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_list_that_ends_early_is_an_error(gcs, fast_retries, status, page):
    directory = Bucket("gs://bkt/run")
    directory.mark()
    for key in "abcdefg":
        directory.write(key, b"")
    gcs.fail = [("GET", "/o$", None, page), ("GET", "/o$", status, 99)]
    with pytest.raises(PermissionError, match="gs://bkt/run: cannot list"):
        directory.listing()
