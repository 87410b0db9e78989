"""The settings that a step reads: name, type, unit, default and one line of help each. No torch.

`run/config/settings.py` has the other groups: data, rewards, turns, the run itself, evaluation. Names are Megatron-SWIFT's if it has
one, else TRL's or Megatron-Core's.

A run that resumes from a checkpoint reports which settings have changed since. A `free` setting changes no result and is not reported; a
`fixed` one must not change; one of `between_rollouts` may change only between rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_grpo.core.field import between_rollouts, fixed, free, setting

# Rewards are equal if they differ by at most this share of the largest number that was added: .1 + .2 + .3 and .3 + .2 + .1 are.
EQUAL_REWARDS = 1e-8


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str = setting("", "Hugging Face checkpoint: a directory or a Hub name", aliases=["model_name_or_path", "load"])
    trust_remote_code: bool = setting(False,
        "run the code in the model's folder for its tokenizer and configuration; plan lists the files (docs/security.md)")
    torch_dtype: Literal["float32", "bfloat16"] = fixed("bfloat16", "training dtype", aliases=["dtype"])
    bf16: bool | None = free(None, "boolean form of torch_dtype: true is bfloat16, false is float32")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = setting("auto",
        "implementation of the layers; auto: Transformer Engine if it is installed")
    fp8_format: Literal["e4m3", "hybrid"] | None = setting(None,
        "compute linear layers in FP8 (Transformer Engine): e4m3, or hybrid with e5m2 for gradients")
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = setting("tensorwise",
        "FP8 scaling: one scale per tensor, per block of 128 (Hopper), or per 32 values (mxfp8, Blackwell)",
        refused={"delayed": "its history of maxima would have to be in checkpoints as a pickle, which are not read here"})
    padded_vocab_multiple: int = free(128, "pad the vocabulary to a multiple of this times TP", unit="rows",
        aliases=["make_vocab_size_divisible_by"], at_least=1)
    recompute_granularity: Literal["full", "selective"] | None = free(None,
        "recompute activations in the backward pass: whole layers, or the modules of recompute_modules")
    recompute_method: Literal["uniform", "block"] | None = free(None,
        "layers that full recompute covers: uniform groups, or the first layers of each stage (block)")
    recompute_num_layers: int | None = free(None,
        "layers per recomputed group (uniform), or recomputed layers per stage (block)", unit="layers", at_least=1)
    recompute_modules: list[str] = free(["core_attn"], "modules that selective recompute covers")
    vit_gradient_checkpointing: bool = free(True, "recompute the layers of a trained vision tower in the backward pass")
    cast_lm_head_to_fp32: bool = setting(False,
        "compute the trainer's output layer in float32 when torch_dtype is bfloat16; the sampler is not changed")
    logprob_chunk_size: int = free(1024, "positions whose logits are in memory at a time", unit="tokens", at_least=1)
    moe_aux_loss_coeff: float = setting(0.0,
        "coefficient of the load-balancing loss; only 0 is supported, since the loss depends on the parallel layout")
    moe_z_loss_coeff: float | None = setting(None, "coefficient of the router z-loss, normalised over the global batch", at_least=0)
    megatron_extra_kwargs: dict[str, Any] = setting({},
        "further fields of Megatron-Core's TransformerConfig that change only speed or memory: name=value, or JSON")
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = free("alltoall", "communication of tokens between experts")


@dataclass(frozen=True, kw_only=True)
class TunerConfig:
    """Tuner (trained parameters)"""

    tuner_type: Literal["full", "lora"] = fixed(
        "full",
        "train all weights (full), or low-rank adapters on linear layers (lora)",
        aliases=["train_type"],
        refused={
            "lora_llm": "it trains a vision tower beside the adapter, and models are text here",
            "dora": "its scale is the norm of the sum of base and adapter, which no shard knows, and vLLM cannot sample from it",
            "adalora": "its ranks change while it trains, which vLLM cannot follow",
            "longlora": "it changes attention, not the weights alone",
            "llamapro": "it adds layers, and vLLM would need another model",
            **dict.fromkeys(("vera", "boft", "fourierft", "reft", "bone", "adapter", "ia3", "oft"), "vLLM cannot sample from it"),
            "qlora": "weights are not quantised here",
            "none": "all weights train with full",
        },
    )
    lora_rank: int = fixed(8, "rank of the adapters", unit="channels", aliases=["lora_r"], at_least=1, at_most=512)
    lora_alpha: float = fixed(32.0, "scale of the adapters: their output is multiplied by lora_alpha / lora_rank", above=0)
    lora_dropout: float = setting(0.0,
        "dropout on the input of adapters; above 0, the trained policy differs from the sampled one", at_least=0, below=1)
    use_rslora: bool = fixed(False, "scale adapters by lora_alpha / sqrt(lora_rank)")
    lora_dtype: Literal["float32", "bfloat16"] | None = fixed(None, "dtype of adapters (default: torch_dtype; the optimizer keeps float32)")
    target_modules: list[str] = fixed(["all-linear"],
        "linear layers with an adapter: suffixes of Hugging Face names, or Megatron's names (linear_qkv, linear_fc1 ...)",
        aliases=["lora_target_modules"])
    target_regex: str | None = fixed(None, "regular expression that selects whole Hugging Face names, instead of target_modules")
    exclude_modules: list[str] = fixed([], "linear layers without an adapter, even if target_modules selects them")
    rank_pattern: dict[str, int] = fixed({},
        "ranks that differ from lora_rank, by suffix of the name (a regular expression)", unit="channels", at_least=1, at_most=512)
    alpha_pattern: dict[str, float] = fixed({}, "alphas that differ from lora_alpha, by suffix of the name", above=0)
    adapters: str | None = setting(None, "PEFT adapter to start from (a directory); its ranks, alphas and targets are used")
    ref_adapters: str | None = setting(None, "adapter of the reference model of the KL term (default: the model at the start of the run)")
    vllm_enable_lora: bool | None = setting(None,
        "sync the adapter alone (true) or merged weights (false); default: the adapter if vLLM supports LoRA for the model")
    merge_lora: bool = free(False, "export the merged model too; the command export writes it alone")
    freeze_llm: bool = fixed(False, "freeze the text model of a vision-language model (tuner_type full)")
    freeze_vit: bool = fixed(True, "freeze the vision tower, without its aligner (tuner_type full)")
    freeze_aligner: bool = fixed(True, "freeze the aligner between vision tower and text model (tuner_type full)")
    freeze_parameters: list[str] = fixed([], "prefixes of Hugging Face names to freeze (tuner_type full)")
    freeze_parameters_regex: str | None = fixed(None,
        "regular expression; parameters whose name contains a match are frozen (tuner_type full)")
    trainable_parameters: list[str] = fixed([], "prefixes of names to train even if freeze_parameters selects them (tuner_type full)")
    trainable_parameters_regex: str | None = fixed(None,
        "regular expression; parameters whose name contains a match are trained even if frozen above (tuner_type full)")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism"""

    world_size: int | None = setting(None, "number of ranks; the launcher sets it (default: 1)", unit="ranks", aliases=["num_processes"])
    tensor_model_parallel_size: int = setting(1, "tensor parallel size (TP)", unit="ranks")
    pipeline_model_parallel_size: int = setting(1, "pipeline parallel size (PP)", unit="ranks")
    virtual_pipeline_model_parallel_size: int | None = setting(None, "model chunks per pipeline stage (VPP)", unit="chunks")
    decoder_first_pipeline_num_layers: int | None = setting(None, "layers of the first pipeline stage, if stages are uneven", unit="layers")
    decoder_last_pipeline_num_layers: int | None = setting(None, "layers of the last pipeline stage, if stages are uneven", unit="layers")
    account_for_embedding_in_pipeline_split: bool = setting(False, "count the embedding as a layer when layers are divided among stages")
    account_for_loss_in_pipeline_split: bool = setting(False,
        "count the output layer and the loss as a layer when layers are divided among stages")
    pipeline_model_parallel_layout: str | None = setting(None,
        "content of each stage in Megatron-Core's notation, such as Et*3|(tt|)*2tL: E embedding, t layer, L loss, | next stage")
    microbatch_group_size_per_vp_stage: int | None = setting(None,
        "micro-batches that a model chunk computes in a row, with VPP (default: PP)", unit="micro-batches", at_least=1)
    context_parallel_size: int = setting(1, "context parallel size (CP)", unit="ranks")
    expert_model_parallel_size: int = setting(1, "expert parallel size (EP)", unit="ranks")
    expert_tensor_parallel_size: int = setting(1, "tensor parallel size within an expert (ETP)", unit="ranks")
    sequence_parallel: bool = setting(False, "shard norms and residuals over TP ranks")
    distributed_timeout_minutes: float = free(10.0, "timeout of collectives; the run ends if one takes longer", unit="minutes", above=0)
    rank_heartbeat_timeout: float = free(300.0, "time after which a rank that hangs or is stopped is named and the run ends; 0: never",
        unit="seconds", aliases=["ft_rank_heartbeat_timeout"], at_least=0)


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernels and communication (Megatron-Core's, on GPUs)"""

    cp_comm_type: Literal["p2p", "a2a", "allgather", "a2a+p2p"] | None = free(None,
        "communication of attention under context parallelism, with Transformer Engine (default: p2p)")
    moe_permute_fusion: bool = free(False, "use Transformer Engine's fused permutation of tokens to experts")
    moe_shared_expert_overlap: bool = free(False, "compute shared experts while tokens are sent to the other experts")
    moe_enable_deepep: bool = free(False, "send tokens to experts with DeepEP; needs moe_token_dispatcher_type flex")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes (counted in completions)"""

    micro_batch_size: int = free(1, "completions per forward pass of a DP rank", unit="completions")
    global_batch_size: int | None = between_rollouts(None,
        "completions per optimizer step (default: 16, or from gradient_accumulation_steps)", unit="completions")
    gradient_accumulation_steps: int | None = free(None, "micro-steps per optimizer step, instead of global_batch_size", unit="micro-steps")
    generation_batch_size: int | None = between_rollouts(None,
        "completions per rollout (default: global_batch_size x steps_per_generation)", unit="completions")
    steps_per_generation: int | None = free(None, "optimizer steps per rollout (default: 1)", unit="optimizer steps")
    num_generations: int = between_rollouts(8, "completions per prompt (group size G)", unit="completions")
    num_iterations: int = between_rollouts(1, "passes over each rollout (mu)", unit="passes")
    allow_unaligned_generation: bool = free(False, "allow an optimizer step to use completions of two rollouts")
    old_logprobs: Literal["auto", "rollout"] = between_rollouts("auto",
        "source of old log-probs; auto: forward passes of the trainer, only if needed; rollout: the sampler")
    max_tokens_per_micro_batch: int | None = free(None,
        "token budget of a micro-batch: packs whole sequences, instead of micro_batch_size", unit="tokens", at_least=1)
    pad_to_multiple_of: int = free(1,
        "pad the tokens of a micro-batch on a rank to a multiple of this; a GPU spends time on each new length", unit="tokens", at_least=1)
    share_prefix: Literal["auto", "true", "false"] = setting("auto",
        "compute the common prefix of the completions of a prompt once per micro-batch")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout (vLLM)"""

    vllm_mode: Literal["colocate", "server"] = setting("colocate",
        "place of the sampler: inside the training ranks, or on rollout servers (`megatron-grpo serve`)")
    vllm_server_host: list[str] = free([], "hosts of the rollout servers, or @FILE or @DIRECTORY with addresses that servers wrote")
    vllm_server_port: list[int] = free([8000],
        "ports of the rollout servers: one for all hosts, one per host, or several of one host", at_least=1, at_most=65535)
    vllm_server_base_url: list[str] = free([], "URLs of the rollout servers (http://host:8000), instead of host and port")
    vllm_server_timeout: float = free(240.0, "longest wait for servers; if none returns, the run saves and stops", unit="seconds", above=0)
    vllm_server_ca: str | None = free(None, "CA certificates (PEM) of the servers; with them, hosts are contacted over https")
    vllm_server_token_file: str | None = free(None,
        "file with the servers' token, readable by its owner alone (default: the variable MEGATRON_GRPO_TOKEN)")
    max_completion_length: int = setting(256, "limit of the completion length", unit="tokens", at_least=1)
    # vLLM raises values below 0.01 to 0.01 with a log message only; above 2 it rejects the request, after the model has loaded.
    temperature: float = between_rollouts(1.0, "sampling temperature, also of the trainer's log-probs", at_least=0.01, at_most=2)
    top_p: float = setting(1.0, "nucleus sampling; in training it applies to the top_k tokens, or to 256", above=0, at_most=1)
    top_k: int = setting(0, "top-k sampling; 0: off; at most 256 in training, where log-probs are over the remaining tokens", unit="tokens",
        at_least=0)
    min_p: float = setting(0.0, "minimum probability of a token relative to the most likely one; in training it applies to 256 tokens",
        at_least=0, at_most=1)
    generation_kwargs: dict[str, Any] = setting({},
        "further SamplingParams of vLLM that leave the distribution as it is, and structured_outputs: name=value, or JSON")
    vllm_structured_outputs_regex: str | None = setting(None,
        "regular expression that completions must match; in training it applies to the top_k tokens, or to 256",
        aliases=["structured_outputs_regex", "vllm_guided_decoding_regex"])
    stop: list[str] = setting([], "strings that end a completion", aliases=["stop_words"])
    stop_token_ids: list[int] = setting([], "token IDs that end a completion, besides the model's end-of-text IDs", at_least=0)
    vllm_tensor_parallel_size: int = free(1, "tensor parallel size of an engine", unit="ranks")
    vllm_gpu_memory_utilization: float = free(0.4, "share of GPU memory for the engine (GPU only)", above=0, at_most=1)
    vllm_kv_cache_memory_mb: int = free(256, "KV cache of an engine (CPU only)", unit="MiB", at_least=1)
    vllm_max_model_len: int | None = free(None,
        "limit of prompt + completion (default: longest prompt + max_completion_length)", unit="tokens", at_least=1)
    vllm_max_num_seqs: int = free(256, "sequences decoded at a time", unit="sequences", at_least=1)
    vllm_dtype: Literal["float32", "bfloat16"] | None = setting(None, "dtype of the sampler (default: torch_dtype)")
    bitwise_parity: bool = setting(False,
        "the trainer computes with the arithmetic of the sampler, bit for bit (CPU, colocate; docs/proof.md)")
    vllm_enforce_eager: bool = free(False, "disable CUDA graphs (always disabled on a CPU)")
    vllm_enable_prefix_caching: bool = free(True, "share the KV cache of equal prefixes; reset at every weight sync")
    vllm_engine_kwargs: dict[str, Any] = setting({}, "further EngineArgs of vLLM: name=value, or JSON")
    sleep_level: int = free(0,
        "sleep level of vLLM during training: 0 off, 1 weights on the host, 2 weights dropped (GPU only); with adapters 1 is used",
        at_least=0, at_most=2)
    offload_model: Literal["auto", "true", "false"] = free("auto",
        "move weights, gradients and reference to the host while vLLM samples; auto: if the run does not fit on a GPU otherwise")
    offload_optimizer: Literal["auto", "true", "false"] = free("auto",
        "move the optimizer's float32 weights and moments to the host while vLLM samples; auto: as offload_model")
    logprob_diff_warn: float | None = free(None,
        "warn when |trainer - sampler| log-prob of a token exceeds this (default 0.001 in float32, 1.0 in bfloat16)", unit="nats", above=0)
    weight_sync_bucket_mb: int | None = free(None,
        "weights sent at a time; two such buckets are in memory (default: 512 on a GPU, 16 on a CPU)", unit="MiB", at_least=1)
    async_rollout_depth: int = setting(0,
        "sampling steps by which a rollout may begin early; server: 1 samples the next rollout during training; colocate, and server "
        "from 2 on: completions are interrupted at weight syncs and continue with the new weights; 0: sample, then train",
        unit="sampling steps", at_least=0)
    async_generate: bool | None = free(None, "boolean form of async_rollout_depth: true is 1, false is 0")
    verify_weight_sync: bool = free(True, "compare sampler and trainer on a probe prompt after each weight sync")
    verify_versions: int = free(8,
        "interrupted completions that the trainer scores at each sampling step, to verify the weights they name; 0: off",
        unit="completions", at_least=0)
    rollout_func: str | None = setting(None,
        "function that generates completions with the sampler: path/to/file.py:function (docs/rollout_func.md)")
    rollout_func_timeout: float = free(600.0, "time without a request or a result of rollout_func after which the run ends", unit="seconds",
        above=0)

    @property
    def partial_rollouts(self) -> bool:
        """Return whether completions are interrupted at weight syncs and continue with the new weights."""
        return self.async_rollout_depth > (1 if self.vllm_mode == "server" else 0)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """GRPO"""

    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "cispo", "sapo", "luspo", "vespo", "fipo", "real"] = setting(
        "grpo", "objective of the policy, and normalisation of the loss")
    epsilon: float = setting(0.2, "clip range below 1", above=0)
    epsilon_high: float | None = setting(None, "clip range above 1 (default: epsilon; cispo: bound of the ratio, default 5.0)", above=0)
    delta: float | None = setting(None, "upper bound of the unclipped ratio (two-sided clipping)", aliases=["dual_clip"], above=1)
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = setting("token", "level of the importance ratio")
    sapo_temperature_pos: float = setting(1.0, "SAPO temperature for positive advantages", aliases=["tau_pos"], above=0)
    sapo_temperature_neg: float = setting(1.05, "SAPO temperature for negative advantages", aliases=["tau_neg"], above=0)
    vespo_k_pos: float = setting(2.0, "VESPO, advantage at least 0: power of the sequence weight", at_least=0)
    vespo_lambda_pos: float = setting(3.0, "VESPO, advantage at least 0: exponential decay of large weights", above=0)
    vespo_k_neg: float = setting(3.0, "VESPO, advantage below 0: power of the sequence weight", at_least=0)
    vespo_lambda_neg: float = setting(2.0, "VESPO, advantage below 0: exponential decay of large weights", above=0)
    fipo_decay_rate: float = setting(32.0, "FIPO: distance at which a later token counts half", unit="tokens", above=0)
    fipo_clip_range: float | None = setting(0.2, "FIPO: clip range of the influence weight around 1; 0 or none: no clipping", at_least=0,
        below=1)
    fipo_clip_high_only: bool = setting(True, "FIPO: clip influence weights from above alone, so that none is below 1")
    fipo_safety_threshold: float | None = setting(4.0,
        "FIPO: ratio above which, with an advantage below 0, influence weights are clipped to 0.8 to 1", above=0)
    real_tau: float = setting(0.5, "REAL: temperature of the classifier", unit="nats", above=0)
    beta: float = setting(0.0, "KL coefficient; 0: no reference model", at_least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", "estimator of the KL divergence per token")
    ref_model: str | None = setting(None,
        "reference model of the KL term: a directory or Hub name, same architecture (default: the model at the start)")
    use_bias_correction_kl: bool = setting(True, "multiply the KL estimate by the importance ratio, with its gradient")
    teacher_model: str | None = setting(None,
        "teacher with the model's vocabulary, of any size, held in the training ranks: a directory or a Hub name")
    offload_teacher_model: bool = free(False, "keep teacher_model on the host except while it scores a rollout")
    teacher_model_server: list[str] = setting([],
        "servers of a teacher (http://host:8000), started with `megatron-grpo serve --frozen true`; several serve one teacher")
    teacher_kl_coef: float = setting(1.0, "coefficient of the teacher: each token's advantage gets this times log p_teacher - log p_old",
        above=0)
    kl_in_reward: bool = setting(False, "subtract the KL penalty from the reward, instead of adding it to the loss")
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus")
    use_adaptive_entropy: bool = setting(False,
        "adapt entropy_coef: increase it if the entropy is at or below entropy_target, else decrease it")
    entropy_coef_min: float = setting(0.0, "adaptive entropy: lower bound of entropy_coef")
    entropy_coef_max: float = setting(1.0, "adaptive entropy: upper bound of entropy_coef")
    entropy_coef_delta: float = setting(0.005, "adaptive entropy: change of entropy_coef per optimizer step", above=0)
    entropy_target: float = setting(0.2, "adaptive entropy: entropy at or below which the bonus is applied", unit="nats", at_least=0)
    log_entropy: bool = free(False, "compute and log the entropy even if the loss does not need it")
    top_entropy_quantile: float = setting(1.0, "share of tokens to train: those with the highest entropy in the global batch", above=0,
        at_most=1)
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"] = setting("grpo",
        "estimator of advantages: baseline and scale")
    scale_rewards: Literal["group", "batch", "none", "gdpo"] = setting("group", "standard deviation that divides advantages")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting("sum_then_normalize",
        "TRL's setting for gdpo: normalize_then_sum")
    overlong_filter: bool = setting(False, "exclude truncated completions from training", aliases=["mask_truncated_completions"])
    exclude_zero_std_groups: bool = setting(False,
        "exclude groups with equal rewards from the denominator of the loss too")
    compute_zero_advantage_rows: bool = setting(False,
        "compute completions that train nothing too: those with advantage 0 and those without a trained token; the gradient is the same")
    dynamic_sample: bool = setting(False, "replace groups with equal rewards by groups of further prompts")
    max_resample_times: int = setting(3, "limit of replacement rounds", unit="rounds", at_least=1)
    oversample_ratio: float = setting(1.0,
        "groups to sample, relative to those that are trained; groups whose rewards differ are kept first", at_least=1)
    rollout_importance_sampling_mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = setting(
        "none", "importance sampling correction between sampler and trainer")
    rollout_importance_sampling_threshold: float = setting(2.0, "upper bound of the correction", above=0)
    rollout_importance_sampling_min: float | None = setting(None, "lower bound of the correction (default: none)", at_least=0)
    rollout_is_geometric: bool = setting(False, "use the geometric mean of token ratios, instead of their product, at sequence level")
    router_replay_mode: Literal["disabled", "R2", "R3"] = between_rollouts("disabled",
        "experts to replay: those of the pass for old log-probs, for stale tokens (R2), or the sampler's, for all tokens (R3)")
    off_policy_sequence_mask_delta: float | None = setting(None,
        "KL above which sequences with an advantage below 0 are dropped", unit="nats", aliases=["off_policy_mask_threshold"], at_least=0)
    sync_ref_model: bool = fixed(False, "move the reference towards the policy during training")
    ref_model_sync_steps: int = setting(512, "interval of reference updates", unit="optimizer steps", at_least=1)
    ref_model_mixup_alpha: float = setting(0.6,
        "weight of the policy in a reference update: ref = alpha * policy + (1 - alpha) * ref", above=0, at_most=1)
    soft_max_length: int | None = setting(None,
        "soft_overlong: hard limit of the length (default: max_completion_length)", unit="tokens", at_least=1)
    soft_cache_length: int | None = setting(None, "soft_overlong: width of the penalty ramp", unit="tokens", at_least=1)

    @property
    def teacher_flag(self) -> str | None:
        """Return the setting that names the teacher; None without a teacher."""
        return "teacher_model" if self.teacher_model else "teacher_model_server" if self.teacher_model_server else None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer"""

    lr: float = setting(1e-6, "peak learning rate", aliases=["learning_rate"], at_least=0)
    min_lr: float = setting(0.0, "learning rate at the end of the decay", at_least=0)
    vit_lr: float | None = setting(None, "peak learning rate of a vision tower (default: lr)", at_least=0)
    aligner_lr: float | None = setting(None, "peak learning rate of the aligner of a vision tower (default: lr)", at_least=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = setting("constant",
        "shape of the decay after warm-up; WSD keeps lr and decays in the last lr_wsd_decay_iters",
        aliases=["lr_scheduler_type"])
    lr_decay_iters: int | None = setting(None,
        "step at which the decay reaches min_lr (default: end of the run)", unit="optimizer steps", at_least=1)
    lr_wsd_decay_iters: int | None = setting(None, "WSD: length of the decay", unit="optimizer steps", at_least=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting("exponential", "WSD: shape of the decay")
    lr_warmup_iters: int = setting(0, "length of the linear warm-up", unit="optimizer steps", aliases=["warmup_steps"], at_least=0)
    lr_warmup_fraction: float | None = setting(None, "length of the linear warm-up as a share of the run, instead of lr_warmup_iters",
        aliases=["warmup_ratio"], at_least=0, at_most=1)
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", at_least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("constant",
        "shape of the increase from start_weight_decay to end_weight_decay over the run")
    start_weight_decay: float | None = setting(None, "weight decay at the first step, if it increases", at_least=0)
    end_weight_decay: float | None = setting(None, "weight decay at the last step, if it increases", at_least=0)
    adam_beta1: float = setting(0.9, "decay rate of Adam's first moment (mean of gradients)", at_least=0, below=1)
    adam_beta2: float = setting(0.95, "decay rate of Adam's second moment (mean of squared gradients)", at_least=0, below=1)
    adam_eps: float = setting(1e-8, "constant added to the denominator of Adam's update", aliases=["adam_epsilon"], above=0)
    clip_grad: float = setting(1.0, "gradient norm above which gradients are clipped; 0: off", aliases=["max_grad_norm"], at_least=0)
    skip_grad_norm_above: float | None = setting(None,
        "gradient norm, before clipping, above which a step is skipped; steps that are not finite are always skipped",
        aliases=["grad_norm_skip_threshold", "skip_grad_norm_threshold"], above=0)
    skip_grad_norm_factor: float | None = setting(None,
        "skip a step whose gradient norm exceeds this times the running median (of 128 norms, from the 16th on)", above=1)
    max_skipped_steps: int = setting(3, "skipped steps in a row that end the run (exit code 1)", unit="optimizer steps", at_least=1)
    use_distributed_optimizer: bool = fixed(True, "shard optimizer state over DP ranks")
    overlap_grad_reduce: bool = free(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = free(False, "gather parameters during the forward pass")
    optimizer_cpu_offload: bool = free(False, "keep optimizer state on the host (GPU only)")
    optimizer_offload_fraction: float = free(1.0,
        "share of the optimizer state to keep on the host, with optimizer_cpu_offload", at_least=0, at_most=1)
    use_precision_aware_optimizer: bool = setting(False, "keep gradients and optimizer state in the dtypes below (docs/memory.md)")
    main_grads_dtype: Literal["fp32", "bf16"] = setting("fp32", "dtype of gradients and of their sums over micro-batches and ranks")
    main_params_dtype: Literal["fp32", "fp16"] = setting("fp32", "dtype of the optimizer's weights; fp16 is scaled")
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = setting("fp32", "dtype of Adam's first moment; fp16 and fp8 are scaled")
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = setting("fp32",
        "dtype of Adam's second moment; fp16 and fp8 are scaled")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The settings that a step reads, in groups. Immutable. `run.config.settings.Config` adds the groups that only a run reads."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tuner: TunerConfig = field(default_factory=TunerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
