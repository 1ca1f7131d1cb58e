"""Loading and saving of weights in the safetensors format, as used by Hugging Face; loading from checkpoints."""

from typing import TYPE_CHECKING

from jstep.core.public import load_when_used as _load_when_used
from jstep.core.public import set_public_module as _set_public_module

if TYPE_CHECKING:
    from jstep.weights.load import load_weights
    from jstep.weights.save import save_weights
else:  # these import JAX
    __getattr__, __dir__ = _load_when_used(
        globals(),
        {
            "load_weights": "jstep.weights.load",
            "save_weights": "jstep.weights.save",
        },
    )

__all__ = [
    "load_weights",
    "save_weights",
]

_set_public_module(globals())
