"""Compile-only meshes: TPU slices and GPU clusters that the machine does not have."""
