"""Training steps: compilation, donation of the state, and the increment of the global step."""
