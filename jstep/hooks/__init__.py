"""Hooks: callbacks around the steps of `train`, one per file."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.hooks.audit import AuditError, AuditHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.evaluation import EvaluationHook
from jstep.hooks.every import every
from jstep.hooks.fingerprint import DivergenceError, FingerprintHook
from jstep.hooks.hook import Hook
from jstep.hooks.log_every_n import log_every_n
from jstep.hooks.logging_hook import LoggingHook
from jstep.hooks.metrics_hook import MetricsHook
from jstep.hooks.nan_loss import NanLossDuringTrainingError, NanLossHook
from jstep.hooks.profiler import ProfilerHook
from jstep.hooks.progress import ProgressHook
from jstep.hooks.step_counter import StepCounterHook
from jstep.hooks.stop_at_step import StopAtStepHook
from jstep.hooks.summary_saver import SummarySaverHook

__all__ = [
    "AuditError",
    "AuditHook",
    "CheckpointSaverHook",
    "DivergenceError",
    "EvaluationHook",
    "FingerprintHook",
    "Hook",
    "LoggingHook",
    "MetricsHook",
    "NanLossDuringTrainingError",
    "NanLossHook",
    "ProfilerHook",
    "ProgressHook",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "every",
    "log_every_n",
]

_set_public_module(globals())
