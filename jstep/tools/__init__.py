"""Debugging and planning tools built on the global step."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.timeline import Goodput, goodput
from jstep.tools.collectives import Collective
from jstep.tools.cost import Cost, cost
from jstep.tools.find_nonfinite import NonFinite, find_nonfinite
from jstep.tools.plan import Plan, plan
from jstep.tools.replay import Replay, replay
from jstep.tools.verify_resume import ResumeReport, verify_resume

__all__ = [
    "Collective",
    "Cost",
    "Goodput",
    "NonFinite",
    "Plan",
    "Replay",
    "ResumeReport",
    "cost",
    "find_nonfinite",
    "goodput",
    "plan",
    "replay",
    "verify_resume",
]

_set_public_module(globals())
