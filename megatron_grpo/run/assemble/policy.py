"""Build the trained model, frozen models and the reference from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.grpo.loss import GrpoLoss
from megatron_grpo.core.grpo.zero_gradient import zero_gradient_kinds
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.attention import gpu_kernel
from megatron_grpo.core.policy.gradient_check import GradNormSpikeCheck
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.policy.memory_offload import Role
from megatron_grpo.core.policy.model import PolicyModel, build_chunks, keep_outputs
from megatron_grpo.core.policy.model_config import padded_vocab_size
from megatron_grpo.core.policy.optimizer import TrainableModel, select_trainable
from megatron_grpo.core.policy.passes import ModelScorer
from megatron_grpo.core.policy.policy import Policy, batch_partitioner
from megatron_grpo.core.policy.requirements import rank_multiple
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.weights.buckets import MIB
from megatron_grpo.core.weights.hf_files import HfReader, check_tied_head
from megatron_grpo.core.weights.lora import AdapterUpdateRequest, LoraSettings, make_lora_settings, own_sizes
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.trainable_parameters import trains_tower
from megatron_grpo.run.assemble import PolicyParts
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.config.rules.policy import attention_channels, machine_problems, needs_local_layers, sharing_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.sharing import PrefixSharing, decide

if TYPE_CHECKING:
    from megatron_grpo.core.policy.lora import Adapters
    from megatron_grpo.core.policy.reference import FrozenPolicy, Reference

logger = logging.getLogger(__name__)

Tensors = Callable[[], dict[str, torch.Tensor]]

MakeReference = Callable[[GrpoConfig, ModelScorer, Tensors], Any]  # (settings, initial model, its tensors)


def build_frozen(cfg: GrpoConfig, initial: ModelScorer, tensors: Tensors) -> Reference:
    """Build a reference that keeps the initial weights.

    Args:
        tensors: Returns the tensors of the initial model; unused here.
    """
    from megatron_grpo.core.policy.reference import FrozenReference

    return FrozenReference(initial)


def build_following(cfg: GrpoConfig, initial: ModelScorer, tensors: Tensors) -> Reference:
    """Build a reference that mixes in the policy's weights every `ref_model_sync_steps` steps (`sync_ref_model`).

    Args:
        tensors: Returns the tensors of the initial model, which the mixing updates.
    """
    from megatron_grpo.core.policy.reference import SyncedReference

    return SyncedReference(initial, tensors=tensors, sync_steps=cfg.ref_model_sync_steps, alpha=cfg.ref_model_mixup_alpha)


REFERENCES: dict[bool, MakeReference] = {False: build_frozen, True: build_following}  # by sync_ref_model


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Return whether Transformer Engine is used.

    Args:
        transformer_impl: The setting: "auto" uses it if it can be imported.
    """
    if transformer_impl != "auto":
        return transformer_impl == "transformer_engine"
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def sharing_on_this_machine(cfg: Config, shape: ModelShape, parallel: ParallelState) -> PrefixSharing:
    """Decide whether this machine computes each shared prompt once.

    The main rank logs the decision if it differs from the plan's, which does not know the machine.

    Raises:
        ConfigError: With everything that the settings require and this machine lacks.
    """
    has_te, has_gpu = uses_transformer_engine("auto"), parallel.device.type == "cuda"
    capability = torch.cuda.get_device_capability(parallel.device) if has_gpu else None
    problems = machine_problems(cfg, has_gpu=has_gpu, has_transformer_engine=has_te, capability=capability)
    if problems := [*problems, *sharing_problems(cfg, shape)]:
        raise ConfigError(problems)
    sharing = decide_sharing(cfg, shape, parallel)
    planned = decide(cfg, shape)  # `plan` and the sizes shown at the start do not know the machine
    if parallel.is_rank_zero and sharing != planned and (has_gpu or sharing.min_saving_ratio != planned.min_saving_ratio):
        logger.warning("Shared prompts are %s.", sharing)
    return sharing


def decide_sharing(cfg: Config, shape: ModelShape, parallel: ParallelState) -> PrefixSharing:
    """Decide whether to share prompts for a model on this machine, which is assumed to meet all requirements."""
    has_gpu = parallel.device.type == "cuda"
    obstacle = gpu_kernel(getattr(torch, cfg.model.torch_dtype), attention_channels(shape)).lacks if has_gpu else None
    return decide(cfg, shape, has_gpu=has_gpu, gpu_lacks=obstacle)


