"""Object stores tested against moto, which implements much more of S3 than the fake store of the
other tests."""

import http.client

import pytest

from jstep.stores.objects import ABSENT, Objects

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def port():
    server = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    number = started.get_host_and_port()[1]
    connection = http.client.HTTPConnection("127.0.0.1", number, timeout=30)
    connection.request("PUT", "/bkt")
    assert connection.getresponse().status == 200
    connection.close()
    yield number
    started.stop()


@pytest.fixture
def moto(port, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing-testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-testing")


def test_conditional_writes(moto):
    directory = Objects("s3://bkt/verbs")
    first = directory.write_if("a b%~", b"1", ABSENT)
    assert first
    assert directory.write_if("a b%~", b"2", ABSENT) is None
    assert directory.write_if("a b%~", b"3", first)
    assert directory.write_if("a b%~", b"4", first) is None
    assert directory.list() == ["a b%~"]
    assert directory.read("a b%~").data == b"3"
    assert not directory.delete("a b%~", first)
    assert directory.delete("a b%~")
    assert directory.read("a b%~").data is None
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        Objects("s3://nope/verbs").write_if("a", b"", ABSENT)
