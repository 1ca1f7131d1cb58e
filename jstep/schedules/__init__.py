"""What is a hyperparameter at a step? Schedules are exact at every representable step.

- `arithmetic`: exact arithmetic of schedules.
- `compose`: composition of schedules.
- `curves`: schedules by name.
"""
