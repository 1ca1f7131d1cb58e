"""Gradient clipping by value, norm, average norm and global norm."""
