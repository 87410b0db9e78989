"""What a run begins with, and what of a checkpoint it goes on without. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.tuner import Pair


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """`finetune` says as in Megatron which of the two is meant: resume with true is mcore_model, mcore_model with false is resume."""
    finetune, beginning, resume = values.get("finetune"), values.get("mcore_model"), values.get("resume", "auto")
    if finetune is False and beginning and resume == "auto":
        return {"mcore_model": None, "resume": beginning}
    if finetune is True and not beginning and resume not in ("auto", "never"):
        return {"mcore_model": resume, "resume": "auto"}
    return {}


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    run = cfg.run
    if run.finetune and not run.mcore_model:
        message = "finetune true begins with the weights of a checkpoint, and none is named. Give mcore_model, or leave it out."
        yield ("finetune", "mcore_model"), message, {}
    if run.mcore_model and cfg.tuner.tuner_type == "lora":
        yield (
            ("mcore_model", "tuner_type"),
            f"mcore_model ({run.mcore_model}) holds whole weights, and tuner_type lora trains adapters beside model's. Give what `megatron-"
            "grpo export` writes of it as model; of an adapter's checkpoint, as adapters.",
            {},
        )
    for name, what in (("no_load_optim", "its optimizer"), ("no_load_rng", "its random generators")):
        if getattr(run, name) and run.resume in ("auto", "never"):
            message = f"{name} true goes on from a checkpoint without {what}, and resume names none. Give its path, or leave {name} out."
            yield (name, "resume"), message, {name: [False]}
