"""Settings for every test process, made before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # `import tests.ranks` and an uninstalled megatron_grpo work from anywhere

from tests.ranks import ENVIRONMENT  # noqa: E402

os.environ.update(ENVIRONMENT)

from hypothesis import HealthCheck, settings  # noqa: E402

# A claim holds on a slow machine too: no example has to be ready in time.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
