"""A rank without a model for tests of `api.launch`: `python -m tests.stub_rank DIR`. The first object determines its behavior."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    act = pickle.loads((folder / "objects.pkl").read_bytes())
    sys.exit(act(folder, int(os.environ["RANK"])))
