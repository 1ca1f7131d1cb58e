"""Claims of the pages "From PyTorch", "From the HF Trainer", "From Keras" and "From tf.train"."""

import re

import jax.numpy as jnp
import numpy as np
import peer_numbers
import pytest
from pages import DOCS, blocks_of

import jstep


def test_comments_and_code_of_tf_train_have_the_same_numbers() -> None:
    code = blocks_of(DOCS / "from" / "tf-train.md")[0].code
    calls = re.findall(r"(exponential_decay|[Mm]omentum(?:Optimizer)?)\((.*?)\)", code)
    numbers = [re.findall(r"[\d.]+", arguments) for _, arguments in calls]
    assert numbers == [["0.1", "10", "0.5"]] * 2 + [["0.9"]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", peer_numbers.CASES)
def test_the_libraries_compute_the_stored_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # its import needs another one otherwise
    for module in peer_numbers.needed_by(name):
        pytest.importorskip(module)
    np.testing.assert_allclose(peer_numbers.computed(name), peer_numbers.stored(name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("coupled", [True, False])
def test_adam_with_weight_decay_is_coupled_in_torch(coupled: bool) -> None:
    optimizer = (
        jstep.chain(jstep.add_weight_decay(0.1), jstep.scale_by_adam(), jstep.scale_by_learning_rate(1e-2))
        if coupled
        else jstep.adamw(1e-2, weight_decay=0.1)
    )
    state = jstep.TrainState.create({"w": np.float32(peer_numbers.START)}, optimizer)
    train_step = jstep.minimize(lambda params: jnp.sum(jnp.sin(params["w"])), optimizer)
    for _ in range(20):
        state, _ = train_step(state)
    np.testing.assert_allclose(state.params["w"], peer_numbers.stored("Adam" if coupled else "AdamW"), rtol=1e-5)


SCHEDULES = {
    "linear": lambda: jstep.join([jstep.linear(0.0, 1e-2, 3), jstep.linear(1e-2, 0.0, 17)], [3]),
    "cosine": lambda: jstep.warmup_cosine_decay(1e-2, 3, 20),
    "constant_with_warmup": lambda: jstep.linear(0.0, 1e-2, 3),
    "LinearLR": lambda: jstep.linear(1e-3, 1e-2, 5),
    "CosineAnnealingLR": lambda: jstep.cosine_decay(1e-2, 12),
    "LambdaLR": lambda: jstep.linear_warmup(1e-2, 10),
    "warmup of Keras": lambda: jstep.warmup_cosine_decay(1e-2, 3, 20),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_transformers_torch_and_keras(name: str) -> None:
    theirs = peer_numbers.stored(name)
    ours = [float(SCHEDULES[name]()(step)) for step in range(len(theirs))]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-9)
    assert (ours[0] == 0.0) == ("LR" not in name), "the learning rate of the first update"


def test_patience_in_keras() -> None:
    """The patience of EarlyStopping is the same as in Keras, that of ReduceOnPlateau is one less."""
    losses, theirs = peer_numbers.LOSSES, peer_numbers.stored("patience of Keras")
    optimizer = jstep.gradient_descent(jstep.held("learning_rate", 1.0))
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=2)
    early = jstep.EarlyStopping("loss", patience=3)
    ours, stopped = [], []
    for step, loss in enumerate(losses):
        state = reduce(step, state, {"loss": loss}) or state
        ours.append(float(jstep.get_hyperparameter(state, "learning_rate")))
        stopped.append(bool(early(step, state, {"loss": loss})))
    assert ours == theirs[: len(losses)]
    assert ours[-1] < 1.0
    assert stopped.index(True) == theirs[len(losses) :].index(1.0)
