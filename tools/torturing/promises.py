"""What is promised, in the words of the table."""

from __future__ import annotations

RESUMES = "the same command again is the undisturbed run, bit for bit"
SAVES = "the step ends, all of it is saved, and the same command goes on"
FALLS_BACK = "a warning, the checkpoint before it, the undisturbed run"
UNMOVED = "the undisturbed run"
SENTENCE = "a sentence that names it; resumed with it mended, the undisturbed run"
