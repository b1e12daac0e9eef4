"""Whether a layout computes what one process computes: `verify`."""

from lightning_par.verification.comparison import Difference, StepRow, VerifyReport
from lightning_par.verification.verify import verify

__all__ = ["Difference", "StepRow", "VerifyReport", "verify"]
