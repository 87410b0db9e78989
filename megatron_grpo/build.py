"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.config import Config
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.policy.model import build_chunks
from megatron_grpo.policy.optimizer import build_optimizer, build_scheduler, wrap_for_training
from megatron_grpo.policy.policy import Policy
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader
from megatron_grpo.weights.shape import ModelShape


def uses_transformer_engine(transformer_impl: str) -> bool:
    """`auto` takes Transformer Engine where it can be imported."""
    if transformer_impl != "auto":
        return transformer_impl == "transformer_engine"
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def padded_vocab_size(shape: ModelShape, cfg: Config) -> int:
    """Rows of the embedding: a multiple that TP divides evenly."""
    multiple = cfg.model.padded_vocab_multiple * cfg.parallel.tensor_model_parallel_size
    return -(-shape.vocab_size // multiple) * multiple


def build_policy(cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path, num_steps: int) -> Policy:
    """The policy with the checkpoint's weights, ready to train; and its frozen reference where the loss needs one. Collective."""
    use_te = uses_transformer_engine(cfg.model.transformer_impl)
    rows = padded_vocab_size(shape, cfg)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=rows, naming="transformer_engine" if use_te else "local")
    exchange = WeightExchange(weight_map, parallel)
    reader = HfReader(model_path)
    weight_map.check_complete(reader.names)
    loss = GrpoLoss.from_config(
        cfg.grpo, max_completion_length=cfg.rollout.max_completion_length, temperature=cfg.rollout.temperature
    )

    def loaded_chunks():
        chunks = build_chunks(
            shape, cfg.model, cfg.parallel, parallel, use_te=use_te, padded_vocab_size=rows, temperature=loss.temperature
        )
        exchange.load(chunks, reader)
        return chunks

    chunks = loaded_chunks()
    wrapped = wrap_for_training(chunks, cfg.optimizer)
    optimizer = build_optimizer(wrapped, cfg.optimizer)
    reference = None
    if cfg.grpo.beta:
        reference = [chunk.eval().requires_grad_(False) for chunk in loaded_chunks()]
    return Policy(
        chunks=chunks,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, cfg.optimizer, num_steps=num_steps),
        loss=loss,
        reference=reference,
        exchange=exchange,
        parallel=parallel,
        micro_batch_size=cfg.batch.micro_batch_size,
    )
