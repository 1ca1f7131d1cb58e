"""Export of functions as TensorBoard graphs and as StableHLO."""
