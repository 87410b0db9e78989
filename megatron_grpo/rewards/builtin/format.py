"""The reward `format`: 1 for a completion that is made of the wanted tags, each once and in order, with nothing around them; else 0."""

from __future__ import annotations

import re
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config
from megatron_grpo.rewards.protocol import text_of


class Format:
    def __init__(self, tags: list[str]):
        self.marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        inside = [rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags]
        self.pattern = re.compile(r"\s*" + r"\s*".join(inside) + r"\s*", re.DOTALL)

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [self._score(text_of(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        # The count comes first: without it a second <think> could hide inside `.*?`.
        return float(all(text.count(mark) == 1 for mark in self.marks) and self.pattern.fullmatch(text) is not None)


def build_format(config: Config) -> Format:
    """Raises ConfigError for tags that are no names."""
    tags = config.rewards.format_tags
    bad = [tag for tag in tags if not re.fullmatch(r"[A-Za-z_][\w-]*", tag)]
    if bad or not tags or len(set(tags)) < len(tags):
        message = f"format_tags {tags} should be different names without brackets, such as: think answer."
        raise ConfigError([Problem(flags=("format_tags",), message=message)])
    return Format(tags)
