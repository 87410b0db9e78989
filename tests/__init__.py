"""Whatever imports a module of the tests finds the referee of this checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "referee"))  # the first is the checkout, or the script's own folder
