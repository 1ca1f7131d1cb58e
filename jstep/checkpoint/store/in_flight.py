"""Registry of the writes in progress in this process, which does not import Orbax."""

from typing import Any

IN_FLIGHT: dict[str, Any] = {}
"""Path of a temporary folder → the checkpointer that writes it."""
