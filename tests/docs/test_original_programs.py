"""Recipes beside the original programs: equal numbers, as shown on the page, and others after a
mistake."""

import contextlib
import io
import pathlib
import re

import pytest
from pages import DOCS, blocks_of, run_page, section_of
from source_files import text_of

# Program: its page, and its section if it is not the whole page.
PROGRAMS = {
    "custom-step": ("custom-step", None),
    "gan": ("gan", "GAN, both orders"),
    "per-example-gradients": ("per-example-gradients", None),
    "self-supervision": ("self-supervision", "BYOL and DINO"),
    "wgan": ("gan", "WGAN with five critic steps"),
}
ORIGINALS = pathlib.Path(__file__).parent / "originals"
UNLISTED = {"dqn": ("dqn", "On the device"), "ppo": ("ppo", "PPO")}
"""Programs whose originals are compared, but not shown with their numbers."""
NUMBER = re.compile(r"-?\d+\.?\d*")


def place_of(name):
    page, section = (PROGRAMS | UNLISTED)[name]
    return DOCS / "recipes" / f"{page}.md", section


def original_of(name):
    """Return the original program and its comparison, which run after the page: they use its model
    and its data."""
    return text_of(ORIGINALS / f"{name}.txt")


def run_program(name, change=str):
    page, section = place_of(name)
    run_page(page, change, section, original_of(name))


def listing_of(name):
    """Return the lines of the last listing of output of a program."""
    page, section = place_of(name)
    text = text_of(page)
    begin, end = section_of(text, section) if section else (0, len(text))
    return re.findall(r"```text\n(.*?)```", text[begin:end], re.DOTALL)[-1].splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_page_compares_two_programs_and_shows_the_numbers(name):
    alone = "\n".join(block.code for block in blocks_of(*place_of(name)) if not block.needs)
    assert "jstep.train(" in alone, "jstep's program must run without Optax"
    original, comparison = original_of(name).split("# The comparison.\n")
    assert "import optax" in original
    assert "jstep" not in original
    assert "assert_allclose" in comparison
    assert sum(len(NUMBER.findall(line)) for line in listing_of(name)) >= 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_listing_is_what_the_page_prints(name, tmp_path):
    pytest.importorskip("optax")
    printed = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        run_program(name)
    shown = listing_of(name)
    found = printed.getvalue().splitlines()[-len(shown) :]
    assert [NUMBER.sub("N", line).split() for line in found] == [
        NUMBER.sub("N", line).split() for line in shown
    ]
    for line, expected in zip(found, shown, strict=True):
        values = [[float(number) for number in NUMBER.findall(each)] for each in (line, expected)]
        assert values[0] == pytest.approx(values[1], abs=0.02), line


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNLISTED)
def test_returns_are_those_of_the_original(name, tmp_path):
    pytest.importorskip("optax")
    with contextlib.chdir(tmp_path):
        run_program(name)
