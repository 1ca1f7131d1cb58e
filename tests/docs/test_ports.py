"""Pages "From …": both programs give the same results, and the table's names exist."""

import contextlib
import inspect
import pathlib
import re
from typing import Any

import numpy as np
import peer_numbers
import pytest
from pages import DOCS, blocks_of, run_page, section_of

import jstep

PORTS = peer_numbers.PAGES


def page_of(name: str) -> pathlib.Path:
    return DOCS / "from" / f"{name}.md"


@pytest.mark.parametrize("name", PORTS)
def test_each_page_compares_its_two_programs(name: str) -> None:
    blocks = blocks_of(page_of(name))
    assert any("assert_allclose" in block.code and block.needs == PORTS[name] for block in blocks)
    alone = [block.code for block in blocks if not block.needs]
    assert any("jstep.train(" in code for code in alone), (
        "jstep's program must run without the other package"
    )


def results_of(name: str, names: dict[str, Any]) -> list[Any]:
    """What jstep's program makes, in the order in which its page compares it."""
    if name == "pytorch":
        return names["losses"]
    evaluations = list(names["evaluation"].results.values())
    if name == "keras":
        kinds, params, metrics = ("kernel", "bias"), names["state"].params, ("loss", "accuracy")
    else:
        kinds, params, metrics = ("weight", "bias"), names["best"].params, ("loss",)
    trained = [params[layer][kind] for layer in ("hidden", "out") for kind in kinds]
    return [*trained, *(results[metric] for results in evaluations for metric in metrics)]


def compare(name: str, folder: pathlib.Path) -> None:
    """Run jstep's program of a page alone, and compare what it makes with the stored numbers of the
    other."""
    first, *others = (block.code for block in blocks_of(page_of(name)))
    kept = {first, next(code for code in others if "jstep.train(" in code)}
    with contextlib.chdir(folder):
        names = run_page(page_of(name), lambda code: code if code in kept else "")
    found = np.concatenate([np.ravel(one) for one in results_of(name, names)])
    np.testing.assert_allclose(found, peer_numbers.stored(name), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(except_for=["pytorch"])
@pytest.mark.parametrize("name", PORTS)
def test_jsteps_program_makes_the_numbers_of_the_other(name: str, tmp_path: pathlib.Path) -> None:
    compare(name, tmp_path)


def cells(page: pathlib.Path) -> list[str]:
    """Return the last cell of each row of the table of names of a page."""
    text = page.read_text(encoding="utf-8")
    begin, end = section_of(text, "Corresponding names")
    rows = [line for line in text[begin:end].splitlines() if line.startswith("| ")]
    return [row.strip("| ").split(" | ")[-1] for row in rows]


def calls(text: str) -> list[tuple[str, list[str]]]:
    """Return the names of calls in code spans with their keywords, nested calls separately."""
    found = []
    for span in re.findall(r"`([^`]+)`", text):
        for match in re.finditer(r"([A-Za-z][\w.]*)\(", span):
            depth, inside = 1, ""
            for character in span[match.end() :]:
                depth += {"(": 1, ")": -1}.get(character, 0)
                if depth == 0:
                    break
                inside += character if depth == 1 else ""
            found.append((match.group(1), re.findall(r"(\w+)=", inside)))
    return found


@pytest.mark.parametrize("name", [*PORTS, "lightning"])
def test_names_in_the_table_exist(name: str) -> None:
    tables = cells(page_of(name))
    assert len(tables) > 10
    checked = 0
    for called, keywords in [call for cell in tables for call in calls(cell)]:
        target: object = jstep
        # `saver` is a `Saver` in these tables.
        for part in called.removeprefix("jstep.").replace("saver.", "Saver.").split("."):
            target = getattr(target, part, None)
        if called in ("f", "train_step", "evaluate", "print", "wandb.log"):
            continue
        assert callable(target), f"{name}.md: jstep has no {called}"
        assert set(keywords) <= set(inspect.signature(target).parameters), (
            f"{name}.md: {called}({keywords})"
        )
        checked += 1
    assert checked > 5
    bare = {span for cell in tables for span in re.findall(r"`([A-Za-z]\w*)`", cell)}
    functions = (jstep.minimize, jstep.adamw, jstep.train)
    arguments = {
        argument for function in functions for argument in inspect.signature(function).parameters
    }
    unknown = bare - set(dir(jstep)) - arguments - {"jnp", "f", "weight", "merge", "compute"}
    assert not unknown, f"{name}.md: {sorted(unknown)}"
