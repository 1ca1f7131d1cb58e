"""Schedules: functions from the global step to a scalar, exact at every representable step."""
