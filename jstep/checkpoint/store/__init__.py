"""Where checkpoints lie: a local directory, or below a URL of an object store."""
