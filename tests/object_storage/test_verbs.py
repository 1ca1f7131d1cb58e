"""The verbs on objects, the errors they end in, and which lists are believed."""

import re

import pytest

from jstep.stores import ABSENT, Directory, Objects, StoreError, objects, outages

QUICK = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}


@pytest.fixture
def quick(monkeypatch):
    """Retries that take no time."""
    monkeypatch.setattr(objects, "RETRIES", QUICK)


def test_read_write_delete_list(store):
    there = Objects(store.run)
    assert there.read("a").data is None
    stamp = there.write("a", b"1")
    assert there.read("a") == objects.Found(b"1", stamp)
    for i in range(7):
        there.write(f"d/{i}", b"x" * i)
    assert there.list() == ["a", *(f"d/{i}" for i in range(7))]
    assert there.list("d/2", "d/5") == ["d/2", "d/3", "d/4"]
    assert there.found(there.start_read("d/6", 2, 5)).data == b"xxx"
    assert there.delete("a")
    assert there.delete("a")
    assert store.keys() == [f"run/d/{i}" for i in range(7)]


def test_odd_keys(store):
    there = Objects(store.run)
    keys = ["a b%25+&=;.x", "ключ/é", "\U0010fffd~", "~x", "x/#1"]
    for key in keys:
        there.write(key, key.encode())
    assert there.list() == sorted(keys)
    assert all(there.read(key).data == key.encode() for key in keys)


def test_conditions(store):
    there = Objects(store.run)
    first = there.write_if("a", b"1", ABSENT)
    assert first
    assert there.write_if("a", b"2", ABSENT) is None
    second = there.write_if("a", b"3", first)
    assert second
    assert there.write_if("a", b"4", first) is None
    assert not there.delete("a", first)
    assert there.read("a").data == b"3"
    assert there.delete("a", second)
    assert there.read("a").data is None


def test_an_answer_that_was_lost_is_no_lost_race(store, quick):
    there = Objects(store.run)
    store.fail = [("POST|PUT", "", 0, 1)]
    stamp = there.write_if("a", b"mine", ABSENT)
    assert stamp == there.read("a").stamp
    store.fail = [("POST|PUT", "", 0, 1)]
    assert there.write_if("a", b"next", stamp)
    assert there.read("a").data == b"next"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_bursts_are_survived(store, quick, status):
    there = Directory(store.run)
    for ask in (there.mark, lambda: there.write("a", b"1"), lambda: there.read("a"), there.listing):
        store.fail = [("", "", status, 3)]
        ask()
        assert store.fail[0][3] == 0
    store.fail = [("", "", status, 3)]
    assert there.delete("a")


def verbs(there):
    return {
        "read": lambda: there.read("a"),
        "write": lambda: there.write("a", b"1"),
        "delete": lambda: there.delete("a"),
    }


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (401, PermissionError, "no valid credentials"),
        (403, PermissionError, "right"),
        (503, StoreError, "HTTP 503"),
        (429, StoreError, "HTTP 429"),
        (400, StoreError, "HTTP 400"),
    ],
)
def test_errors_say_what_where_and_the_way_out(store, quick, status, kind, text):
    there = Objects(store.run)
    for verb, ask in verbs(there).items():
        store.fail = [("", "", status, 99)]
        with pytest.raises(kind, match=text) as caught:
            ask()
        message = str(caught.value)
        assert f"{store.run}/a: cannot {verb}" in message
        assert "secret" not in message
        assert "AKIA" not in message
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_no_bucket(store, quick):
    there = Directory(store.run.replace("bkt", "nope"))
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        there.write("a", b"1")
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        there.mark()


def test_no_host(monkeypatch, quick):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:1")
    with pytest.raises(ConnectionError, match=re.escape("127.0.0.1:1")):
        Objects("gs://bkt/run").read("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k" * 16)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s" * 16)
    with pytest.raises(ConnectionError, match="AWS_ENDPOINT_URL"):
        Objects("s3://bkt/run").read("a")


