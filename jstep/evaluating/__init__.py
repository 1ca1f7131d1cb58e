"""How good is a state on other data?

- `callbacks`: early stopping, plateaus.
- `evaluation_batches`: the batches of an evaluation.
- `evaluation_hook`: `EvaluationHook`.
- `evaluation_metrics`: metrics, and their totals.
- `evaluator`: `evaluator`.
- `keep_best`: the best checkpoints.
"""
