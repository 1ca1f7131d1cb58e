"""The programs of docs/recipes/inner-loops.md beside their originals in NumPy, all in float64."""

import pathlib
import re

import jax
import numpy as np
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs/recipes/inner-loops.md"
TARGETS = np.random.default_rng(0).normal(size=(64, 4, 3))


def run_section(title):
    """Return the names of the page's first program and of one section, run in float64."""
    text = PAGE.read_text().replace("np.float32", "np.float64")
    first, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(title)]
    names = {}
    for part in (first, section):
        for code in re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)
    return names


def gradient(w, target):
    return 2 * (w - target) / w.shape[-1]


class Adam:
    def __init__(self, w):
        self.w = w
        self.m = np.zeros_like(w)
        self.v = np.zeros_like(w)
        self.t = 0

    def update(self, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g

    def tensorflow(self, g, rate):
        self.update(g)
        corrected = rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        self.w = self.w - corrected * self.m / (np.sqrt(self.v) + 1e-8)

    def decoupled(self, g, rate, decay):
        self.update(g)
        direction = (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)
        self.w = self.w - rate * (direction + decay * self.w)


def maml():
    model = Adam(np.zeros(3))
    for step in range(20):
        shrink = (1 - 0.1 * 2 / 3) ** 2  # d adapted / d w after two steps of gradient descent
        adapted = TARGETS[step] + shrink * (model.w - TARGETS[step])
        model.tensorflow((gradient(adapted, TARGETS[step]) * shrink).mean(0), 0.05)
    return model.w


def diloco(decay):
    w, velocity = np.zeros(3), np.zeros(3)
    workers = [Adam(np.zeros(3)) for _ in range(4)]
    for step in range(10):
        for worker, target in zip(workers, TARGETS[step], strict=True):
            worker.w = w
            for _ in range(4):
                worker.decoupled(gradient(worker.w, target), 0.05, decay)
        move = w - np.mean([worker.w for worker in workers], 0)
        velocity = 0.9 * velocity + move
        w = w - 0.7 * (move + 0.9 * velocity)
    return w


def scaffold():
    w, control, controls = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    for step in range(10):
        clients = np.tile(w, (4, 1))
        for _ in range(4):
            clients = clients - 0.1 * (gradient(clients, TARGETS[step]) - controls + control)
        new = controls - control + (w - clients) / (4 * 0.1)
        control = control + (new - controls).mean(0)
        w, controls = clients.mean(0), new
    return w


def pbt(start, key):
    members = [Adam(w) for w in start]
    rates = np.full(4, 0.01)
    for step in range(12):
        losses = np.array([np.mean((member.w - TARGETS[step]) ** 2) for member in members])
        for member, rate in zip(members, rates, strict=True):
            g = np.mean([gradient(member.w, target) for target in TARGETS[step]], 0)
            member.tensorflow(g, rate)
        if step % 4 == 3:
            order = np.argsort(losses)
            factor = np.where(
                jax.random.bernoulli(jax.random.fold_in(key, step), shape=(4,)), 1.2, 0.8
            )
            for better, worse in zip(order[:2], order[2:], strict=True):
                source, copy = members[better], Adam(members[better].w)
                copy.m, copy.v, copy.t = source.m, source.v, source.t
                members[worse], rates[worse] = copy, rates[better] * factor[worse]
    return np.stack([member.w for member in members]), rates


def evolution(key):
    w = np.zeros(3)
    for step in range(10):
        candidates = w + 0.1 * np.asarray(jax.random.normal(jax.random.fold_in(key, step), (16, 3)))
        losses = ((candidates[:, None] - TARGETS[step]) ** 2).mean((1, 2))
        w = candidates[np.argsort(losses)[:4]].mean(0)
    return w


@pytest.mark.parametrize("title", ["jstep inside a loss", "Nested states", "Control variates"])
def test_programs_agree_with_their_originals(title):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        names = run_section(title)
        w = np.asarray(names["state"].params["w"])
        decay = (
            float(names["worker_optimizer"].hyperparameters(0)["weight_decay"])
            if title == "Nested states"
            else 0
        )
    original = {
        "jstep inside a loss": maml,
        "Nested states": lambda: diloco(decay),
        "Control variates": scaffold,
    }
    assert w.dtype == np.float64
    np.testing.assert_allclose(w, original[title](), rtol=1e-10)


def test_a_population_agrees_with_its_original():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        names = run_section("A population that exploits")
        members, key = names["state"].model_state, names["KEY"]
        start = np.asarray(jax.random.normal(key, (4, 3)))
        want, rates = pbt(start, key)
        np.testing.assert_allclose(members.params["w"], want, rtol=1e-10)
        np.testing.assert_allclose(
            names["jstep"].get_hyperparameter(members, "learning_rate"), rates, rtol=1e-12
        )
        population = run_section_after("A population that exploits", "Evolution without gradients")
        np.testing.assert_allclose(population["state"].params["w"], evolution(key), rtol=1e-10)


def run_section_after(first, second):
    """Return the names of a section that uses those of another one."""
    names = run_section(first)
    code = "\n".join(
        re.findall(
            r"```python\n(.*?)```", PAGE.read_text().split(f"## {second}")[1], flags=re.DOTALL
        )
    )
    exec(compile(code, str(PAGE), "exec"), names)
    return names
