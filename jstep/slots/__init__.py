"""Slots of optimizers: their roles, gradients that match them, compact and sparse arrays."""
