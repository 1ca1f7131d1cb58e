"""Writing summaries to event files, on a background thread."""
