"""Pages with environments on the host: programs that are killed."""

import pytest
from killed import assert_same_bits_after_kills
from pages import DOCS, EXAMPLES, blocks_of


@pytest.mark.thorough
def test_ppo_in_a_loop_is_killed_and_ends_with_the_same_bits(tmp_path):
    """Its iterations take 16 steps, so most saves are due within one."""
    code = blocks_of(DOCS / "from" / "loops.md", "CleanRL")[0].code
    sizes = "PUSHES, EPOCHS, MINIBATCHES"
    changes = {
        f"{sizes} = 40, 16, 128, 4, 4": f"{sizes} = 20, 16, 32, 4, 4",
        "checkpoint_dir=directory": "checkpoint_dir=directory, save_checkpoint_steps=10",
        'train("runs/ppo")': "train(sys.argv[1])",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    imports = "import sys, jax, jax.numpy as jnp, jstep, numpy as np"
    program = (
        f"{imports}\nsys.path.insert(0, {str(EXAMPLES)!r})\n{code}\nprint(jstep.fingerprint(state))"
    )

    assert_same_bits_after_kills(program, tmp_path)
