"""Data pipelines: batches by step, mixtures of sources, and prefetching to devices."""
