"""Hooks: callbacks around the steps of `train`, when they are called, and what those of jstep know and write."""
