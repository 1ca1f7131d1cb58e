"""Locations: URLs of object stores, paths, and AWS credentials."""

import pathlib

import pytest
from etils import epath

from jstep.stores.objects import Objects, redact, s3_fields
from jstep.stores.urls import location


@pytest.mark.parametrize(
    ("given", "normalized"),
    [
        ("gs://bkt/run", "gs://bkt/run"),
        ("s3://bkt/run/", "s3://bkt/run"),
        ("gs://bkt", "gs://bkt"),
        ("GS://bkt//a///b/", "gs://bkt/a/b"),
        (epath.Path("gs://bkt/run"), "gs://bkt/run"),
        (epath.Path("s3://bkt/run") / "x", "s3://bkt/run/x"),
        (pathlib.Path("/tmp/run"), "/tmp/run"),
        ("relative", "relative"),
    ],
)
def test_locations_are_normalized(given, normalized):
    assert location(given, "directory") == normalized


def test_credentials_in_a_url_are_refused_and_not_repeated():
    for url in ("s3://KEY:hidden@bkt/run", "http://user:hidden@host/x"):
        with pytest.raises(ValueError) as caught:
            location(url, "directory")
        assert "hidden" not in str(caught.value)


def test_aws_environment(tmp_path):
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    no_files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no"),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    assert s3_fields(no_files) == {}
    assert s3_fields(no_files | keys) == {"aws_credentials": {"type": "environment"}}
    both = {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b/", "AWS_REGION": "x"}
    assert s3_fields(no_files | both) == {"endpoint": "http://b", "aws_region": "x"}
    assert s3_fields(no_files | {"AWS_DEFAULT_REGION": "y"}) == {"aws_region": "y"}


def test_aws_profiles(tmp_path):
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    credentials.write_text(
        "[default]\naws_access_key_id = a\n[work]\naws_access_key_id "
        "= b\naws_secret_access_key = c\n"
    )
    config.write_text(
        "[profile work]\nregion = eu-1\nendpoint_url = http://own\n[profile bare]\nregion = eu-2\n"
    )
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(credentials), "AWS_CONFIG_FILE": str(config)}
    paths = {"credentials_file": str(credentials), "config_file": str(config)}
    assert s3_fields(files) == {
        "aws_credentials": {"type": "profile", "profile": "default", **paths}
    }
    work = s3_fields(files | {"AWS_PROFILE": "work"})
    assert work["aws_credentials"] == {"type": "profile", "profile": "work", **paths}
    assert (work["aws_region"], work["endpoint"]) == ("eu-1", "http://own")
    assert s3_fields(files | {"AWS_PROFILE": "work", "AWS_REGION": "z"})["aws_region"] == "z"
    with pytest.raises(PermissionError, match="AWS_PROFILE='other'"):
        s3_fields(files | {"AWS_PROFILE": "other"})
    # This uses the role of the machine.
    assert s3_fields(files | {"AWS_PROFILE": "bare"}) == {"aws_region": "eu-2"}
    assert "c" not in str(work).split()


def test_requests_are_signed_with_the_profile(s3, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "[work]\naws_access_key_id = AKIAOFTHEPROFILE\naws_secret_access_key = c\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    authorizations = []
    respond = s3.respond
    s3.respond = lambda method, path, query, headers, body: (
        authorizations.append(headers["Authorization"]),
        respond(method, path, query, headers, body),
    )[1]
    Objects("s3://bkt/run").write("a", b"1")
    assert "AKIAOFTHEPROFILE" in authorizations[0]


def test_messages_keep_no_secret():
    for end in ("[http_response_body: <x>]", "\nmore", "[source locations='a.cc']"):
        assert redact(f"failed {end}").strip() == "failed"
    assert redact("read s3://me:hunter2@host with AKIAABCDEFGHIJKLMNOP") == (
        "read s3://host with (not recorded)"
    )
    assert redact("x" * 300) == "x" * 200
