"""The proof that a kernel is right: the loaded build against its reference, over a declared grid."""

from kernel_loader.conformance.grid import (
    MODES as MODES,
    Case as Case,
    Draw as Draw,
    Entry as Entry,
    Grid as Grid,
    Inputs as Inputs,
    Mode as Mode,
    Tolerance as Tolerance,
    Work as Work,
)
from kernel_loader.conformance.measure import Measured as Measured, bench as bench, prewarm as prewarm
from kernel_loader.conformance.runner import Checked as Checked, check as check
