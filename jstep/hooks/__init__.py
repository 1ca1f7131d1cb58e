"""Hooks: callbacks around the steps of `train`, one per file."""
