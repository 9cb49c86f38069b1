"""Evidence: every claim about a policy is a part here, one file each, that anybody can run again.

A part says what is run (cells), what is compared, what was hoped for and what was found. The framework runs it, works
out means, intervals and signs, and writes docs/evidence. See docs/evidence/README.md for how a part is written.
"""

from benchmarks.evidence._part import Bars, Cell, Compare, Curves, Figures, Goal, Lines, Part, Quick
from benchmarks.evidence._simulated import bounded, figures, simulate, simulated

__all__ = [
    "Bars",
    "Cell",
    "Compare",
    "Curves",
    "Figures",
    "Goal",
    "Lines",
    "Part",
    "Quick",
    "bounded",
    "figures",
    "simulate",
    "simulated",
]
