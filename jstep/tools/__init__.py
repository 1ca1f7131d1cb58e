"""What only one clock can give."""

from jstep.core.public import publish as _publish
from jstep.tools.verify_resume import ResumeReport, verify_resume

__all__ = [
    "ResumeReport",
    "verify_resume",
]

_publish(globals())
