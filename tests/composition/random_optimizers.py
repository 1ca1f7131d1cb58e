"""Random nested optimizers, and the updates that each leaf of the parameters should get."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jstep

# Names that are prefixes of each other, that contain slashes, or that slots have too.
NAMES = ("a", "a/b", "a/b/c", "m", "decoder", "decoder/attn", "start_step")
WRAPPERS = ("scope", "average", "skip", "chain", "every")
BASES = {
    "sgd": lambda: jstep.gradient_descent(0.1),
    "momentum": lambda: jstep.momentum(0.1, 0.9),
    "adam": lambda: jstep.adam(jstep.exponential_decay(0.1, 3, 0.5)),
    "adagrad": lambda: jstep.adagrad(0.1),
}


@dataclasses.dataclass(frozen=True)
class Base:
    kind: str

    def build(self):
        return BASES[self.kind]()

    def base_of(self, path):
        return self.kind


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """An optimizer inside a scope, an average, a guard, a chain or `update_every(1)`."""

    wrapper: str
    name: str
    inner: object

    def build(self):
        inner = self.inner.build()
        if self.wrapper == "scope":
            return jstep.scope(self.name, inner)
        if self.wrapper == "average":
            return jstep.with_moving_average(inner, jstep.ExponentialMovingAverage(0.5, name=f"avg_{self.name}"))
        if self.wrapper == "skip":
            return jstep.skip_nonfinite(inner)
        if self.wrapper == "every":
            return jstep.update_every(1, inner)
        return jstep.chain(jstep.clip_gradients(by_value=1e6), inner)

    def base_of(self, path):
        return self.inner.base_of(path)


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A partition that assigns labels by path; labels may be frozen."""

    parts: Mapping[str, object]

    def label(self, path):
        labels = list(self.parts)
        label = labels[sum(map(ord, path)) % len(labels)]
        return None if self.parts[label] is None else label

    def build(self):
        inner = {label: part.build() for label, part in self.parts.items() if part is not None}
        return jstep.partition(inner, labels=lambda path, leaf: self.label(path))

    def base_of(self, path):
        label = self.label(path)
        return None if label is None else self.parts[label].base_of(path)


def _partitions(children):
    parts = st.dictionaries(st.sampled_from(NAMES), st.one_of(children, st.none()), min_size=1, max_size=3)
    return parts.filter(lambda parts: any(part is not None for part in parts.values())).map(Partitioned)


def nested_optimizers():
    """Return a strategy for nested optimizers, a few levels deep, that do not freeze every leaf."""
    specs = st.recursive(
        st.sampled_from(sorted(BASES)).map(Base),
        lambda children: st.one_of(
            st.builds(Wrapped, st.sampled_from(WRAPPERS), st.sampled_from(NAMES), children),
            _partitions(children),
        ),
        max_leaves=4,
    )
    return specs.filter(lambda spec: any(spec.base_of(path) is not None for path in PATHS))


PATHS = ("w", "b", "decoder/w", "decoder/attn/w", "m")


def params_of(rng):
    """Return parameters whose paths are prefixes of each other, with an integer and a None among the leaves."""
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "w": array(3),
        "b": array(2, 2),
        "decoder": {"w": array(3), "attn": {"w": array(3)}, "steps": jnp.int32(7), "nothing": None},
        "m": array(3),
    }


def gradients_of(rng, params):
    """Return gradients for the floating leaves and None for the others."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) if leaf.dtype == jnp.float32 else None,
        params,
    )


def leaf_at(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return tree


def train_alone(kind, leaf, gradients):
    """Return a leaf after training it alone with one optimizer."""
    if kind is None:
        return np.asarray(leaf)
    optimizer = BASES[kind]()
    state = jstep.TrainState.create({"x": leaf}, optimizer)
    for gradient in gradients:
        state = jstep.apply_gradients(state, {"x": gradient}, optimizer)
    return np.asarray(state.params["x"])
