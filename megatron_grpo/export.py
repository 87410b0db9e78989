"""The policy as a Hugging Face checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.policy import Policy
from megatron_grpo.weights.writer import HfWriter


def export_hf(policy: Policy, out: str | Path, *, source: str | Path, dtype: torch.dtype, parallel: ParallelState) -> None:
    """Writes safetensors, config and tokenizer to `out`, whole or not at all. Collective; the main rank writes.

    source: the checkpoint that config.json and the tokenizer are taken from.
    """
    if parallel.is_main:
        with HfWriter(out, source, dtype=dtype, expected=policy.exchange.map.expected_hf_names()) as write:
            for name, tensor in policy.named_weights():
                write(name, tensor)
    else:
        for _ in policy.named_weights():
            pass
    collectives.wait_for_all()
