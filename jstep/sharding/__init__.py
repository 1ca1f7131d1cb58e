"""Shardings of states and batches over a mesh."""
