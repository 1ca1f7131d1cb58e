"""Optimizer wrappers, and functions that combine optimizers."""
