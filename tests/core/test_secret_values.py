"""Secrets: names and values that are hidden, alone and inside of texts, and those that stay."""

import json
import time

import pytest

from jstep.core.records import record_value
from jstep.core.secret_values import NOT_RECORDED, error_text, hide

LONG, SHORT = "hunter2-hunter2-hunter2", "pw12"

ALWAYS = [
    "Authorization",
    "proxy-authorization",
    "headers/Authorization",
    "Authorization/x",
    "private_key",
    "privateKey",
    "PRIVATE-KEY",
    "private_key/pem",
    "userpwd",
    "PassWord",
    "db.passWord",
    "dbpassword",
    "secretkey",
    "secrets/a/b/c",
    "credential",
    "aws_secret",
    "passphrase",
    "mypasswd",
    "client_secrets",
]
IF_LONG = [
    "authtoken",
    "accesskey",
    "authToken",
    "hf_token",
    "HFToken",
    "access_token",
    "apitoken",
    "sshkey",
    "wandbKEY",
    "tokens",
    "openaikey",
    "oauth",
    "httpAuth",
    "x/api_key",
    "tokens/0",
    "api_keys/openai",
    "auth/user",
]
NEVER = [
    "monkey",
    "donkeys",
    "keyboard",
    "tokenizer",
    "author",
    "authority",
    "pad",
    "keynote",
    "fopen_keys/image",
    "keys/image",
    "secretary",
    "bypass_words",
    "tokens/count",
]


@pytest.mark.parametrize("name", ALWAYS)
def test_a_value_of_a_secret_name_is_hidden_whatever_it_is(name):
    assert {record_value(name, value) for value in ("x", 5, LONG)} == {NOT_RECORDED}
    assert record_value(name, None) is None
    assert record_value(name, True) is True


@pytest.mark.parametrize("name", IF_LONG)
def test_a_long_word_of_a_name_of_keys_is_hidden(name):
    values = LONG, f" {LONG} ", f"a b {LONG}", ["a", LONG]
    assert {str(record_value(name, value)) for value in values} == {NOT_RECORDED}
    assert [record_value(name, value) for value in ("image", 1024, "<pad>")] == ["image", 1024, "<pad>"]


@pytest.mark.parametrize("name", NEVER)
def test_other_names_stay(name):
    assert record_value(name, LONG) == LONG


@pytest.mark.parametrize(
    "value",
    [
        *("Bearer abc", "  bearer xyz ", "Basic dXNlcjpwdw==", "-----BEGIN PRIVATE KEY-----\nMII", " \n-----BEGIN RSA"),
        *("sk-abcdefghijklmnop", "hf_abcdefghijklmnopqrst", "ghp_ABCDEFabcdef1234", "gho_ABCDEFabcdef1234"),
        *("github_pat_11ABC", "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-ab", "glpat-abcdefghijkl"),
        "use hf_abcdefghijklmnopqrst now",
    ],
)
def test_values_that_are_secrets_whatever_their_name(value):
    assert record_value("x", value) == NOT_RECORDED
    assert record_value("x", ["a", value]) == ["a", NOT_RECORDED]


@pytest.mark.parametrize(
    "value",
    [
        *("sk-short", "hf_x", "task-specific-model-name", "/data/hf_datasets_cache_x", "basic training", "a@b.c"),
        *("desk-abcdefghijklmnopq", "jax.numpy.float32_array_long_name", "git@github.com:org/repo", "12:30"),
        *("missing keys: ['encoder/layers_0/attention/query/kernel']", "token_rate=0.30000000000000004"),
        *("key: mymodule.encoders.TokenEncoder", "password=None", "use_secret: True, n=1", "num_tokens=1024"),
        *("nvcr.io/jax:24.04@sha256:abcdef", "image_key='image'"),
    ],
)
def test_other_values_stay(value):
    assert record_value("x", value) == value


