"""What makes summaries: pure functions from values to pytrees with tags."""