def choose_tuner(
    cfg: Config, chunks: Sequence[Any], exchange: MegatronToHF, adapter_sync: AdapterUpdateRequest | None = None
) -> Adapters | None:
    """Set which parameters train: weights of `chunks`, or LoRA adapters that are added to them.

    Args:
        adapter_sync: How adapters reach the sampler; default "adapter".

    Returns:
        The adapters; None if weights train.
    """
    tuner, shape = cfg.tuner, exchange.map.shape
    settings = make_lora_settings(tuner, shape)
    if settings is None:
        select_trainable(chunks, exchange, tuner)
        return None
    from megatron_grpo.core.policy.lora import Adapters
    from megatron_grpo.core.weights.adapters import initial_adapter
    from megatron_grpo.run.adapters import from_file

    sizes = own_sizes(settings, shape)
    reader = from_file(tuner.adapters, settings, shape) if tuner.adapters else initial_adapter(sizes, cfg.run.seed)
    adapters = Adapters(chunks, exchange, settings, reader, base_model=cfg.model.model, adapter_sync=adapter_sync or "adapter")
    start = tuner.ref_adapters or tuner.adapters
    if cfg.grpo.beta and start and not cfg.grpo.ref_model:
        flag = "ref_adapters" if tuner.ref_adapters else "adapters"
        saved = LoraSettings.from_peft(start, flag=flag)
        adapters.keep_reference(saved, from_file(start, saved, shape, flag=flag))
    return adapters


def prepare_model(
    cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path
) -> tuple[MegatronToHF, Callable[..., list[PolicyModel]]]:
    """Return the weight exporter of a model in this layout, and a function that builds its chunks.

    The function loads the checkpoint's weights, or those of another checkpoint of the same shape if a path is given. What the settings
    require of the machine must have been checked before (`sharing_on_this_machine`).

    Raises:
        ConfigError: If the checkpoint does not contain this model.
    """
    use_te = uses_transformer_engine(cfg.model.transformer_impl) and needs_local_layers(shape) is None
    plain_linears = cfg.tuner.tuner_type == "lora"  # an adapter needs the input of its linear layer
    naming = "transformer_engine" if use_te and not plain_linears else "local"
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=padded_vocab_size(shape, cfg), naming=naming)
    bucket_bytes = (cfg.rollout.weight_sync_bucket_mb or 0) * MIB or None
    exchange = MegatronToHF(weight_map, parallel, bucket_bytes=bucket_bytes, gather=cfg.rollout.vllm_mode == "server")

    def open_reader(directory: str | Path) -> HfReader:
        reader = HfReader(directory)
        weight_map.check_complete(reader.names)
        check_tied_head(reader)
        return reader

    model_reader = open_reader(model_path)

    def loaded_chunks(other_path: Path | None = None) -> list[PolicyModel]:
        reader, tower = open_reader(other_path) if other_path is not None else model_reader, None
        if parallel.is_first_stage and shape.vision:  # its weights are not set yet
            from megatron_grpo.core.policy.vision import build_tower

            dtype, checkpointing = getattr(torch, cfg.model.torch_dtype), cfg.model.vit_gradient_checkpointing
            tower = build_tower(shape, other_path or model_path, dtype=dtype, device=parallel.device, checkpointing=checkpointing)
        chunks = build_chunks(shape, cfg, parallel, use_te=use_te, plain_linears=plain_linears, tower=tower)
        exchange.load(chunks, reader)
        return chunks

    return exchange, loaded_chunks


def build_loaded(
    cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path, checkpoint: Path | None, micro_batch_size: int = 1
) -> FrozenPolicy:
    """Build a frozen model that is scored with or synced to a sampler. Collective.

    Args:
        checkpoint: Training checkpoint of any layout whose weights replace those of `model_path`.
    """
    sharing_on_this_machine(cfg, shape, parallel)
    exchange, loaded_chunks = prepare_model(cfg, shape, parallel, model_path=model_path)
    chunks = loaded_chunks()
    adapters = choose_tuner(cfg, chunks, exchange)
    if checkpoint is not None:
        from megatron_grpo.run.open_checkpoint import load_weights

        load_weights(chunks, checkpoint)
    cut = batch_partitioner(parallel, frozen(chunks)[0].config, micro_batch_size=micro_batch_size, max_tokens=None)
    from megatron_grpo.core.policy.reference import FrozenPolicy

    return FrozenPolicy(chunks, ModelScorer(chunks, parallel, cut), exchange, adapters)


