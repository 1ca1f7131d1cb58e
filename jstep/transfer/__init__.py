"""Hyperparameter transfer from a small model to a wide one: μP factors and the coordinate check."""
