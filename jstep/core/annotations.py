"""Names of types in signatures."""

from typing import Any, TypeAlias

Tree: TypeAlias = Any
"""A pytree whose structure is the caller's: parameters, gradients, batches, what a function of the user's returns."""
