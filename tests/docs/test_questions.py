"""What people asked in public is answered on the page that they open first, and the answer is
right."""

import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from source_files import ROOT, import_file

import jstep

QUESTIONS = tomllib.loads((ROOT / "docs" / "questions.toml").read_text(encoding="utf-8"))[
    "question"
]
PRELUDE = {"jstep": jstep, "jax": jax, "jnp": jnp, "np": np, "params": {"w": jnp.zeros(3)}}


def loss_fn(params, x):
    return jnp.sum((params["w"] - x) ** 2)


def new_state(optimizer=None, **more):
    return jstep.TrainState.create(
        {"w": jnp.zeros(3)}, optimizer or jstep.gradient_descent(0.1), **more
    )


def ones(step):
    return jnp.ones(3)


def error(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def asked(question):
    return question["asked"][:60]


def test_each_question_is_there_once():
    texts = [question["asked"] for question in QUESTIONS]
    assert len(texts) == len(set(texts)) >= 62


@pytest.mark.parametrize("question", QUESTIONS, ids=asked)
def test_the_page_answers(question):
    text = (ROOT / "docs" / question["page"]).read_text(encoding="utf-8")
    assert re.search(question["says"], text)


@pytest.mark.thorough
@pytest.mark.parametrize("question", [one for one in QUESTIONS if "program" in one], ids=asked)
def test_the_answer_is_right(question, tmp_path):
    names = {**PRELUDE, "loss_fn": loss_fn, "new_state": new_state, "ones": ones, "error": error}
    exec(question["program"], {**names, "folder": str(tmp_path)})


def test_the_site_shows_them():
    shown = import_file(ROOT / "docs" / "names.py").source(ROOT / "docs" / "help" / "questions.md")
    for question in QUESTIONS:
        assert question["asked"] in shown
