"""What trains; Megatron-Core's DDP, distributed optimizer and learning-rate schedule, set up so that gradients are plain sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron_grpo.config.config import OptimizerConfig, TunerConfig
from megatron_grpo.config.optimizer import course_of
from megatron_grpo.parallel import collectives
from megatron_grpo.policy.adamw import AdamW
from megatron_grpo.policy.hf_export import MegatronToHF
from megatron_grpo.policy.lora import Adapters
from megatron_grpo.policy.model import let_gradients_in
from megatron_grpo.policy.sharded_state import rounding, share_rounded
from megatron_grpo.weights.trainable_parameters import parameter_trains, trains


def choose_what_trains(chunks: Sequence[GPTModel], exchange: MegatronToHF, cfg: TunerConfig) -> None:
    """Freezes what the settings freeze. chunks: of this stage, not yet wrapped."""
    rule = trains(cfg)
    for name, tensor in exchange.tensors(chunks).items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(parameter_trains(exchange.map.hf_names(name), rule))
    let_gradients_in(chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainable:
    """This stage's model chunks and what Megatron-Core puts around them."""

    chunks: Sequence[MegatronModule]
    wrapped: Sequence[DistributedDataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    sums: SumOverRanks
    adapters: Adapters | None = None  # they train, and the chunks they stand in do not
    trains_tower: bool = False  # any of what sees pictures, on the ranks that have it

    @classmethod
    def of(
        cls, chunks: Sequence[MegatronModule], cfg: OptimizerConfig, *, num_steps: int, adapters: Adapters | None = None,
        trains_tower: bool = False,
    ) -> Trainable:  # fmt: skip
        """What asks for a gradient trains. num_steps: length of the run, in optimizer steps."""
        wrapped, sums = wrap_for_training(chunks, cfg)
        optimizer = build_optimizer(wrapped, cfg)
        scheduler = build_scheduler(optimizer, cfg, num_steps=num_steps)
        return cls(chunks=chunks, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, sums=sums, adapters=adapters,
                   trains_tower=trains_tower)  # fmt: skip


def wrap_for_training(chunks: Sequence[MegatronModule], cfg: OptimizerConfig) -> tuple[list[DistributedDataParallel], SumOverRanks]:
    """Chunks in DDP, their gradients in buffers of `main_grads_dtype`; and what sums (does not average) these over data and context
    parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.main_grads_dtype == "fp32",  # else they are of the weights' dtype
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        overlap_grad_reduce=cfg.overlap_grad_reduce,
        overlap_param_gather=cfg.overlap_param_gather,
        average_in_collective=False,
    )
    config = chunks[0].config
    # Later chunks of an interleaved stage do not overlap buckets: Megatron drains the first chunk's last.
    wrapped = [DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = sums = SumOverRanks()
    if cfg.overlap_grad_reduce:
        config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        if len(wrapped) > 1:
            config.grad_sync_func = [w.start_grad_sync for w in wrapped]
    if cfg.overlap_param_gather and len(wrapped) > 1:
        config.param_sync_func = [w.start_param_sync for w in wrapped]
    return wrapped, sums


class SumOverRanks:
    """Adds up gradients at the end of a pass, as Megatron-Core does; and remembers the norm of this rank's own, `own`.

    Token weights already carry every denominator, so the schedule's token count must not divide the gradients again.
    """

    def __init__(self) -> None:
        self.own = torch.zeros(())

    def __call__(self, model: Sequence[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        # An overlapped reduction is under way by now: what is looked at behind it has others' shares in it.
        is_overlapped = model[0].ddp_config.overlap_grad_reduce
        if not is_overlapped:
            self.own = own_norm(model)
        finalize_model_grads(model, None, **kwargs)
        if is_overlapped:
            self.own = own_norm(model)


@torch.no_grad()
def own_norm(wrapped: Sequence[Any], *, with_experts: bool = True) -> torch.Tensor:
    """Norm of all that is in this rank's gradient buffers, copies that ranks share included; not finite if any of it is not.

    with_experts: those too that expert parallelism deals out, to which tokens of other ranks contribute.
    """
    kinds = [kind for chunk in wrapped for kind in (chunk.buffers, chunk.expert_parallel_buffers if with_experts else ())]
    buffers = [buffer.grad_data for kind in kinds for buffer in kind]
    norms = [_norm(buffer) for buffer in buffers]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def build_optimizer(wrapped: Sequence[DistributedDataParallel], cfg: OptimizerConfig):
    """AdamW with decoupled weight decay (none on biases and norms), clipping by the global norm."""
    config = wrapped[0].config
    how = MegatronOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.adam_beta1,
        adam_beta2=cfg.adam_beta2,
        adam_eps=cfg.adam_eps,
        clip_grad=cfg.clip_grad,
        bf16=config.params_dtype is torch.bfloat16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        overlap_param_gather=cfg.overlap_param_gather,
        optimizer_cpu_offload=cfg.optimizer_cpu_offload,
        optimizer_offload_fraction=cfg.optimizer_offload_fraction if cfg.optimizer_cpu_offload else 0.0,
    )
    if cfg.optimizer_cpu_offload:
        # Else float32 weights stay on the GPU besides, and the host's, which the next step begins from, are no part of a checkpoint. Set
        # here, for Megatron-Core 0.16 asks Transformer Engine for its version in between, which may not be there.
        how.use_precision_aware_optimizer = how.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        how.store_param_remainders = False
    is_precision_aware = cfg.use_precision_aware_optimizer and not cfg.optimizer_cpu_offload
    if is_precision_aware:
        # Main weights are the inner optimizer's, which is put in below. Of the two flags this one alone leaves Transformer Engine's out.
        how.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    # Float32 weights: inner optimizers refuse views that ask for gradients.
    with torch.set_grad_enabled(not (cfg.optimizer_cpu_offload or is_precision_aware)):
        optimizer = get_megatron_optimizer(how, list(wrapped), **_overrides(cfg))
        if is_precision_aware:
            _keep_in_dtypes(optimizer, cfg)
            share_rounded(optimizer, wrapped)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _keep_in_dtypes(optimizer: Any, cfg: OptimizerConfig) -> None:
    """Its parts, which are new, get the AdamW that keeps its state in the dtypes of the settings."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:  # nothing trains on this rank
            continue
        part.optimizer = AdamW(part.optimizer.param_groups, main_params_dtype=cfg.main_params_dtype, exp_avg_dtype=cfg.exp_avg_dtype,
                               exp_avg_sq_dtype=cfg.exp_avg_sq_dtype)  # fmt: skip
        if cfg.main_grads_dtype != "fp32":
            # Without Transformer Engine Megatron-Core rounds the norm of a bfloat16 gradient to bfloat16. The norm of these is the same.
            # (0.19 has another name for it.)
            name = "get_grads_for_grad_norm" if hasattr(part, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
            setattr(part, name, partial(_norms, getattr(part, name)))


def _norms(gradients: Callable[..., Sequence[torch.Tensor]], *of: Any) -> list[torch.Tensor]:
    return [_norm(gradient).view(1) for gradient in gradients(*of)]


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def reload_main_params(optimizer: Any, wrapped: Sequence[DistributedDataParallel]) -> None:
    """The optimizer goes on from the model's weights as they are. Collective."""
    optimizer.reload_model_params()
    for inner in rounding(optimizer):
        inner.reload()
    share_rounded(optimizer, wrapped)


@torch.no_grad()
def gradient_norm(optimizer: Any, *others: float) -> float:
    """The norm of the gradient that `optimizer.step` would use, over all ranks and before clipping; infinite if on any rank it, or one of
    `others`, is not finite. The very same number on every rank. Collective.

    Megatron-Core counts what ranks share on one of them, and each rank trusts its own result: hence `others`, and one word on it for all.
    `step` prepares the gradient again, to the same values: copying and measuring it twice is what judging it first costs.
    """
    found = math.inf if optimizer.prepare_grads() else float(optimizer.get_grad_norm())
    return collectives.all_reduce_max(found if all(map(math.isfinite, (found, *others))) else math.inf)


def _overrides(cfg: OptimizerConfig) -> dict:
    """What some parameters have of their own. Megatron's rule that one-dimensional ones do not decay has to be asked for since 0.16."""
    try:
        from megatron.core.optimizer import ParamKey, ParamPredicate
    except ImportError:
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
    one_dimensional = ParamKey(name="*.bias", predicate=ParamPredicate(name="one_dimensional", fn=lambda p: p.dim() == 1))
    overrides: dict[Any, Any] = {one_dimensional: {"wd_mult": 0.0}}
    for part, rate in (("vit", cfg.vit_lr), ("aligner", cfg.aligner_lr)):
        if rate is not None:
            overrides[ParamKey(attr=f"is_of_{part}")] = {"max_lr": rate, "min_lr": min(cfg.min_lr, rate)}
    return {"config_overrides": overrides}


def build_scheduler(optimizer, cfg: OptimizerConfig, *, num_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up, then the decay, counted in optimizer steps."""
    course = course_of(cfg, num_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=cfg.lr_warmup_init,
        max_lr=cfg.lr,
        min_lr=min(cfg.min_lr, cfg.lr),
        lr_warmup_steps=course.warmup,
        lr_decay_steps=course.decay,
        lr_decay_style=cfg.lr_decay_style,
        wsd_decay_steps=course.anneal,
        lr_wsd_decay_style=cfg.lr_wsd_decay_style,
        start_wd=course.start_wd,
        end_wd=course.end_wd,
        wd_incr_steps=num_steps,
        wd_incr_style=cfg.weight_decay_incr_style,
        # On resume the step count comes from the checkpoint, the shape from this run's settings: a longer run decays to its own end.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
