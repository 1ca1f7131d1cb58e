"""Which batch belongs to a step?

- `batch_placement`: placement of host data on devices; copies and hashes of batches.
- `batch_rows`: the rows of each batch.
- `batch_sources`: batches from one step on, as a run sees them.
- `batches`: batches and mixtures as functions of the step.
- `loaders`: opens all kinds of batches; `from_state` and `replayed`.
- `loop_batches`: `from_loop`.
- `permutation`: shuffling without a stored permutation.
- `positions`: positions of loaders.
- `prefetch`: reading ahead of the loop.
- `proportions`: how many rows of a mixture come from each source.
- `sequence`: the base class of batch sequences.
- `sources`: rows of data sources.
- `steps`: the steps of a batch sequence, and values that change at given steps.
"""
