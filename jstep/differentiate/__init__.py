"""Gradients of loss functions: microbatches, sparse lookups and gates."""
