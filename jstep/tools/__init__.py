"""Debugging and planning tools built on the global step."""
