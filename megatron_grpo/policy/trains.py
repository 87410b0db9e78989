"""What trains: `requires_grad`, set before Megatron's DDP makes its buffers of whatever has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megatron_grpo.config.config import TunerConfig
from megatron_grpo.policy.hf_export import WeightExchange
from megatron_grpo.weights.trains import parameter_trains, trains


def choose_what_trains(chunks: Sequence[GPTModel], exchange: WeightExchange, cfg: TunerConfig) -> None:
    """Freezes what the settings freeze. chunks: of this stage, not yet wrapped."""
    rule = trains(cfg)
    for name, tensor in exchange.tensors(chunks).items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(parameter_trains(exchange.map.hf_names(name), rule))
    let_gradients_in(chunks)


def let_gradients_in(chunks: Sequence[GPTModel]) -> None:
    """Makes the output of a frozen embedding ask for a gradient.

    Otherwise Megatron's checkpointed layers get an input without one, and their backward is skipped: no error, and all gradients zero.
    """

    def ask(module, inputs, output):
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    for chunk in chunks:
        if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(ask)
