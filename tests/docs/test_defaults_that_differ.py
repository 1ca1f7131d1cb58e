"""The tables of defaults that differ between Optax and jstep, compared with the signatures of both."""

import ast
import inspect
import operator
import re

import pytest
from pages import DOCS, section_of

import jstep

optax = pytest.importorskip("optax")
ROW = re.compile(r"^\| `([\w.]+)` \| `(\w+)` \| (\S+) \| `(\w+)`: `(\w+)` \| (\S+) \|$", re.MULTILINE)

SAME_NAME = """
    adabelief adadelta adafactor adagrad adamax adamw adan lamb lars lion nadam novograd radam rmsprop rprop sgd yogi
    contrib.ademamix contrib.adopt contrib.madgrad contrib.muon contrib.prodigy contrib.schedule_free_adamw
    contrib.schedule_free_sgd scale_by_adam scale_by_rms
""".split()  # noqa: SIM905
PAIRS = {name: name.removeprefix("contrib.") for name in SAME_NAME} | {
    "nadamw": "nadam",
    "ema": "ExponentialMovingAverage",
}
ARGUMENTS = {
    "b1": "beta1", "b2": "beta2", "b3": "beta3", "beta": "momentum", "eps": "epsilon", "eps_root": "epsilon_root",
    "nesterov": "use_nesterov", "clipping_threshold": "clip_threshold", "weight_decay_rate": "weight_decay",
    "debias": "zero_debias", "ns_coeffs": "ns_coefficients", "estim_lr0": "d0", "estim_lr_coef": "d_coef",
}  # fmt: skip
MEANS_NOTHING = {"learning_rate", "ns_steps", "weight_decay_mask", "trust_ratio_mask", "mask"}
"""Optax's rate has no default; jstep's steps are as many as the coefficients give; masks have another grammar."""


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def rows_of(page):
    text = (DOCS / "from" / page).read_text("utf-8")
    begin, end = section_of(text, "Defaults that differ")
    rows = {
        (theirs, argument, ast.literal_eval(value), ours, name, ast.literal_eval(default))
        for theirs, argument, value, ours, name, default in ROW.findall(text[begin:end])
    }
    assert len(rows) == text[begin:end].count("\n| ") - 1  # each line below the head is a row
    return rows


def differing():
    for theirs, ours in PAIRS.items():
        of_theirs, of_ours = defaults(operator.attrgetter(theirs)(optax)), defaults(getattr(jstep, ours))
        for argument, value in of_theirs.items():
            name = ARGUMENTS.get(argument, argument)
            if name in of_ours and name not in MEANS_NOTHING and (value or 0) != (of_ours[name] or 0):
                yield theirs, argument, value, ours, name, of_ours[name]


def test_the_page_about_optax_has_all_of_them():
    assert rows_of("optax.md") == set(differing())


def test_the_page_about_flax_has_some_of_them():
    rows = rows_of("flax.md")
    assert len(rows) > 2
    assert rows < rows_of("optax.md")
