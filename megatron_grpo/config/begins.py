"""What a run begins with. No torch."""

from __future__ import annotations

from typing import Any


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """`finetune` says as in Megatron which of the two is meant: resume with true is mcore_model, mcore_model with false is resume."""
    finetune, beginning, resume = values.get("finetune"), values.get("mcore_model"), values.get("resume", "auto")
    if finetune is False and beginning and resume == "auto":
        return {"mcore_model": None, "resume": beginning}
    if finetune is True and not beginning and resume not in ("auto", "never"):
        return {"mcore_model": resume, "resume": "auto"}
    return {}
