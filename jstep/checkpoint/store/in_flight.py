"""What this process is writing, known without loading what writes."""

from typing import Any

IN_FLIGHT: dict[str, Any] = {}
"""Path of a temporary folder → the checkpointer that writes it."""
