"""`verify`: does a parallel run compute what one process computes, step by step in float64?"""

from lightning_par.verification.comparison import Difference, StepRow, VerifyReport
from lightning_par.verification.loops import capture, compare
from lightning_par.verification.verify import verify

__all__ = ["Difference", "StepRow", "VerifyReport", "capture", "compare", "verify"]
