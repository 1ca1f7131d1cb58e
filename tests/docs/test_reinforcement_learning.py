"""Recipes of reinforcement learning: environments that are killed."""

import pytest
from killed import assert_same_bits_after_kills
from pages import DOCS, EXAMPLES, blocks_of

RECIPES = DOCS / "recipes"


@pytest.mark.thorough
def test_environments_on_the_host_are_killed_and_end_with_the_same_bits(tmp_path):
    definitions, training, *_ = blocks_of(RECIPES / "reinforcement-learning.md", "Environments on the host")
    code = definitions.code + training.code
    for old, new in {
        "DISCOUNT, LAST_STEP = 16, 32, 0.99, 600": "DISCOUNT, LAST_STEP = 16, 32, 0.99, 120",
        "save_checkpoint_steps=50": "save_checkpoint_steps=10",
        'train("runs/host")': "train(sys.argv[1])",
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    program = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{code}\nprint(jstep.fingerprint(state))"

    assert_same_bits_after_kills(program, tmp_path)
