"""Every setting of a run: its name, type, unit, default and one line of help. No torch.

Names are Megatron-SWIFT's if it has one, else TRL's or Megatron-Core's. The groups below are the groups of `--help` and may be used as
sections of a YAML file; the names are unique over all groups, so a flat file works as well. `cli` turns these dataclasses into flags.

A run that resumes from a checkpoint reports which settings have changed since. A `free` setting changes no result and is not reported; a
`fixed` one must not change; one of `between_rollouts` may change only between rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_grpo.config.field import between_rollouts, fixed, free, setting


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str = setting("", "Hugging Face checkpoint: a directory, or a Hub name", aliases=["model_name_or_path", "load"])
    trust_remote_code: bool = setting(False,
        "run code in the model's folder, for its tokenizer and configuration: plan names the files (docs/security.md)")
    torch_dtype: str = fixed("bfloat16", "training dtype", choices=["float32", "bfloat16"], aliases=["dtype"])
    bf16: bool | None = free(None, "another way to say torch_dtype: true is bfloat16, false is float32")
    transformer_impl: str = setting("auto", "layer spec; auto takes Transformer Engine where it is present",
        choices=["auto", "local", "transformer_engine"])
    fp8_format: str | None = setting(None, "linear layers compute in FP8 (Transformer Engine): e4m3, or hybrid with e5m2 for gradients",
        choices=["e4m3", "hybrid"])
    fp8_recipe: str = setting("tensorwise", "how FP8 is scaled: by tensor, by blocks of 128 (Hopper), by 32 numbers (mxfp8, Blackwell)",
        choices=["tensorwise", "blockwise", "mxfp8"],
        refused={"delayed": "its history of maxima would have to be in checkpoints as a pickle, which are not read here"})
    padded_vocab_multiple: int = free(128, "the vocabulary is padded to a multiple of this times TP", unit="rows",
        aliases=["make_vocab_size_divisible_by"], at_least=1)
    recompute_granularity: str | None = free(None, "activation recompute", choices=["full", "selective"])
    recompute_method: str | None = free(None, "which layers full recompute covers", choices=["uniform", "block"])
    recompute_num_layers: int | None = free(None, "layers per recompute unit (uniform) or recomputed per stage (block)", unit="layers",
        at_least=1)
    recompute_modules: list[str] = free(["core_attn"], "what selective recompute covers")
    vit_gradient_checkpointing: bool = free(True, "recompute a vision tower that trains, layer by layer")
    cast_lm_head_to_fp32: bool = setting(False, "bfloat16: the trainer's output layer multiplies in float32; the sampler's does as it does")
    logprob_chunk_size: int = free(1024, "positions whose logits exist at one time", unit="tokens", at_least=1)
    moe_aux_loss_coeff: float = setting(0.0, "load-balancing loss; only 0 is independent of the layout, others are refused")
    moe_z_loss_coeff: float | None = setting(None, "router z-loss, normalised over the global batch", at_least=0)
    megatron_extra_kwargs: dict[str, Any] = setting({},
        "fields of Megatron-Core's TransformerConfig that say how fast and where the same is computed: name=value, or JSON")
    moe_token_dispatcher_type: str = free("alltoall", "how tokens travel to experts", choices=["alltoall", "allgather", "flex"])


@dataclass(frozen=True, kw_only=True)
class TunerConfig:
    """Tuner (what trains)"""

    tuner_type: str = fixed(
        "full",
        "all weights, or low-rank adapters on linear layers",
        choices=["full", "lora"],
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
    lora_rank: int = fixed(8, "rank r of B A", unit="channels", aliases=["lora_r"], at_least=1, at_most=512)
    lora_alpha: float = fixed(32.0, "B A is multiplied by lora_alpha / lora_rank", above=0)
    lora_dropout: float = setting(0.0, "dropout before A; above 0 the policy that trains is another than the one that samples", at_least=0,
        below=1)
    use_rslora: bool = fixed(False, "multiply by lora_alpha / sqrt(lora_rank) instead")
    lora_dtype: str | None = fixed(None, "dtype of adapters (default: torch_dtype; the optimizer keeps float32)",
        choices=["float32", "bfloat16"])
    target_modules: list[str] = fixed(["all-linear"],
        "linear layers with an adapter: ends of Hugging Face names, or Megatron's (linear_qkv, linear_fc1 ...)",
        aliases=["lora_target_modules"])
    target_regex: str | None = fixed(None, "instead: a regular expression on whole Hugging Face names")
    exclude_modules: list[str] = fixed([], "linear layers without an adapter, whatever target_modules says")
    rank_pattern: dict[str, int] = fixed({}, "other ranks, by end of name (a regular expression)", unit="channels", at_least=1, at_most=512)
    alpha_pattern: dict[str, float] = fixed({}, "other alphas, by end of name", above=0)
    adapters: str | None = setting(None, "start from this PEFT adapter (a directory); its ranks, alphas and targets are taken over")
    ref_adapters: str | None = setting(None, "the reference of the KL is the model with this adapter (default: as the run began)")
    vllm_enable_lora: bool | None = setting(None,
        "push the adapter alone (true) or merged weights (false); default: the adapter where vLLM has LoRA for the model")
    merge_lora: bool = free(False, "export_hf writes the merged model besides the adapter; `export` writes it alone")
    freeze_llm: bool = fixed(False, "full, of a model that sees: its text model does not train")
    freeze_vit: bool = fixed(True, "full, of a model that sees: its vision tower does not train, the aligner aside")
    freeze_aligner: bool = fixed(True, "full, of a model that sees: what turns the tower's channels into the text model's does not train")
    freeze_parameters: list[str] = fixed([], "full: prefixes of Hugging Face names that do not train")
    freeze_parameters_regex: str | None = fixed(None, "full: names in which this regular expression is found do not train")
    trainable_parameters: list[str] = fixed([], "full: prefixes of names that train whatever freeze_parameters says")
    trainable_parameters_regex: str | None = fixed(None, "full: names in which this is found train whatever freeze_parameters says")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism"""

    world_size: int | None = setting(None, "ranks; given by the launcher when there is one, else 1", unit="ranks",
        aliases=["num_processes"])
    tensor_model_parallel_size: int = setting(1, "tensor parallel (TP)", unit="ranks")
    pipeline_model_parallel_size: int = setting(1, "pipeline parallel (PP)", unit="ranks")
    virtual_pipeline_model_parallel_size: int | None = setting(None, "model chunks per pipeline stage (VPP)", unit="chunks")
    decoder_first_pipeline_num_layers: int | None = setting(None, "layers of the first stage, when stages are uneven", unit="layers")
    decoder_last_pipeline_num_layers: int | None = setting(None, "layers of the last stage, when stages are uneven", unit="layers")
    account_for_embedding_in_pipeline_split: bool = setting(False, "the embedding counts as a layer where stages are cut even")
    account_for_loss_in_pipeline_split: bool = setting(False, "the head and the loss count as a layer where stages are cut even")
    pipeline_model_parallel_layout: str | None = setting(None,
        "what every stage holds, in Megatron-Core's language: E embedding, t layer, L loss, | next stage, Et*3|(tt|)*2tL")
    microbatch_group_size_per_vp_stage: int | None = setting(None,
        "interleaved schedule: micro-batches that a chunk computes in a row (default: PP)", unit="micro-batches", at_least=1)
    context_parallel_size: int = setting(1, "context parallel (CP)", unit="ranks")
    expert_model_parallel_size: int = setting(1, "expert parallel (EP)", unit="ranks")
    expert_tensor_parallel_size: int = setting(1, "tensor parallel inside an expert (ETP)", unit="ranks")
    sequence_parallel: bool = setting(False, "shard norms and residuals over TP ranks")
    distributed_timeout_minutes: float = free(10.0, "a collective that waits longer ends the run", unit="minutes", above=0)
    rank_heartbeat_timeout: float = free(300.0, "a rank that hangs or is stopped is named after this, and the run ends; 0: never",
        unit="seconds", aliases=["ft_rank_heartbeat_timeout"], at_least=0)


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernels and exchanges (Megatron-Core's, on GPUs)"""

    cp_comm_type: str | None = free(None,
        "how attention exchanges keys under context parallelism, with Transformer Engine (default: its own, p2p)",
        choices=["p2p", "a2a", "allgather", "a2a+p2p"])
    moe_permute_fusion: bool = free(False, "Transformer Engine's fused permutation of tokens to experts")
    moe_shared_expert_overlap: bool = free(False, "compute shared experts while tokens travel to the others")
    moe_enable_deepep: bool = free(False, "tokens travel by DeepEP; with moe_token_dispatcher_type flex")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes (counted in completions)"""

    micro_batch_size: int = free(1, "one forward on one DP rank", unit="completions")
    global_batch_size: int | None = between_rollouts(None, "one optimizer step (default 16, or from gradient_accumulation_steps)",
        unit="completions")
    gradient_accumulation_steps: int | None = free(None, "micro-steps in one optimizer step; instead of global_batch_size",
        unit="micro-steps")
    generation_batch_size: int | None = between_rollouts(None, "one rollout (default global_batch_size x steps_per_generation)",
        unit="completions")
    steps_per_generation: int | None = free(None, "optimizer steps in one rollout (default 1)", unit="optimizer steps")
    num_generations: int = between_rollouts(8, "completions per prompt (group size G)", unit="completions")
    num_iterations: int = between_rollouts(1, "passes over one rollout (mu)", unit="passes")
    allow_unaligned_generation: bool = free(False, "let a rollout straddle optimizer steps")
    old_logprobs: str = between_rollouts("auto", "auto: forward-only passes just where needed; rollout: the sampler's own",
        choices=["auto", "rollout"])
    max_tokens_per_micro_batch: int | None = free(None, "pack whole sequences up to this, instead of micro_batch_size", unit="tokens",
        at_least=1)
    pad_to_multiple_of: int = free(1, "tokens of a micro-batch on one rank are rounded up to a multiple: on GPUs new lengths cost time",
        unit="tokens", at_least=1)
    share_prefix: str = setting("auto", "compute what completions of a prompt have in common once in each micro-batch",
        choices=["auto", "true", "false"], formerly=["share_prompts"])


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    dataset: str = setting("",
        "prompts: .jsonl, .json, .parquet, a directory, or a Hub name; NAME#500 is 500 rows of it; several are mixed")
    further_datasets: list[str] = setting([], "the second and later words of dataset", is_hidden=True)
    interleave_prob: list[float] = setting([], "weights of several data sets, in their order (default: all rows of all)", above=0)
    stopping_strategy: str = setting("first_exhausted", "where a weighted mixture ends", choices=["first_exhausted", "all_exhausted"])
    columns: dict[str, str] = setting({}, "other names for columns: name in the data = name here")
    split_dataset_ratio: float = setting(0.0, "share of the data set that is held out, as the set eval", at_least=0, below=1)
    dataset_split: str = setting("train", "split, where the data set has several")
    max_prompt_length: int | None = setting(None, "longer prompts are refused or dropped (see truncation_strategy)", unit="tokens",
        at_least=1)
    truncation_strategy: str = setting("raise", "what happens to a prompt that is too long", choices=["raise", "delete", "left"])
    system: str | None = setting(None, "system message put before a chat prompt that has none")
    enable_thinking: bool | None = setting(None, "handed to the chat template where it knows it")
    chat_template_kwargs: dict[str, Any] = setting({}, "handed to the chat template: name=value, or JSON")
    dataset_shuffle: bool = fixed(True, "seeded permutation per epoch; false keeps file order")
    dataset_drop_last: bool = fixed(False,
        "an epoch ends with its last whole rollout, and an optimizer step with it; false goes on into the next epoch")
    streaming: bool = fixed(False, "rows are read and checked as the run goes, a block at a time, and not all of them before it")
    shuffle_buffer_size: int = fixed(1000, "with streaming: rows that are read together, and shuffled among each other", at_least=1)
    load_from_cache_file: bool = free(True, "tokenise a data set once a machine, into the user's cache directory")
    data_root: str | None = free(None, "paths of pictures are inside this directory (default: that of the data set)")
    max_pixels: int | None = between_rollouts(None,
        "larger pictures are made smaller (default: the variable MAX_PIXELS, else the model's own)", unit="pixels", at_least=1)
    min_pixels: int | None = between_rollouts(None,
        "smaller pictures are made larger (default: the variable MIN_PIXELS, else the model's own)", unit="pixels", at_least=1)
    limit_images: int | None = free(None, "most pictures of a prompt (default: as many as the data have)", unit="pictures", at_least=1)

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the options of the chat template besides messages and tools."""
        return {**self.chat_template_kwargs, **({} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking})}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout (vLLM)"""

    vllm_mode: str = setting("colocate", "where the sampler lives: inside the training ranks, or on servers (`megatron-grpo serve`)",
        choices=["colocate", "server"])
    vllm_server_host: list[str] = free([], "servers: one or several hosts, or @FILE or @DIRECTORY with addresses that servers wrote")
    vllm_server_port: list[int] = free([8000], "one port for all hosts, one each, or several of one host", at_least=1, at_most=65535)
    vllm_server_base_url: list[str] = free([], "servers as URLs (http://host:8000), instead of host and port")
    vllm_server_timeout: float = free(240.0, "longest wait for servers; where none comes back the run saves what it has and stops",
        unit="seconds", above=0)
    vllm_server_ca: str | None = free(None, "certificates (PEM) that vouch for servers; with it hosts are spoken to by https")
    vllm_server_token_file: str | None = free(None,
        "file with the servers' token, readable by its owner alone (default: the variable MEGATRON_GRPO_TOKEN)")
    max_completion_length: int = setting(256, "longest completion", unit="tokens", at_least=1)
    # vLLM raises values below 0.01 to 0.01 with a log message only; above 2 it rejects the request, after the model has loaded.
    temperature: float = between_rollouts(1.0, "sampling temperature; training log-probs use the same", at_least=0.01, at_most=2)
    top_p: float = setting(1.0, "nucleus sampling; in training of the top_k likeliest words, or of 256", above=0, at_most=1)
    top_k: int = setting(0, "top-k sampling, 0 is off; up to 256 in training, whose softmax runs over what is left", unit="tokens",
        at_least=0)
    min_p: float = setting(0.0, "leaves out words of less than this share of the likeliest one's probability; in training of 256 words",
        at_least=0, at_most=1)
    generation_kwargs: dict[str, Any] = setting({},
        "more of vLLM's SamplingParams, of those that leave the distribution as it is, and structured_outputs: name=value, or JSON")
    vllm_structured_outputs_regex: str | None = setting(None,
        "completions are drawn so that they match this regular expression; in training by the top_k likeliest words, or by 256",
        aliases=["structured_outputs_regex", "vllm_guided_decoding_regex"])
    stop: list[str] = setting([], "strings that end a completion", aliases=["stop_words"])
    stop_token_ids: list[int] = setting([], "token ids that end a completion, besides the model's own end-of-text ids", at_least=0)
    vllm_tensor_parallel_size: int = free(1, "ranks that share one engine", unit="ranks")
    vllm_gpu_memory_utilization: float = free(0.4, "share of GPU memory for the engine (GPU only)", above=0, at_most=1)
    vllm_kv_cache_memory_mb: int = free(256, "KV cache of one engine (CPU only)", unit="MiB", at_least=1)
    vllm_max_model_len: int | None = free(None, "prompt + completion; default: longest prompt + max_completion_length", unit="tokens",
        at_least=1)
    vllm_max_num_seqs: int = free(256, "sequences decoded together", unit="sequences", at_least=1)
    vllm_dtype: str | None = setting(None, "sampling dtype (default: torch_dtype)", choices=["float32", "bfloat16"])
    bitwise_parity: bool = setting(False,
        "the trainer computes with the arithmetic of the sampler, bit for bit (CPU, colocate; docs/proof.md)", formerly=["same_bits"])
    vllm_enforce_eager: bool = free(False, "no CUDA graphs (always eager on CPU)")
    vllm_enable_prefix_caching: bool = free(True, "share the KV cache of equal prefixes; reset at every weight push")
    vllm_engine_kwargs: dict[str, Any] = setting({}, "more of vLLM's EngineArgs: name=value, or JSON")
    sleep_level: int = free(0, "vLLM sleep while training: 0 off, 1 weights to host, 2 weights dropped (GPU only); 1 where adapters train",
        at_least=0, at_most=2)
    offload_model: str = free("auto",
        "weights, gradients and reference wait on the host while vLLM samples; auto: where the run does not fit a GPU otherwise",
        choices=["auto", "true", "false"])
    offload_optimizer: str = free("auto", "the same for the optimizer's float32 weights and moments", choices=["auto", "true", "false"])
    logprob_diff_warn: float | None = free(None,
        "warn when |trainer - sampler| log-prob of a token exceeds this (default 0.001 in float32, 1.0 in bfloat16)", unit="nats",
        formerly=["logp_difference_warn"], above=0)
    weight_sync_bucket_mb: int | None = free(None,
        "weights that a push sends at once; two buckets are in memory (default 512 on a GPU, 16 on a CPU)", unit="MiB", at_least=1)
    async_rollout_depth: int = setting(0, "1 samples the next rollout while this one is trained (vllm_mode server); 0 lets training wait",
        unit="rollouts", at_least=0)
    async_generate: bool | None = free(None, "another way to say async_rollout_depth: true is 1, false is 0")
    verify_weight_push: bool = free(True, "after each push, compare engine and trainer on a probe prompt")
    rollout_func: str | None = setting(None,
        "makes completions with the sampler, for what no environment expresses: path/to/file.py:function (docs/rollout_func.md)")
    rollout_func_timeout: float = free(600.0, "the run ends where it neither asks the sampler nor returns for so long", unit="seconds",
        above=0)


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Turns (environments and tools)"""

    environment: str | None = setting(None, "who answers between turns: path/to/file.py:Class, or package.module:Class (docs/turns.md)")
    tools: list[str] = setting([], "Python functions that the model may call: path/to/file.py:function; with an environment, beside it")
    max_turns: int = setting(8, "turns of the model in one episode", unit="turns", at_least=1)
    turn_history: str = setting("template",
        "where the chat template rewrites earlier turns: template begins a new sequence there, sampled keeps the tokens as they were drawn",
        choices=["template", "sampled"])
    turn_discount: float = setting(1.0, "reward environment: the reward of turn t counts this to the power t", at_least=0, at_most=1)
    environment_timeout: float = setting(60.0, "longest wait for one answer of an environment, or one tool call", unit="seconds", above=0)
    max_environment_concurrency: int = free(64, "calls of environments under way at a time, on one rank", unit="calls", at_least=1)
    max_failed_episodes: float = setting(0.5,
        "the run ends where a larger share of a rollout's episodes failed by their environment's fault", at_least=0, at_most=1)
    tool_call_parser: str = setting("hermes",
        "how calls stand in the model's text: hermes (Qwen2.5, Qwen3), or the name of a parser of vLLM")

    @property
    def plays(self) -> bool:
        """Return whether a completion is an episode."""
        return self.environment is not None or bool(self.tools)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards"""

    reward_funcs: list[str] = setting([], "built-in names, path/to/file.py:function, or package.module:function")
    reward_weights: list[float] = setting([], "one weight per reward function (default 1 each)")
    reward_timeout: float = setting(60.0, "longest wait for one reward function on one batch", unit="seconds", above=0)
    reward_on_error: str = setting("raise", "what a failing reward does: end the run, or count as None", choices=["raise", "none"])
    answer_column: str | None = setting(None, "column with the right answer (default: `answer`, else `solution`)")
    accuracy_exact: bool = setting(False, "accuracy: the whole completion must equal the answer, character by character")
    math_timeout: float = setting(5.0, "math: an answer that takes longer to compare counts as wrong", unit="seconds", above=0)
    format_tags: list[str] = setting(["think", "answer"], "format: tags that must enclose a completion, in this order")
    length_target: int = setting(0, "length: the wanted length; 0 rewards brevity", unit="tokens", at_least=0)
    cosine_min_len_value_wrong: float = setting(-0.5, "cosine: reward of a wrong answer of length 0")
    cosine_max_len_value_wrong: float = setting(0.0, "cosine: reward of a wrong answer of length cosine_max_len")
    cosine_min_len_value_correct: float = setting(1.0, "cosine: reward of a right answer of length 0")
    cosine_max_len_value_correct: float = setting(0.5, "cosine: reward of a right answer of length cosine_max_len")
    cosine_max_len: int | None = setting(None, "cosine: where the curve ends (default max_completion_length)", unit="tokens", at_least=1)
    repetition_n_grams: int = setting(3, "repetition: length of the n-grams", unit="tokens", at_least=1)
    repetition_max_penalty: float = setting(-1.0, "repetition: reward of a completion that only repeats itself", at_most=0)
    code_timeout: float = setting(10.0, "code: wall-clock and CPU time of one program", unit="seconds", at_least=0.1)
    code_memory_mb: int = setting(512, "code: memory of one program", unit="MiB", at_least=64)
    code_num_workers: int = free(2, "code: programs run at one time by one rank", unit="processes", at_least=1)
    code_all_or_nothing: bool = setting(False, "code: 1 for all tests and else 0, instead of the share of tests passed")
    code_without_landlock: bool = free(False, "code: run programs on a kernel without Landlock too, where they can read all your files")
    reward_model: str | None = setting(None, "reward_model: sequence classifier, a directory or Hub name (one copy per rank)")
    reward_model_url: str | None = setting(None, "reward_model: HTTP endpoint instead; vLLM's /classify and /pooling, or plain JSON")
    reward_model_batch_size: int = free(8, "reward_model: sequences per forward, or per request", unit="sequences", at_least=1)
    reward_model_max_length: int = setting(2048, "reward_model: longer texts are cut on the left", unit="tokens", at_least=1)
    llm_judge_url: str | None = setting(None, "llm_judge: base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1")
    llm_judge_model: str | None = setting(None, "llm_judge: model name at that endpoint")
    llm_judge_prompt: str | None = setting(None, "llm_judge: file with the instruction; {prompt}, {completion}, {answer} are filled in")
    llm_judge_max_score: float = setting(10.0, "llm_judge: the score that counts as reward 1", above=0)
    llm_judge_max_tokens: int = setting(512, "llm_judge: longest verdict", unit="tokens", at_least=1)
    llm_judge_api_key_env: str = free("OPENAI_API_KEY", "llm_judge: environment variable that holds the key; unset sends none")
    reward_concurrency: int = free(16, "reward_model, llm_judge: requests in flight at one time, per rank", unit="requests", at_least=1)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """GRPO"""

    loss_type: str = setting("grpo", "normalisation and objective",
        choices=["grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "cispo", "sapo", "luspo", "vespo", "fipo", "real"])
    epsilon: float = setting(0.2, "clip range below 1", above=0)
    epsilon_high: float | None = setting(None, "clip range above 1 (default epsilon; cispo: bound on the ratio, default 5.0)", above=0)
    delta: float | None = setting(None, "two-sided clip: bound on the unclipped ratio", aliases=["dual_clip"], above=1)
    importance_sampling_level: str = setting("token", "what the ratio is taken over", choices=["token", "sequence", "sequence_token"])
    sapo_temperature_pos: float = setting(1.0, "SAPO temperature for positive advantages", aliases=["tau_pos"], above=0)
    sapo_temperature_neg: float = setting(1.05, "SAPO temperature for negative advantages", aliases=["tau_neg"], above=0)
    vespo_k_pos: float = setting(2.0, "VESPO, A at least 0: power of the sequence's weight", at_least=0)
    vespo_lambda_pos: float = setting(3.0, "VESPO, A at least 0: exponential decay of large weights", above=0)
    vespo_k_neg: float = setting(3.0, "VESPO, A below 0: power of the sequence's weight", at_least=0)
    vespo_lambda_neg: float = setting(2.0, "VESPO, A below 0: exponential decay of large weights", above=0)
    fipo_decay_rate: float = setting(32.0, "FIPO: distance at which a later token counts half", unit="tokens", above=0)
    fipo_clip_range: float | None = setting(0.2, "FIPO: how far a token's influence may be from 1; 0 or none: anywhere", at_least=0,
        below=1)
    fipo_clip_high_only: bool = setting(True, "FIPO: an influence is never below 1")
    fipo_safety_threshold: float | None = setting(4.0, "FIPO: where A is below 0 and the ratio above this, the influence is 0.8 to 1",
        above=0)
    real_tau: float = setting(0.5, "REAL: temperature of the classifier", unit="nats", above=0)
    beta: float = setting(0.0, "KL coefficient; 0 loads no reference model", at_least=0)
    kl_estimator: str = setting("k3", "per-token KL estimate", choices=["k1", "k2", "k3"])
    ref_model: str | None = setting(None,
        "the reference of the KL is this checkpoint of the same architecture, a directory or Hub name (default: model as it begins)")
    use_bias_correction_kl: bool = setting(True, "multiply the KL by the ratio, differentiably")
    teacher_model: str | None = setting(None,
        "a teacher of any size with the model's vocabulary, held in the training ranks beside the policy: a directory, or a Hub name")
    offload_teacher_model: bool = free(False, "teacher_model is on the host between its scorings, one a rollout")
    teacher_model_server: list[str] = setting([],
        "servers that hold a teacher (http://host:8000), each started with `megatron-grpo serve --frozen true`; several are one teacher's")
    teacher_kl_coef: float = setting(1.0, "each token's advantage gets this times log p_teacher - log p_old, where there is a teacher",
        above=0)
    kl_in_reward: bool = setting(False, "subtract the KL from the reward instead of adding it to the loss")
    entropy_coef: float = setting(0.0, "entropy bonus")
    use_adaptive_entropy: bool = setting(False, "entropy_coef follows the entropy: up after a step at entropy_target or below, else down")
    entropy_coef_min: float = setting(0.0, "adaptive: lower bound of entropy_coef")
    entropy_coef_max: float = setting(1.0, "adaptive: upper bound of entropy_coef")
    entropy_coef_delta: float = setting(0.005, "adaptive: how far it moves in an optimizer step", above=0)
    entropy_target: float = setting(0.2, "adaptive: the bonus is given after a step whose entropy was this or less", unit="nats",
        at_least=0)
    log_entropy: bool = free(False, "compute and log the entropy even where nothing needs it")
    top_entropy_quantile: float = setting(1.0, "train only the tokens in this top share of entropy, over the global batch", above=0,
        at_most=1)
    advantage_estimator: str = setting("grpo", "baseline and scale",
        choices=["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
    scale_rewards: str = setting("group", "which std divides the advantage", choices=["group", "batch", "none", "gdpo"])
    multi_objective_aggregation: str = setting("sum_then_normalize", "TRL's spelling of gdpo: normalize_then_sum",
        choices=["sum_then_normalize", "normalize_then_sum"])
    overlong_filter: bool = setting(False, "truncated completions do not train", aliases=["mask_truncated_completions"])
    exclude_zero_std_groups: bool = setting(False, "groups with equal rewards leave the denominator too", formerly=["exclude_dead_groups"])
    dynamic_sample: bool = setting(False, "replace groups with equal rewards by further prompts")
    max_resample_times: int = setting(3, "rounds of replacement", unit="rounds", at_least=1)
    oversample_ratio: float = setting(1.0, "sample this many times the wanted groups, and keep live ones before dead ones", at_least=1)
    rollout_importance_sampling_mode: str = setting("none", "correction for the engine mismatch",
        choices=["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
    rollout_importance_sampling_threshold: float = setting(2.0, "upper bound of that correction", above=0)
    rollout_importance_sampling_min: float | None = setting(None, "lower bound of that correction (default: none)", at_least=0)
    rollout_is_geometric: bool = setting(False, "sequence level: geometric mean instead of product")
    router_replay_mode: str = between_rollouts("disabled",
        "experts of a stale token: the trainer's own choice; that of the old log-probs' pass (R2); of every token: the sampler's (R3)",
        choices=["disabled", "R2", "R3"])
    off_policy_sequence_mask_delta: float | None = setting(None, "drop bad sequences that drifted further than this", unit="nats",
        aliases=["off_policy_mask_threshold"], at_least=0)
    sync_ref_model: bool = fixed(False, "move the reference towards the policy")
    ref_model_sync_steps: int = setting(512, "how often", unit="optimizer steps", at_least=1)
    ref_model_mixup_alpha: float = setting(0.6, "ref = alpha * policy + (1 - alpha) * ref", above=0, at_most=1)
    soft_max_length: int | None = setting(None, "soft_overlong: hard limit (default max_completion_length)", unit="tokens", at_least=1)
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
    aligner_lr: float | None = setting(None, "peak learning rate of its aligner (default: lr)", at_least=0)
    lr_decay_style: str = setting("constant", "shape after warm-up; WSD stays at lr, and falls in its last lr_wsd_decay_iters",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"], aliases=["lr_scheduler_type"])
    lr_decay_iters: int | None = setting(None, "the decay ends here, at min_lr (default: with the run)", unit="optimizer steps", at_least=1)
    lr_wsd_decay_iters: int | None = setting(None, "WSD: length of its last part", unit="optimizer steps", at_least=1)
    lr_wsd_decay_style: str = setting("exponential", "WSD: shape of its last part",
        choices=["exponential", "linear", "cosine", "minus_sqrt"])
    lr_warmup_iters: int = setting(0, "linear warm-up", unit="optimizer steps", aliases=["warmup_steps"], at_least=0)
    lr_warmup_fraction: float | None = setting(None, "linear warm-up as a share of the run, instead of lr_warmup_iters",
        aliases=["warmup_ratio"], at_least=0, at_most=1)
    lr_warmup_init: float = setting(0.0, "learning rate at which the warm-up begins", at_least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0)
    weight_decay_incr_style: str = setting("constant", "how it rises from start_weight_decay to end_weight_decay over the run",
        choices=["constant", "linear", "cosine"])
    start_weight_decay: float | None = setting(None, "weight decay at the first step, where it rises", at_least=0)
    end_weight_decay: float | None = setting(None, "weight decay at the last step, where it rises", at_least=0)
    adam_beta1: float = setting(0.9, "decay of Adam's running mean of gradients", at_least=0, below=1)
    adam_beta2: float = setting(0.95, "decay of its running mean of squared gradients", at_least=0, below=1)
    adam_eps: float = setting(1e-8, "is added to the root of that mean, by which a step is divided", aliases=["adam_epsilon"], above=0)
    clip_grad: float = setting(1.0, "gradient norm is clipped to this; 0 is off", aliases=["max_grad_norm"], at_least=0)
    skip_grad_norm_above: float | None = setting(None,
        "a step whose gradient norm is above this, before clipping, is skipped; one that is not finite always is",
        aliases=["grad_norm_skip_threshold", "skip_grad_norm_threshold"], above=0)
    skip_grad_norm_factor: float | None = setting(None, "the same above so many times the running median (of 128 norms, once there are 16)",
        above=1)
    max_skipped_steps: int = setting(3, "so many skipped steps in a row end the run (exit code 1)", unit="optimizer steps", at_least=1)
    use_distributed_optimizer: bool = fixed(True, "shard optimizer state over DP ranks")
    overlap_grad_reduce: bool = free(False, "reduce gradients while the backward runs")
    overlap_param_gather: bool = free(False, "gather parameters while the forward runs")
    optimizer_cpu_offload: bool = free(False, "keep optimizer state on the host (GPU only)")
    optimizer_offload_fraction: float = free(1.0, "share of it kept there", at_least=0, at_most=1)
    use_precision_aware_optimizer: bool = setting(False, "gradients and optimizer state are kept in the dtypes below (docs/memory.md)")
    main_grads_dtype: str = setting("fp32", "gradients, and their sums over micro-batches and ranks", choices=["fp32", "bf16"])
    main_params_dtype: str = setting("fp32", "the optimizer's weights; fp16 with a scale", choices=["fp32", "fp16"])
    exp_avg_dtype: str = setting("fp32", "Adam's first moment; fp16 and fp8 with scales", choices=["fp32", "fp16", "bf16", "fp8"])
    exp_avg_sq_dtype: str = setting("fp32", "Adam's second moment; the same", choices=["fp32", "fp16", "bf16", "fp8"])


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run"""

    output_dir: str = free("output", "where everything is written", aliases=["save"])
    max_steps: int | None = setting(None, "length of the run", unit="optimizer steps", aliases=["train_iters"], at_least=1)
    num_train_epochs: float | None = setting(None, "length of the run, instead of max_steps (default 1)", unit="epochs",
        aliases=["max_epochs"], above=0)
    seed: int = fixed(42, "prompts, sampling and everything else", at_least=0, at_most=2**32 - 1)
    save_steps: int = free(0, "checkpoint every so often; 0: only at the end", unit="optimizer steps", aliases=["save_interval"],
        at_least=0)
    save_interval_seconds: float = free(0.0, "checkpoint too when so long has passed since the last one; 0: never", unit="seconds",
        at_least=0)
    save_total_limit: int | None = free(2, "checkpoints kept, with the last good one among them (docs/checkpoints.md)", unit="checkpoints",
        at_least=1)
    metric_for_best_model: str | None = free(None,
        "keep the checkpoint that is best by this: eval, eval/pass@8, reward ... (docs/checkpoints.md)")
    greater_is_better: bool | None = free(None, "more of metric_for_best_model is better (default: unless its name ends in loss)")
    load_best_model_at_end: bool = free(False, "hf/ is the best checkpoint's model, not the last step's")
    async_save: bool = free(False, "write checkpoints while training goes on; costs the host a copy of what a rank writes")
    record_rows: bool = free(False, "keep beside each checkpoint the rows that its first step trains, for compare-losses")
    check_replicas: bool = free(False, "compare what ranks hold twice, bit for bit, before the optimizer acts", formerly=["audit"])
    check_replicas_interval: int = free(50, "how often, besides before the first step", unit="optimizer steps",
        formerly=["audit_steps"], at_least=1)
    check_replicas_action: str = free("stop", "what a difference does: it ends the run, or is said (warn)", choices=["stop", "warn"],
        formerly=["audit_action"])
    debug_dump_steps: int = free(2, "steps kept under debug_dump/, the newest, each with what `replay` needs to take it again; 0: none",
        unit="steps", formerly=["capsules"], at_least=0)
    debug_dump_weights_gb: float = free(20.0, "the weights of one are written up to this size; else it says where they lie", unit="GB",
        formerly=["capsule_weights_gb"], at_least=0)
    resume: str = free("auto", "auto: from the newest checkpoint in output_dir; never; or a checkpoint directory",
        aliases=["resume_from_checkpoint"])
    mcore_model: str | None = setting(None,
        "begin with the weights of this checkpoint of another run (checkpoints/iter_*), under any layout: step 0, a new optimizer")
    finetune: bool | None = free(None,
        "true: resume names weights to begin with, as mcore_model does; false: mcore_model is gone on from, as resume does")
    no_load_optim: bool = free(False, "go on from the checkpoint that resume names without its optimizer state")
    no_load_rng: bool = free(False, "go on from it without its random generators")
    stop_drain_seconds: float = free(10.0,
        "once the run is to stop, how long what is being sampled and judged is waited for before it is given up", unit="seconds",
        at_least=0)
    stop_after_minutes: float | None = free(None, "save and stop so long after the launch, with exit code 3", unit="minutes",
        aliases=["exit_duration_in_mins"], above=0)
    stop_before_end_seconds: float | None = free(None,
        "Slurm: save and stop so long before the job's time is up; 0: never (default: 300, or a tenth of that time)", unit="seconds",
        at_least=0)
    requeue: bool = free(False, "Slurm: put the job back into the queue once it has stopped because its time is up")
    report_to: list[str] = free(["none"], "where metrics go besides metrics.jsonl: tensorboard, wandb, swanlab, mlflow, trackio, all, none")
    run_name: str | None = free(None, "name of the run at these services (default: the folder of output_dir)",
        aliases=["wandb_exp_name", "swanlab_exp_name"])
    project: str | None = free(None, "project there (default: what WANDB_PROJECT and its like say)",
        aliases=["wandb_project", "swanlab_project"])
    logging_steps: int = free(1, "services hear of every so many optimizer steps, of their means; metrics.jsonl has every step",
        unit="optimizer steps", at_least=1)
    log_completions_steps: int = free(1, "write completions/ every so many rollouts; 0: never", unit="rollouts", at_least=0)
    log_completions_nodes: int = free(64, "nodes that write a rollout's completions; more take turns", unit="nodes", at_least=1)
    overwrite_output_dir: bool = free(False, "start afresh in an output_dir that holds another run")
    export_hf: bool = free(True, "write hf/ at the end")
    max_shard_size: str = free("5GB", "largest file of weights that an export writes, such as 500MB or 2GiB")
    push_to_hub: bool = free(False, "upload what was exported to the Hugging Face Hub; HF_TOKEN holds the token")
    hub_model_id: str | None = free(None, "repository there: owner/name, or name (default: the folder of output_dir)")
    hub_private_repo: bool | None = free(None, "whether a repository that is made is private (default: as the owner has it)")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation"""

    eval_dataset: str = setting("", "held-out prompts; answered greedily, unless one of the settings below says otherwise")
    eval_datasets: dict[str, str] = setting({}, "several held-out sets, each under its name: path, or Hub name")
    eval_steps: int = free(0, "how often; 0: only before and after", unit="optimizer steps", at_least=0)
    eval_num_prompts: int | None = setting(None, "use the first so many of each set", unit="prompts", at_least=1)
    num_generations_eval: int | None = setting(None, "completions of each held-out prompt (default 8; 1 where they are greedy)",
        unit="completions", at_least=1)
    eval_temperature: float | None = setting(None, "how they are drawn; 0 is greedy (default: temperature; 0 for eval_dataset alone)",
        at_least=0)
    eval_top_p: float | None = setting(None, "nucleus sampling of them (default: top_p; 1 where they are greedy)", above=0, at_most=1)
    eval_top_k: int | None = setting(None, "top-k sampling of them, 0 is off (default: top_k)", unit="tokens", at_least=0)
    eval_min_p: float | None = setting(None, "min_p of them (default: min_p; 0 where they are greedy)", at_least=0, at_most=1)
    eval_max_completion_length: int | None = setting(None, "longest completion of a held-out prompt (default: max_completion_length)",
        unit="tokens", at_least=1)
    eval_generation_kwargs: dict[str, Any] = setting({},
        "more of vLLM's SamplingParams for them, penalties and structured_outputs too (default: those of training)")
    eval_reward: str | None = setting(None, "the reward function that is the score (default: the weighted sum of all, as they train)")
    eval_pass_threshold: float | None = setting(None,
        "a completion is right, for pass@k, from this score on (default: 1; of a sum, the weights of its rewards)")
    eval_seed: int = setting(0, "of evaluations alone; the same at each of them", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Plan (what `plan` prints)"""

    plan_rollouts: int = free(2, "rollouts the timetable shows", unit="rollouts", at_least=1, at_most=1000)
    num_prompts: int | None = free(None, "size of the data set, when it is not at hand", unit="prompts", at_least=1)
    gpu_memory_gb: float | None = free(None, "memory of one GPU, to hold the estimate against", unit="GB", above=0)
    lengths: str | None = free(None, "file with a prompt and a completion length a line", unit="tokens")
    json: bool = free(False, "print one JSON object instead of tables and a figure")
    png: str | None = free(None, "also draw the timetable into this file (needs the extra `plot`)")
    dialect: str | None = free(None,
        "read names, sizes and defaults as another system means them (docs/configuration.md); swift is swift-megatron",
        choices=["trl", "skyrl", "skyrl-doc", "swift-megatron", "swift", "ms-swift", "verl", "slime", "cs336"])


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve (a rollout server)"""

    host: str = free("127.0.0.1", "where it listens; 0.0.0.0 is all addresses of the machine")
    port: int = free(8000, "where it listens; 0 is any free one", at_least=0, at_most=65535)
    vllm_data_parallel_size: int = free(1, "engines of one server, each of vllm_tensor_parallel_size workers", unit="engines",
        aliases=["data_parallel_size"], at_least=1)
    address_file: str | None = free(None, "file that holds http://host:port while the server takes calls")
    token_file: str | None = free(None,
        "file with the token, for its owner's eyes alone; it is made if there is none (default: the variable MEGATRON_GRPO_TOKEN)")
    ssl_certfile: str | None = free(None, "TLS: the server's certificate, as PEM")
    ssl_keyfile: str | None = free(None, "TLS: its private key (default: in ssl_certfile)")
    frozen: bool = free(False,
        "nobody may claim it or push to it: it keeps the model's weights, and scores tokens for runs whose teacher_model_server it is")
    metrics: bool = free(True, "answer GET /metrics, and let vLLM count what it does")
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A batch size as it was typed under another system's names.

    Args:
        name: The name to change.
        count: Its value in `unit`; None if it is left open.
        unit: "completions", or the unit of the size itself; "prompts" (times num_generations); or "micro-steps".
        text: Everything that determines the size, in that system's names.
    """

    name: str
    count: int | None
    unit: str = "completions"
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, in groups. Immutable: use `with_values` for other values."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tuner: TunerConfig = field(default_factory=TunerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    # Source of each value ("default", "run.yaml", "command line", "launcher", "derived from ..."), by setting name.
    sources: Mapping[str, str] = field(default_factory=dict)
    # Name that the user typed for a setting, possibly an alias: error messages use it.
    typed: Mapping[str, str] = field(default_factory=dict)
    # Batch sizes as typed under another system's names.
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def groups(self) -> dict[str, Any]:
        """Return the groups by section name, in the order of --help."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sources", "typed", "origins")}

    def with_values(self, values: Mapping[str, Any], *, sources: Mapping[str, str] | None = None) -> Config:
        """Return a configuration with other values of some settings, whichever group they belong to.

        Args:
            values: New values, by name of the setting.
            sources: Where those values come from, by name.

        Raises:
            KeyError: If a name is not a setting.
        """
        left, changed = dict(values), {}
        for group, section in self.groups().items():
            own = {name: left.pop(name) for name in vars(section) if name in left}
            if own:
                changed[group] = replace(section, **own)
        if left:
            raise KeyError(f"no setting is called {', '.join(left)}")
        return replace(self, **changed, sources={**self.sources, **(sources or {})})
