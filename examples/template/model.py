"""The model, its loss, and its metrics, as functions of parameters and a batch."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers with dropout."""

    widths: Sequence[int]
    dropout: float

    def init(self, key):
        sizes = [64, *self.widths, 10]
        layers = [
            {"kernel": jax.random.normal(sub, (n, m)) * jnp.sqrt(2.0 / n), "bias": jnp.zeros(m)}
            for sub, n, m in zip(
                jax.random.split(key, len(sizes) - 1), sizes, sizes[1:], strict=False
            )
        ]
        return {"body": {str(i): layer for i, layer in enumerate(layers[:-1])}, "head": layers[-1]}

    def logits(self, params, images, rng=None):
        x = images
        for i in range(len(self.widths)):
            x = jax.nn.relu(dense(params["body"][str(i)], x))
            if rng is not None and self.dropout:
                keep = jax.random.bernoulli(jax.random.fold_in(rng, i), 1 - self.dropout, x.shape)
                x = jnp.where(keep, x / (1 - self.dropout), 0.0)
        return dense(params["head"], x)

    def loss(self, params, images, labels, rng):  # training_step
        return jnp.mean(cross_entropy(self.logits(params, images, rng), labels))

    def metrics(self, params, images, labels):  # validation_step, test_step
        logits = self.logits(params, images)
        return {"loss": cross_entropy(logits, labels), "acc": logits.argmax(-1) == labels}

    def predict(self, params, images):  # predict_step
        return jax.nn.softmax(self.logits(params, images))


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