TEXTS = [
    f'{{"api_key": "{LONG}", "lr": 0.1}}',
    f"{{'password': '{SHORT}', 'lr': 0.1}}",
    f'{{"password":"{SHORT}","lr":0.1}}',
    f'{{"password": {{"v": "a}}b", "w": "{SHORT}"}}, "lr": 0.1}}',
    f'{{"tokens": ["{LONG}", "b {SHORT}"], "lr": 0.1}}',
    json.dumps({"lr": 0.1, "inner": json.dumps({"password": f'{SHORT} "q" {SHORT}', "n": 1})}),
    f"password={SHORT} host=x lr",
    f"password=['a', 'b {SHORT}'], lr",
    f'password="a\\"{SHORT}" lr',
    f"Config(token='{LONG}', lr=0.1)",
    f"token: {LONG} lr",
    f"api_key => {LONG} lr",
    f"authorization=Bearer {SHORT} lr",
    f"curl -H 'Authorization: Bearer {SHORT}' lr",
    f'header "Authorization: Basic {SHORT}", lr',
    f"postgres://user:{SHORT}@host/db?password={SHORT}#f lr",
    f"postgres://user:{SHORT}/x@host/db lr",
    f"user:{SHORT}/x@host lr",
    f"redis://:{SHORT}@h:1/0 lr",
    f"mysql://u:a#{SHORT}@h lr",
    f"mysql://u:a?{SHORT}@h lr",
    f"https://h/x?sig={SHORT} lr",
    f"https://h/x#{SHORT} lr",
    f"https://u:{SHORT}@h1/a https://u:{SHORT}@h2/b lr",
    f"-----BEGIN PRIVATE KEY-----\n{SHORT}\n-----END PRIVATE KEY----- lr",
    f"hf_{SHORT}abcdefghijklmnop lr",
    f"Bearer {SHORT}.{SHORT} lr",
    f"mysql --password {SHORT} lr",
    f"run --hf-token '{LONG}' lr",
    f"['run', '--api-key', '{LONG}', 'lr']",
    json.dumps(["--db.password", f"{SHORT} {SHORT}", "lr"]),
]


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_inside_of_texts_are_hidden(text):
    for form in (text, repr(text), json.dumps(text)):
        assert SHORT not in hide(form)
        assert LONG not in hide(form)
        assert "lr" in hide(form)
        assert hide(hide(form)) == hide(form)


def test_dashes_do_not_make_pairs_of_other_words():
    words = "--tokens 7 8", "--image-key image"
    for text in ("--password --lr 0.1", "['--password', '--lr']", "a -- password b", *words):
        assert hide(text) == text


def test_words_of_a_command_line_belong_to_its_options():
    words = ["run", "--tokens", LONG, "7", "--lr", LONG, "--password=x", "y", "-n", "3"]
    hidden = NOT_RECORDED
    shown = ["run", "--tokens", hidden, "7", "--lr", LONG, f"--password={hidden}", hidden, "-n", "3"]
    assert record_value("command", words) == shown
    assert record_value("commands", [tuple(words), ["y"]]) == [shown, ["y"]]


def test_pairs_of_json_stay_json():
    text = json.dumps({"a": {"password": "x", "b": 1}, "auth": {"user": LONG}, "lr": 0.1})
    assert json.loads(hide(text)) == {"a": {"password": NOT_RECORDED, "b": 1}, "auth": NOT_RECORDED, "lr": 0.1}
    assert json.loads(hide(json.dumps(["--password", "x y", "--lr"]))) == ["--password", NOT_RECORDED, "--lr"]


def test_texts_of_exceptions_lose_secrets_or_raise_nothing():
    class BadError(Exception):
        def __str__(self):
            raise ValueError

    assert error_text(ValueError(f"postgres://u:{SHORT}@h/d?p={SHORT} is down")) == "postgres://h/d is down"
    assert error_text(BadError()) == ""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "part", ["key='", "key=[", 'a=\\"', "a:", "x:y@", "://a@", "'", "{", "Bearer ", "-----BEGIN", "a.b"]
)
def test_long_texts_are_searched_in_little_time(part):
    began = time.process_time()
    record_value("x", part * (10**6 // len(part)))
    assert time.process_time() - began < 20
