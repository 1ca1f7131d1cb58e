"""Weights of other toolkits, in and out: files in the safetensors format, as Hugging Face names them."""

from jstep.core.public import publish as _publish
from jstep.weights.load import load_weights
from jstep.weights.save import save_weights

__all__ = [
    "load_weights",
    "save_weights",
]

_publish(globals())
