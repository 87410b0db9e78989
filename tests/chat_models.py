"""A tiny Qwen3 with a ChatML template, random weights and a byte tokenizer.

Its turns end by themselves after some tokens, and contain incomplete characters, white space and special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models import write_tiny
from tools.make_tiny_chat_model import END, PAD, START, TEMPLATE  # token ids of PAD, START and END here: 0, 1, 2

_CONTENT = "(message.content or '')"
# Like Qwen3's: what an earlier turn thought (here: all but its last character) is dropped once somebody has answered.
_LAST = "{%- set last = namespace(user=-1) -%}{%- for m in messages %}{% if m.role != 'assistant' %}\
{% set last.user = loop.index0 %}{% endif %}{% endfor -%}"
DROPS = _LAST + TEMPLATE.replace(
    _CONTENT, "(message.content if message.role != 'assistant' or loop.index0 > last.user else message.content[-1:])"
)
TRIMS = TEMPLATE.replace(_CONTENT, "(message.content | trim)")
IGNORES_TOOLS = TEMPLATE.replace("message.role == 'tool'", "message.role == 'nobody'").replace(
    "{{- '<|im_start|>' + message.role", "{%- if message.role != 'tool' %}{{- '<|im_start|>' + message.role"
).replace("+ '<|im_end|>\\n' -}}\n{%- endif -%}\n{%- endfor", "+ '<|im_end|>\\n' -}}{% endif %}\n{%- endif -%}\n{%- endfor")  # fmt: skip
THINKS = TEMPLATE.replace("'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif")


def write_chat(path: str | Path, *, template: str = TEMPLATE, ends: float = 8.0, **model: Any) -> Path:
    """Write the model like `write_tiny`. A larger `ends` makes turns shorter; a turn has about twelve tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    path = write_tiny(path, "qwen3", **{"vocab": 260, "std": 0.1, "max_positions": 1024} | model)
    weights = load_file(path / "model.safetensors")
    # One channel has the same value behind every token, and the head reads from it how likely the end of the turn is.
    weights["model.embed_tokens.weight"][:, 0] = 4.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][2] = 0.0
    weights["lm_head.weight"][2, 0] = ends / 8.0
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    save_file({name: value.contiguous() for name, value in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    chat_tokenizer(template).save_pretrained(path)
    return path


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """Return a tokenizer with one token per byte and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = (PAD, START, END)
    words = {piece: n for n, piece in enumerate((*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=template, clean_up_tokenization_spaces=False
    )
