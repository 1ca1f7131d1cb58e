"""Recipes of reinforcement learning: other seeds and mistakes in the port, and environments that are killed."""

import contextlib
import pathlib
from collections.abc import Mapping

import pytest
from killed import assert_same_bits_after_kills
from pages import DOCS, blocks_of, run_page

RECIPES = DOCS / "recipes"
SECTIONS = {"ppo": "PPO", "dqn": "DQN"}
SHORTER = {
    "ppo": {"ITERATIONS = 300": "ITERATIONS = 20"},
    "dqn": {"LAST_STEP, LEARNING_STARTS = 8000, 125": "LAST_STEP, LEARNING_STARTS = 600, 125"},
}


def run_changed(name: str, changes: Mapping[str, str], directory: pathlib.Path) -> None:
    """Run a page with replaced code; each replacement must occur once."""
    code = "".join(block.code for block in blocks_of(RECIPES / f"{name}.md", SECTIONS[name]))
    assert {old: code.count(old) for old in changes} == dict.fromkeys(changes, 1)

    def change(code: str) -> str:
        for old, new in changes.items():
            code = code.replace(old, new)
        return code

    with contextlib.chdir(directory):
        run_page(RECIPES / f"{name}.md", change, SECTIONS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHORTER)
def test_another_seed_has_the_returns_of_the_original(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optax")
    ours = {"ppo": "train(0, jstep.from_optax", "dqn": "train(0, with_target(jstep.from_optax"}[name]
    seed = {ours: ours.replace("0", "3"), "original(0)": "original(3)"}
    run_changed(name, {**SHORTER[name], **seed}, tmp_path)


@pytest.mark.thorough
def test_environments_on_the_host_are_killed_and_end_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    definitions, training, *_ = blocks_of(RECIPES / "reinforcement-learning.md", "Environments on the host")
    code = definitions.code + training.code
    for old, new in {
        "LAST_STEP = 600": "LAST_STEP = 120",
        "save_checkpoint_steps=50": "save_checkpoint_steps=10",
        'train("runs/host")': "train(sys.argv[1])",
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    program = f"import sys\n{code}\nprint(jstep.fingerprint(state))"

    assert_same_bits_after_kills(program, tmp_path)


@pytest.mark.thorough(except_for=["-"])
@pytest.mark.parametrize(
    ("correct", "mistaken"),
    [
        ("", ""),
        ("Average(1 - tau", "Average(tau"),
        ("every=every", "every=every + 1"),
    ],
)
def test_target_networks_by_their_usual_names(correct: str, mistaken: str) -> None:
    page = RECIPES / "reinforcement-learning.md"
    first = blocks_of(page)[0].code
    (targets,) = (block.code for block in blocks_of(page, "Target networks by their usual names"))
    imports = first[: first.index("import ppo")]
    assert not correct or targets.count(correct) == 1
    changed = {first: imports, targets: targets.replace(correct, mistaken)}
    detected = pytest.raises(AssertionError, match="Not equal to tolerance") if correct else contextlib.nullcontext()
    with detected:
        run_page(page, lambda code: changed.get(code, ""))