def frozen(chunks: list[PolicyModel]) -> list[PolicyModel]:
    """Put the chunks into eval mode without gradients, and return them."""
    return [chunk.eval().requires_grad_(False) for chunk in chunks]


def build_policy(
    cfg: Config,
    parallel: ParallelState,
    *,
    model_path: str | Path,
    num_steps: int,
    timers: Timers | None = None,
    parts: PolicyParts | None = None,
    adapter_sync: AdapterUpdateRequest | None = None,
    offload: Collection[Role] = (),
    ref_model_path: Path | None = None,
) -> Policy:
    """Build the policy with its initial weights, ready to train, and its reference if `beta` is above 0. Collective.

    Args:
        adapter_sync: How adapters reach the sampler; None if weights train, or if the policy is not sampled from.
        ref_model_path: Checkpoint of the reference, if it is not the model that the run begins with.
    """
    shape, parts = ModelShape.from_pretrained(model_path), parts or PolicyParts()
    sharing = sharing_on_this_machine(cfg, shape, parallel)
    loss = GrpoLoss.from_config(
        cfg.grpo,
        max_completion_length=cfg.rollout.max_completion_length,
        temperature=cfg.rollout.temperature,
        zero_gradient=zero_gradient_kinds(list_settings(cfg)),
    )
    exchange, loaded_chunks = prepare_model(cfg, shape, parallel, model_path=model_path)
    chunks = loaded_chunks()
    adapters = choose_tuner(cfg, chunks, exchange, adapter_sync)
    if cfg.run.mcore_model:
        from megatron_grpo.run.open_checkpoint import begin_with

        begin_with(chunks, cfg.run.mcore_model)
    moves = trains_tower(cfg.tuner, shape)
    model = TrainableModel.from_chunks(chunks, cfg.optimizer, num_steps=num_steps, adapters=adapters, trains_tower=moves)
    keep_outputs([] if moves else chunks)
    cut = batch_partitioner(
        parallel,
        model.chunks[0].config,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        min_saving_ratio=sharing.min_saving_ratio,
        rank_multiple=rank_multiple(cfg),
    )
    held_to = None
    if cfg.grpo.beta:
        if adapters is not None and ref_model_path is None:  # the same model without adapters, or with its initial ones
            initial = ModelScorer(model.wrapped, parallel, cut, context=adapters.reference)
        else:
            copies = loaded_chunks(ref_model_path)
            if cfg.run.mcore_model and ref_model_path is None:
                _copy_weights(copies, source_chunks=model.chunks)
            initial = ModelScorer(frozen(copies), parallel, cut)
            keep_outputs([] if moves else initial.model)
        held_to = (parts.reference or REFERENCES[cfg.grpo.sync_ref_model])(cfg.grpo, initial, partial(exchange.tensors, initial.model))
    return Policy(
        model,
        ModelScorer(model.wrapped, parallel, cut, replay=cfg.grpo.router_replay_mode),
        loss=loss,
        reference=held_to,
        gradient_check=parts.gradient_check
        or GradNormSpikeCheck(max_norm=cfg.optimizer.skip_grad_norm_above, factor=cfg.optimizer.skip_grad_norm_factor),
        exchange=exchange,
        timers=timers,
        offload=offload,
    )


def _copy_weights(chunks: Sequence[Any], source_chunks: Sequence[Any]) -> None:
    """Copy the parameters and buffers of one model into another of the same shape on the same ranks."""
    with torch.no_grad():
        for target, source in zip(chunks, source_chunks, strict=True):
            for kind in ("named_parameters", "named_buffers"):
                source_tensors = dict(getattr(source, kind)())
                for name, tensor in getattr(target, kind)():
                    tensor.copy_(source_tensors[name])
