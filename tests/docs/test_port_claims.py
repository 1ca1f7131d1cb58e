"""Claims of the pages "From PyTorch", "From the HF Trainer", "From Keras" and "From tf.train"."""

import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, blocks_of, run_page

import jstep


def test_comments_and_code_of_tf_train_have_the_same_numbers() -> None:
    code = blocks_of(DOCS / "from" / "tf-train.md")[0].code
    calls = re.findall(r"(exponential_decay|[Mm]omentum(?:Optimizer)?)\((.*?)\)", code)
    numbers = [re.findall(r"[\d.]+", arguments) for _, arguments in calls]
    assert numbers == [["0.1", "10", "0.5"]] * 2 + [["0.9"]] * 2


def rates_of(scheduler, optimizer, count: int) -> list[float]:
    """Return the learning rates of the first `count` updates."""
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("coupled", [True, False])
def test_adam_with_weight_decay_is_coupled_in_torch(coupled: bool) -> None:
    torch = pytest.importorskip("torch")
    start = np.array([1.0, -2.0, 0.5], np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    theirs = (torch.optim.Adam if coupled else torch.optim.AdamW)([weight], lr=1e-2, weight_decay=0.1)
    optimizer = (
        jstep.chain(jstep.add_weight_decay(0.1), jstep.scale_by_adam(), jstep.scale_by_learning_rate(1e-2))
        if coupled
        else jstep.adamw(1e-2, weight_decay=0.1)
    )
    state = jstep.TrainState.create({"w": start}, optimizer)
    train_step = jstep.minimize(lambda params: jnp.sum(jnp.sin(params["w"])), optimizer)
    for _ in range(20):
        theirs.zero_grad()
        torch.sin(weight).sum().backward()
        theirs.step()
        state, _ = train_step(state)
    np.testing.assert_allclose(state.params["w"], weight.detach().numpy(), rtol=1e-5)


SCHEDULES = {
    "linear": lambda: jstep.join([jstep.linear(0.0, 1e-2, 3), jstep.linear(1e-2, 0.0, 17)], [3]),
    "cosine": lambda: jstep.warmup_cosine_decay(1e-2, 3, 20),
    "constant_with_warmup": lambda: jstep.linear(0.0, 1e-2, 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=20)
    ours = [float(SCHEDULES[name]()(step)) for step in range(20)]
    assert ours[0] == 0.0, "the learning rate of the first update must be 0"
    np.testing.assert_allclose(ours, rates_of(scheduler, optimizer, 20), rtol=1e-5, atol=1e-9)


def test_schedules_of_torch() -> None:
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler

    def torch_rates(make) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        return rates_of(make(optimizer), optimizer, 12)

    pairs = [
        (jstep.linear(1e-3, 1e-2, 5), lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=5)),
        (jstep.cosine_decay(1e-2, 12), lambda o: schedulers.CosineAnnealingLR(o, T_max=12)),
        (jstep.linear_warmup(1e-2, 10), lambda o: schedulers.LambdaLR(o, lambda n: min(1.0, (n + 1) / 10))),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose([float(ours(n)) for n in range(12)], torch_rates(theirs), rtol=1e-5, atol=1e-9)


def test_the_tables_left_column_has_trainer_names() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    lines = (DOCS / "from" / "hf-trainer.md").read_text(encoding="utf-8").splitlines()
    left = [line.strip("| ").split(" | ")[0] for line in lines if line.startswith("| ")]
    names = {name for cell in left for name in re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", cell)}
    arguments = {*inspect.signature(transformers.TrainingArguments).parameters}
    arguments |= {*inspect.signature(transformers.Trainer).parameters, *dir(transformers.PreTrainedModel)}
    assert len(names) > 25
    assert not names - arguments


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    # Keras creates keys of two uint32 and promotes dtypes.
    with warnings.catch_warnings(), jax.legacy_prng_key("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield pytest.importorskip("keras")


def test_keras_warmup_precedes_decay_steps(keras) -> None:
    theirs = keras.optimizers.schedules.CosineDecay(0.0, 17, warmup_target=1e-2, warmup_steps=3)
    ours = jstep.warmup_cosine_decay(1e-2, 3, 20)
    assert float(ours(0)) == 0.0
    np.testing.assert_allclose(
        [float(ours(step)) for step in range(20)], [float(theirs(step)) for step in range(20)], rtol=1e-5, atol=1e-9
    )


def test_patience_in_keras(keras) -> None:
    """The patience of EarlyStopping is the same as in Keras, that of ReduceOnPlateau is one less."""
    losses = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
    for callback in (plateau, stop):
        callback.set_model(model)
        callback.on_train_begin()
    theirs, keras_stopped = [], []
    for epoch, loss in enumerate(losses):
        for callback in (plateau, stop):
            callback.on_epoch_end(epoch, {"val_loss": loss})
        theirs.append(float(model.optimizer.learning_rate))
        keras_stopped.append(bool(model.stop_training))

    optimizer = jstep.gradient_descent(jstep.held("learning_rate", 1.0))
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=2)
    early = jstep.EarlyStopping("loss", patience=3)
    ours, jstep_stopped = [], []
    for step, loss in enumerate(losses):
        state = reduce(step, state, {"loss": loss}) or state
        ours.append(float(jstep.get_hyperparameter(state, "learning_rate")))
        jstep_stopped.append(bool(early(step, state, {"loss": loss})))
    assert ours == theirs
    assert theirs[-1] < 1.0
    assert jstep_stopped.index(True) == keras_stopped.index(True)


def test_generation_with_a_cache_is_that_without() -> None:
    page = DOCS / "from" / "pytorch.md"
    first, *others = (block.code for block in blocks_of(page))
    (ours,) = (code for code in others if "def generate(" in code)
    untrained = ours.split("\nlm = ")[0]
    names = run_page(page, lambda code: {first: first, ours: untrained}.get(code, ""))
    prompt = jnp.array([[3, 1, 4], [1, 5, 9]])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = names["init_lm"](jax.random.key(3))
        tokens = names["generate"](params, prompt, 24, jax.random.key(0), temperature=1e-6)
        most_probable = names["lm_logits"](params, tokens).argmax(axis=-1)
    np.testing.assert_array_equal(tokens[:, :3], prompt)
    np.testing.assert_array_equal(tokens[:, 3:], most_probable[:, 2:-1])
    assert len(np.unique(tokens)) > 3


def test_coming_from_begins_with_pytorch() -> None:
    names = "pytorch hf-trainer keras lightning flax optax orbax tf-train".split()  # noqa: SIM905
    for page in ("README.md", "mkdocs.yml", "docs/index.md", "docs/from/index.md"):
        text = (DOCS.parent / page).read_text(encoding="utf-8")
        found = [name for name in re.findall(r"([\w-]+)\.md", text) if name in names]
        assert found == names, page
