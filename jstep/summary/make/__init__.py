"""Functions that create summaries from values."""
