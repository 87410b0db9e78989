"""slime's teacher, `--use-opd`: one inside Megatron is one of ours but for the format of its file, and an SGLang server is none.

Source: apply_opd_kl_to_advantages in slime/backends/megatron_utils/loss.py, whose log-probs are over the sampling temperature as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.compat.vocabulary import Given, idle, is_true, text_of
from megatron_grpo.config.foreign import Change
from megatron_grpo.config.table import BadValue

NAMES = ("use_opd", "opd_type", "opd_teacher_load", "opd_kl_coef")


def settle(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    if not is_true(given, "use_opd", "false"):
        yield from idle(given, {"opd_type": "none", "opd_teacher_load": "none", "opd_kl_coef": "1.0"}, without="use_opd")
        return
    yield Change(values={"teacher_kl_coef": float(text_of(given, "opd_kl_coef", "1.0"))})
    if values.get("teacher_model") or values.get("teacher_model_server"):
        return
    kind, where = text_of(given, "opd_type", "none"), text_of(given, "opd_teacher_load", "none")
    if kind != "megatron":
        raise BadValue(
            f"opd_type ({kind}): an SGLang server is no teacher here. Start megatron-grpo serve --frozen true --model TEACHER, and name it "
            "with teacher_model_server"
        )
    if not (Path(where) / "config.json").is_file():
        raise BadValue(
            f"opd_teacher_load ({where}) is a checkpoint of Megatron-LM. Name the Hugging Face checkpoint that it was made of with "
            "teacher_model"
        )
    yield Change(values={"teacher_model": where}, note="opd_teacher_load with opd_type megatron is teacher_model.")
