"""Expected outcomes of faults, in the words of the report."""

from __future__ import annotations

RESUMES = "the same command resumes with results equal bit for bit"
SAVES = "the step ends, the run saves, and the same command resumes"
FALLS_BACK = "a warning, and the run resumes from the checkpoint before with equal results"
UNMOVED = "results equal those of an undisturbed run"
SENTENCE = "an error that names the cause; after the repair the run resumes with equal results"
