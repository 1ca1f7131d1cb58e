"""What an adversary's folder leads to: `stalls` as a link, a file of rows without end."""

import jax.numpy as jnp
import pytest

import jstep
from jstep.stores.files import ForeignFileError

optimizer = jstep.gradient_descent(0.1)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)


def train(last_step, *hooks, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    return jstep.train(train_step, state, lambda step: jnp.float32(1), last_step, hooks=hooks, **options)


def test_a_link_in_the_place_of_the_stalls_is_refused(tmp_path):
    victim = tmp_path / "good" / "model.0.json"
    victim.parent.mkdir()
    victim.write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stalls").symlink_to(victim.parent)
    with pytest.raises(ForeignFileError, match=r"stalls: .* is a link"):
        train(2, checkpoint_dir=tmp_path / "run")
    assert victim.read_text() == "{}"


def test_a_file_of_rows_without_end_is_an_error(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"rows\.jsonl: has more than 2147483648 bytes"):
        jstep.History.read(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="more than"):
        train(2, jstep.History(tmp_path / "rows.jsonl"))
