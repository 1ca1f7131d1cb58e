"""Which batch belongs to a step?

- `batch_hashes`: hashes of batches, by which a restart notices other data.
- `batch_placement`: placement of host data on devices by a sharding.
- `batch_rows`: the rows of each batch, and their number, as pure functions of the step.
- `batches`: shuffled batches and weighted mixtures as functions of the step.
- `loaders`: iterators over all sources of batches, including stateful loaders.
- `loop_batches`: batches that the user's own loop makes: `from_loop`.
- `permutation`: shuffling without a stored permutation: a keyed bijection of range(n).
- `positions`: positions of data loaders on each process.
- `prefetch`: batches are read and transferred ahead of the loop.
- `proportions`: the weights of a mixture, in exact arithmetic.
- `sequence`: the base class of the batch sequences that `batches` and `mixture` return.
- `sources`: rows of data sources: arrays, and objects with a length and items.
- `steps`: the steps of a batch sequence, and values that change at given steps.
"""
