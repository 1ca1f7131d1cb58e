"""Schedules: functions from the global step to a scalar, exact at every representable step.

Optimizers evaluate them in `jstep.optimizers.hyperparameters`, by `value_at`.
"""
