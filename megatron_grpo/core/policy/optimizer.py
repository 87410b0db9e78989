"""Choice of the parameters that train, and Megatron-Core's DDP, distributed optimizer and learning-rate schedule.

They are set up so that gradients are plain sums.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.adamw import AdamW
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.policy.model import let_gradients_in
from megatron_grpo.core.policy.requirements import make_lr_schedule
from megatron_grpo.core.policy.sharded_state import chain, is_distributed, rounding, share_rounded
from megatron_grpo.core.settings import OptimizerConfig, TunerConfig
from megatron_grpo.core.weights.trainable_parameters import parameter_trains, trains

if TYPE_CHECKING:
    from megatron_grpo.core.policy.lora import Adapters


def select_trainable(chunks: Sequence[GPTModel], exchange: MegatronToHF, cfg: TunerConfig) -> None:
    """Freeze the parameters that the settings freeze.

    Args:
        chunks: Model chunks of this stage, not yet wrapped in DDP.
    """
    rule = trains(cfg)
    for name, tensor in exchange.tensors(chunks).items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(parameter_trains(exchange.map.hf_names(name), rule))
    let_gradients_in(chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainableModel:
    """This stage's model chunks with Megatron-Core's DDP, optimizer and scheduler.

    Args:
        adapters: Adapters of the model; if set, they train and the weights of the chunks are frozen.
        trains_tower: Whether any parameter of the vision tower trains, on the ranks that have it.
    """

    chunks: Sequence[MegatronModule]
    wrapped: Sequence[DistributedDataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    sums: SumOverRanks
    adapters: Adapters | None = None
    trains_tower: bool = False

    @classmethod
    def from_chunks(
        cls, chunks: Sequence[MegatronModule], cfg: OptimizerConfig, *, num_steps: int, adapters: Adapters | None = None,
        trains_tower: bool = False,
    ) -> TrainableModel:  # fmt: skip
        """Wrap chunks for training: every parameter that requires a gradient trains.

        Args:
            adapters: The LoRA adapters in the chunks, if there are any.
            trains_tower: Whether the vision tower trains.
        """
        wrapped, sums = wrap_for_training(chunks, cfg)
        optimizer = build_optimizer(wrapped, cfg)
        scheduler = build_scheduler(optimizer, cfg, num_steps=num_steps)
        return cls(chunks=chunks, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, sums=sums, adapters=adapters,
                   trains_tower=trains_tower)  # fmt: skip


def wrap_for_training(chunks: Sequence[MegatronModule], cfg: OptimizerConfig) -> tuple[list[DistributedDataParallel], SumOverRanks]:
    """Wrap chunks in DDP, with gradient buffers in `main_grads_dtype`.

    Returns:
        The wrapped chunks, and the function that sums their gradients (it does not average them) over data-parallel and context-parallel
        ranks.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.main_grads_dtype == "fp32",  # else gradients have the dtype of the weights
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
    """Sum of gradients over ranks at the end of a pass, as in Megatron-Core, which also stores the norm of this rank's own gradient.

    Token weights already contain every denominator, so the token count of the schedule must not divide the gradients again.

    Attributes:
        own: Norm of this rank's gradient buffers, a tensor without dimensions. With `overlap_grad_reduce` it is measured after the
            reduction and includes the shares of other ranks.
    """

    def __init__(self) -> None:
        self.own = torch.zeros(())

    def __call__(self, model: Sequence[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        # An overlapped reduction is already running: `own` is measured after it and includes the shares of other ranks.
        is_overlapped = model[0].ddp_config.overlap_grad_reduce
        if not is_overlapped:
            self.own = own_norm(model)
        finalize_model_grads(model, None, **kwargs)
        if is_overlapped:
            self.own = own_norm(model)


@torch.no_grad()
def own_norm(wrapped: Sequence[Any], *, with_experts: bool = True) -> torch.Tensor:
    """Return the norm of this rank's gradient buffers, a tensor without dimensions; not finite if any element is not.

    Parameters that several ranks hold as copies count on each of them.

    Args:
        with_experts: Include the parameters that expert parallelism distributes, to whose gradients tokens of other ranks contribute.
    """
    kinds = [kind for chunk in wrapped for kind in (chunk.buffers, chunk.expert_parallel_buffers if with_experts else ())]
    buffers = [buffer.grad_data for kind in kinds for buffer in kind]
    norms = [_norm(buffer) for buffer in buffers]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def build_optimizer(wrapped: Sequence[DistributedDataParallel], cfg: OptimizerConfig):
    """Build AdamW with decoupled weight decay (none on biases and norms) and clipping by the global norm."""
    config = wrapped[0].config
    optimizer_config = MegatronOptimizerConfig(
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
        # Otherwise a second copy of the float32 weights stays on the GPU, and a checkpoint lacks the host's copy, from which the next step
        # starts. Set after construction: there Megatron-Core 0.16 asks for the version of Transformer Engine, which may not be installed.
        optimizer_config.use_precision_aware_optimizer = optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        optimizer_config.store_param_remainders = False
    is_precision_aware = cfg.use_precision_aware_optimizer and not cfg.optimizer_cpu_offload
    if is_precision_aware:
        # The main weights belong to the inner optimizer, which `_keep_in_dtypes` replaces. Only this one of the two flags works without
        # Transformer Engine's optimizer.
        optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    # Float32 weights: inner optimizers refuse views that require gradients.
    with torch.set_grad_enabled(not (cfg.optimizer_cpu_offload or is_precision_aware)):
        optimizer = get_megatron_optimizer(optimizer_config, list(wrapped), **_overrides(cfg))
        if cfg.optimizer_cpu_offload:
            gc.collect()  # Megatron-Core has built two hybrid optimizers; the first is in cycles, with its float32 weights on the GPU
        _correct_places(optimizer)
        if is_precision_aware:
            _keep_in_dtypes(optimizer, cfg)
            share_rounded(optimizer, wrapped)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _correct_places(optimizer: Any) -> None:
    """Correct where Megatron-Core finds a parameter's state if a group has float32 weights beside others.

    It puts the float32 ones first, but numbers all of them in the order of the buffers. A checkpoint would store the states of others.
    """
    for part in chain(optimizer) if is_distributed(optimizer) else ():
        for number, group in enumerate(() if part.is_stub_optimizer else part.opt_group_ranges):
            in_order = sorted(group["params"], key=lambda parameter: parameter.dtype is not torch.float32)
            part.model_param_group_index_map.update((parameter, (number, index)) for index, parameter in enumerate(in_order))


def _keep_in_dtypes(optimizer: Any, cfg: OptimizerConfig) -> None:
    """Replace the inner optimizers, which are new, by the AdamW that keeps its state in the dtypes of the settings."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:  # nothing trains on this rank
            continue
        part.optimizer = AdamW(part.optimizer.param_groups, main_params_dtype=cfg.main_params_dtype, exp_avg_dtype=cfg.exp_avg_dtype,
                               exp_avg_sq_dtype=cfg.exp_avg_sq_dtype)  # fmt: skip
        if cfg.main_grads_dtype != "fp32":
            # Without Transformer Engine Megatron-Core rounds the norm of a bfloat16 gradient to bfloat16. So it gets the float32 norm of
            # each gradient in place of the gradient: the norm of these norms is the same. (0.19 has another name for the method.)
            name = "get_grads_for_grad_norm" if hasattr(part, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
            setattr(part, name, partial(_norms, getattr(part, name)))


def _norms(gradients: Callable[..., Sequence[torch.Tensor]], *args: Any) -> list[torch.Tensor]:
    return [_norm(gradient).view(1) for gradient in gradients(*args)]


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def reload_main_params(optimizer: Any, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Set the optimizer's main weights to the current weights of the model. Collective."""
    optimizer.reload_model_params()
    for inner in rounding(optimizer):
        inner.reload()
    share_rounded(optimizer, wrapped)


@torch.no_grad()
def gradient_norm(optimizer: Any, *other_values: float) -> float:
    """Return the norm of the gradient that `optimizer.step` would use, over all ranks and before clipping. Collective.

    Megatron-Core counts a parameter that several ranks hold on one of them, and each rank relies on its own result. Hence `other_values`,
    and one maximum over all ranks.

    `step` prepares the gradient again, to the same values: the check before the step costs one more copy and one more norm.

    Args:
        other_values: Further numbers of this rank that must be finite, such as its loss.

    Returns:
        The same number on every rank; infinite if on any rank the norm or one of `other_values` is not finite.
    """
    norm = math.inf if optimizer.prepare_grads() else float(optimizer.get_grad_norm())
    return collectives.all_reduce_max(norm if all(map(math.isfinite, (norm, *other_values))) else math.inf)


def _overrides(cfg: OptimizerConfig) -> dict:
    """Return the parameter groups' own settings: no weight decay for one-dimensional parameters, learning rates of the vision parts.

    Since 0.16 Megatron-Core no longer exempts one-dimensional parameters from weight decay by itself.
    """
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
    """Build the schedule of learning rate and weight decay: linear warm-up, then decay, counted in optimizer steps."""
    course = make_lr_schedule(cfg, num_steps)
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
        # On resume the step count comes from the checkpoint and the shape from this run's settings: a longer run decays until its own end.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
