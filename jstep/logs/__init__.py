"""What does a user see of the numbers of a run? The hooks that log, write and keep them.

- `fingerprint_log`: fingerprints of the state by step, in logs.
- `history`: the metrics of a run, as rows and plots.
- `history_file`: the file of a `History`.
- `reporting`: hooks that report metrics.
- `speed`: the hook that measures the speed.
"""
