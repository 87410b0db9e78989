"""Put the referee of this checkout on the path of every module that tests import."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "referee"))  # the first is the checkout, or the script's own folder
