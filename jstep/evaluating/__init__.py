"""How good is a state on other data?

- `callbacks`: early stopping, plateaus, the best checkpoints.
- `evaluation_batches`: the batches of an evaluation, read from the start each time.
- `evaluation_hook`: the hook that evaluates the state of a run.
- `evaluation_metrics`: the metrics of evaluation batches, and their totals.
- `evaluator`: the evaluator: exact metrics of a state over all batches of a data set.
"""
