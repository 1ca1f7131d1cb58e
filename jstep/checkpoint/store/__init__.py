"""Storage of checkpoints, in a local directory or below a URL of an object store."""
