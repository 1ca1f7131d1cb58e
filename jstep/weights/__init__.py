"""Weights of other toolkits, in and out: files in the safetensors format, as Hugging Face names them."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.weights.load import load_weights
from jstep.weights.save import save_weights

__all__ = [
    "load_weights",
    "save_weights",
]

_set_public_module(globals())
