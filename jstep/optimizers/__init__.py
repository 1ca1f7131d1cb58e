"""Optimizers, wrappers and chain elements; each is a function that returns an `Optimizer` of pure functions."""
