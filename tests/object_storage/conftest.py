"""Fixtures: fake object stores on loopback, so that no test contacts another host."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from fake_gcs import FakeGCS
from fake_s3 import FakeS3

from jstep.stores import objects

_VARIABLES = (
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_CONFIG_FILE",
)


def _open(kind, monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    store = kind()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def fast_retries(monkeypatch):
    monkeypatch.setattr(
        objects, "RETRIES", {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}
    )


@pytest.fixture
def one_retry(monkeypatch):
    monkeypatch.setattr(
        objects, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    )


@pytest.fixture
def gcs(monkeypatch):
    """A fake GCS with the bucket bkt; a page of a list holds 3 keys, so that most lists have
    several pages."""
    store = _open(FakeGCS, monkeypatch)
    store.page = 3
    yield store
    store.close()


@pytest.fixture
def s3(monkeypatch):
    store = _open(FakeS3, monkeypatch)
    store.page = 3
    yield store
    store.close()


def _one_of_both(request, monkeypatch):
    store = _open({"gs": FakeGCS, "s3": FakeS3}[request.param], monkeypatch)
    store.page, store.run = 3, f"{request.param}://bkt/run"
    yield store
    store.close()


@pytest.fixture(params=["gs", "s3"])
def each_store(request, monkeypatch):
    """Each of the two stores in turn; `run` is a URL in it."""
    yield from _one_of_both(request, monkeypatch)


@pytest.fixture(params=[pytest.param("gs", marks=pytest.mark.thorough), "s3"])
def store(request, monkeypatch):
    """As `each_store`; the default run has only one of them, for what reaches a store through
    `Objects`."""
    yield from _one_of_both(request, monkeypatch)
