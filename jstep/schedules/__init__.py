"""What is a hyperparameter at a step? Schedules are exact at every representable step.

- `arithmetic`: exact arithmetic of schedules, and the validation of their arguments.
- `compose`: composition of schedules: constant, piecewise constant, warmup, join.
- `curves`: schedules by name: decays, cosine, cycles, and schedules with a warmup.
"""
