"""Functions as graphs that TensorBoard draws, and as text."""
