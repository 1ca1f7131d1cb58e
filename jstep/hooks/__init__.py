"""Callbacks around the steps of `train`: the `Hook` protocol and the built-in hooks."""
