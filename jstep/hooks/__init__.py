"""Callbacks around the steps of `train`: the `Hook` protocol, cadences, and the built-in hooks."""