def test_a_store_that_never_answers_is_given_up(store):
    there = Objects(store.run)
    there.write("a", b"1")
    store.fail = [("GET", "", -1, 1)]
    with there.within(0.2), pytest.raises(ConnectionError, match="no response"):
        there.read("a")
    assert there.read("a").data == b"1"


def test_where_a_store_is_down_the_next_waits_less(store, quick):
    there = Objects(store.run)
    store.fail = [("", "", 503, 99)]
    with pytest.raises(StoreError, match="HTTP 503"):
        there.read("a")
    bucket = store.run.removesuffix("/run")
    assert outages.seconds(bucket) == outages.WHILE_DOWN
    store.fail = [("", "", -1, 1)]
    with (
        there.within(0.1),
        pytest.raises(ConnectionError, match=r"cannot write: the store did not accept it \(HTTP 503"),
    ):
        there.write("b", b"")
    store.fail = []
    assert there.read("a").data is None
    assert outages.seconds(bucket) == outages.SECONDS


def test_expired_keys_of_s3_come_as_400(s3, quick):
    s3.code, s3.fail = "ExpiredToken", [("", "", 400, 99)]
    with pytest.raises(PermissionError, match="expired"):
        Objects("s3://bkt/run").read("a")
    s3.code, s3.fail = "PermanentRedirect", [("", "", 301, 99)]
    with pytest.raises(StoreError, match="AWS_REGION"):
        Objects("s3://bkt/run").write("a", b"")


def test_an_answer_that_fits_no_question_is_no_success(store, quick):
    there = Objects(store.run)
    store.fail = [("", "", 412, 1)]
    with pytest.raises(StoreError, match="unmet condition"):
        there.write("a", b"1")
    store.fail = [("", "", 412, 1)]
    with pytest.raises(StoreError, match="unexpected response"):
        there.read("a")
    store.fail = [("", "", 412, 1)]
    assert there.write_if("a", b"1", ABSENT)
    assert there.read("a").data == b"1"


# Lists.


def test_a_list_is_believed_with_its_mark(store):
    there = Directory(store.run)
    assert there.listing() == []
    there.mark()
    for key in "abcdefg":
        there.write(key, b"")
    there.mark()
    assert there.listing() == list("abcdefg")
    assert there.listing("c") == list("cdefg")
    there.mark("я-1")
    there.write("я-1", b"")
    assert there.listing() == [*"abcdefg", "я-1"]
    assert there.listing("я-") == ["я-1"]


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_list_that_ends_early_is_an_error(gcs, quick, status, page):
    there = Directory("gs://bkt/run")
    there.mark()
    for key in "abcdefg":
        there.write(key, b"")
    gcs.fail = [("GET", "/o$", None, page), ("GET", "/o$", status, 99)]
    with pytest.raises(PermissionError, match="gs://bkt/run: cannot list"):
        there.listing()


def test_a_list_made_before_the_mark_is_made_again(gcs, quick):
    there = Directory("gs://bkt/run")
    there.write("a", b"")
    asked = []

    def first_writer(number):
        if "/o prefix" in gcs.seen[-1] and not asked:
            asked.append(number)
        elif asked and len(asked) == 1:
            asked.append(number)
            with gcs.lock:
                gcs.put("bkt", "run/~jstep", b"")

    gcs.watch = first_writer
    assert there.listing() == ["a"]


def test_a_copy_without_the_mark_is_read(store):
    there = Directory(store.run)
    there.write("model-1/manifest.json", b"")
    assert there.listing() == ["model-1/manifest.json"]


def test_a_list_that_is_refused_is_an_error(s3, quick):
    s3.fail = [("GET", "^/bkt/?$", 403, 99)]
    with pytest.raises(PermissionError, match="s3:ListBucket"):
        Directory("s3://bkt/run").listing()
