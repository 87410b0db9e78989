"""What libraries would say to every rank of every run, and nobody needs to hear. Called before they are imported; errors stay."""

from __future__ import annotations

import logging
import warnings

_HARMLESS = (
    ".*Apex is not installed.*",  # optional parts, which every module of Megatron-Core that could use them misses aloud
    ".*Transformer Engine and Apex are not installed.*",
    ".*full scope is deprecated.*",  # a default of Megatron-Core's own
    ".*attribute of a Tensor that is not a leaf Tensor is being accessed.*",  # its optimizer looks at shards
)


def quiet_libraries() -> None:
    """Filters known noise; what else libraries say passes."""
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
