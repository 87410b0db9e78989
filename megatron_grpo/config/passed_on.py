"""Words for vLLM, for Megatron-Core and for chat templates that pass through here: which may, and why others may not. No torch.

Names are held against the packages as they are installed, by reading their source: importing them would take seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.config.rules import Rule
from megatron_grpo.config.sampling_mask import FIELD
from megatron_grpo.config.table import close_to

# ---- vLLM's SamplingParams: generation_kwargs, eval_generation_kwargs

_ENDS_AND_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "ignore_eos")
# Tokens are then drawn from another distribution than the softmax of the logits, which is what the trainer's log-probs are of.
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
RESHAPES = (*_PENALTIES, *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words"))
_SAMPLING_SETTINGS = {
    "n": "num_generations", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "max_tokens": "max_completion_length", "stop": "stop", "stop_token_ids": "stop_token_ids", "seed": "seed",
}  # fmt: skip
_EVAL_SETTINGS = {
    "n": "num_generations_eval", "temperature": "eval_temperature", "top_p": "eval_top_p", "top_k": "eval_top_k",
    "min_p": "eval_min_p",
    "max_tokens": "eval_max_completion_length", "seed": "eval_seed",
}  # fmt: skip

# ---- vLLM's EngineArgs: vllm_engine_kwargs

_ENGINE_SETTINGS = {
    "model": "model", "tokenizer": "model", "dtype": "vllm_dtype", "seed": "seed", "max_model_len": "vllm_max_model_len",
    "tensor_parallel_size": "vllm_tensor_parallel_size", "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization", "kv_cache_memory_bytes": "vllm_kv_cache_memory_mb",
    "max_num_seqs": "vllm_max_num_seqs", "enforce_eager": "vllm_enforce_eager", "enable_prefix_caching": "vllm_enable_prefix_caching",
    "enable_sleep_mode": "sleep_level", "enable_lora": "vllm_enable_lora", "max_lora_rank": "lora_rank", "lora_dtype": "lora_dtype",
    "lora_target_modules": "target_modules", "limit_mm_per_prompt": "limit_images",
    "mm_processor_kwargs": "max_pixels", "enable_return_routed_experts": "router_replay_mode", "trust_remote_code": "trust_remote_code",
    "disable_log_stats": "metrics",
}  # fmt: skip
_OWN_WORKERS = "ranks and workers are arranged here"
_OTHER_WEIGHTS = "the sampler would not compute with the weights that are pushed"
_ENGINE_REASONS = {
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "worker_extension_cls", "pipeline_parallel_size", "nnodes", "node_rank",
                     "master_addr", "master_port", "data_parallel_rank", "data_parallel_backend", "device_ids"), _OWN_WORKERS),
    **dict.fromkeys(("quantization", "quantization_config", "load_format", "hf_overrides", "model_weights", "model_class_overrides",
                     "revision", "hf_config_path", "kv_sharing_fast_prefill"), _OTHER_WEIGHTS),
    **dict.fromkeys(("max_loras", "max_cpu_loras", "fully_sharded_loras", "specialize_active_lora"),
                    "one adapter is pushed, and has its slot"),
    **dict.fromkeys(("logprobs_mode", "max_logprobs"), "log-probs must be those of the distribution that is drawn from"),
    **dict.fromkeys(("override_generation_config", "generation_config", "logits_processors", "watermark_config", "diffusion_config"),
                    "tokens would be drawn from another distribution than the trainer's"),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"),
                    "what is drawn would depend on the engine's batch, so that neither a seed nor a resumed run would draw the same again"),
    **dict.fromkeys(("skip_tokenizer_init", "tokens_only"), "rewards read text"),
    **dict.fromkeys(("hf_token",), "it is a secret, and settings are written to files: the environment variable HF_TOKEN holds it"),
    **dict.fromkeys(("runner", "convert", "pooler_config"), "the model samples"),
    "use_tqdm_on_load": "the run has its own line",
}  # fmt: skip

# ---- Megatron-Core's TransformerConfig: megatron_extra_kwargs

# How fast, in which memory and in which order the same is computed. All other fields are the model's, or change what is computed.
OPEN = (
    *("attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul", "memory_efficient_layer_norm", "fused_single_qkv_rope"),
    *("distribute_saved_activations", "log_max_attention_logit", "moe_router_fusion", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    *("moe_per_layer_logging", "clone_scatter_output_in_embedding", "disable_parameter_transpose_cache", "deterministic_mode"),
    *("tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"),
    *("tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend", "symmetric_ar_type"),
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "batch_p2p_sync", "deallocate_pipeline_outputs"),
    *("overlap_p2p_comm_warmup_flush", "barrier_with_L1_time", "config_logger_dir", "fine_grained_activation_offloading"),
    *("offload_modules", "min_offloaded_tensor_size", "pipeline_model_parallel_comm_backend", "use_te_rng_tracker"),
    *("cpu_offloading_activations", "cpu_offloading_double_buffering"),
)
_MEGATRON_SETTINGS = {
    **{name: name for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "recompute_modules", "moe_z_loss_coeff", "moe_aux_loss_coeff", "moe_token_dispatcher_type",
        "transformer_impl",
    )},
    **{name: name for name in (
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
        "microbatch_group_size_per_vp_stage",
    )},
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "params_dtype": "torch_dtype", "bf16": "torch_dtype", "pipeline_dtype": "torch_dtype", "fp16": "torch_dtype",
}  # fmt: skip
_MEGATRON_REASON = "it belongs to the model, or changes what is computed, and the sampler would not follow"

SAMPLING, ENGINE, MEGATRON = "vLLM's SamplingParams", "vLLM's EngineArgs", "Megatron-Core's TransformerConfig"
_TEMPLATE_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "conversation",
                 "chat_template", "documents", "padding", "truncation", "max_length", "return_tensors")  # fmt: skip


# ---- what does not go together


def _refused(c: SimpleNamespace) -> Iterator[dict[str, Any]]:
    drawn = "it changes the distribution that tokens are drawn from, and the trainer's softmax does not know of it: ratios would be wrong"
    said_before = (
        "it makes a word's probability depend on which words were said before it, and the trainer's softmax is of the logits alone"
    )
    for_evaluation = "For evaluation alone there is eval_generation_kwargs"
    reshaping = {name: f"{said_before if name in _PENALTIES else drawn}. {for_evaluation}" for name in RESHAPES}
    bounded = (*_ENDS_AND_TEXT, FIELD)
    eval_settings, eval_allowed = {**_SAMPLING_SETTINGS, **_EVAL_SETTINGS}, (*bounded, *RESHAPES)
    kernels = {name: name for name in vars(c.cfg.kernels)}
    for flag, fields, what, own, reasons, allowed in (
        ("generation_kwargs", sampling_fields, SAMPLING, _SAMPLING_SETTINGS, reshaping, bounded),
        ("eval_generation_kwargs", sampling_fields, SAMPLING, eval_settings, {}, eval_allowed),
        ("vllm_engine_kwargs", engine_fields, ENGINE, _ENGINE_SETTINGS, _ENGINE_REASONS, None),
        ("megatron_extra_kwargs", megatron_fields, MEGATRON, _MEGATRON_SETTINGS | kernels, {}, OPEN),
    ):
        for name, value in getattr(c, flag).items():  # of none no package is looked for
            if name in own:
                yield {"flags": f"{flag} {own[name]}", "flag": flag, "why": f"{name} is the setting {own[name]} here. Give it there."}
            elif wrong := _wrong(name, value, reasons, fields(), what, allowed):
                yield {"flags": flag, "flag": flag, "why": f"{name} is {wrong}"}


def _wrong(
    name: str, value: Any, reasons: Mapping[str, str], known: Mapping[str, str], what: str, allowed: Collection[str] | None
) -> str | None:
    """known: fields with their annotations; empty where the package is not installed. allowed: None where all that is known and not refused
    may pass."""
    if known and name not in known or name.startswith("_"):
        close = close_to(name, [field for field in known if not field.startswith("_")], limit=1)
        return f"no field of {what}{f'. Did you mean {close[0]}?' if close else '.'}"
    if name in reasons and name not in (allowed or ()):
        return f"refused: {reasons[name]}."
    if allowed is not None and name not in allowed:
        why = _MEGATRON_REASON if what == MEGATRON else "how answers come is arranged here"
        return f"refused: {why}. What may be given: {', '.join(sorted(allowed))}."
    wrong = misfit(known.get(name, ""), value)
    return f"{wrong} in {what}, not {value!r}." if wrong else None


def _thinks_twice(c: SimpleNamespace) -> dict[str, Any] | None:
    thinks = c.enable_thinking
    other = c.chat_template_kwargs.get("enable_thinking", thinks)
    return {"thinks": str(thinks).lower(), "other": other} if thinks is not None and other != thinks else None


PASSED_ON = (
    Rule("{flags}", lambda c: list(_refused(c)), "{flag}: {why}"),
    Rule(
        "chat_template_kwargs",
        lambda c: (taken := [name for name in c.chat_template_kwargs if name in _TEMPLATE_OWN]) and {"taken": ", ".join(taken)},
        "chat_template_kwargs: {taken} is set here for each prompt. Leave it out.",
    ),
    Rule(
        "enable_thinking chat_template_kwargs",
        _thinks_twice,
        "enable_thinking ({thinks}) and chat_template_kwargs enable_thinking={other} differ. Keep one of them.",
    ),
)


# ---- what a package takes


@cache
def fields_of(package: str, file: str, name: str) -> Mapping[str, str]:
    """{field: annotation} of a class, from the source of an installed package; empty where it is not installed."""
    found = find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / file
        if path.is_file():
            source = ast.parse(path.read_text(encoding="utf-8"))
            body = next((node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == name), [])
            lines = [line for line in body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
            return {line.target.id: ast.unparse(line.annotation) for line in lines if isinstance(line.target, ast.Name)}
    return {}


def sampling_fields() -> Mapping[str, str]:
    return fields_of("vllm", "sampling_params.py", "SamplingParams")


def engine_fields() -> Mapping[str, str]:
    return fields_of("vllm", "engine/arg_utils.py", "EngineArgs")


def megatron_fields() -> Mapping[str, str]:
    """Of TransformerConfig, with those that it inherits."""
    own = fields_of("megatron", "core/transformer/transformer_config.py", "TransformerConfig")
    return {**fields_of("megatron", "core/model_parallel_config.py", "ModelParallelConfig"), **own}


_PLAIN: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}


def misfit(annotation: str, value: Any) -> str | None:
    """The annotation, where it is made of plain types and the value is of none of them."""
    inner = annotation.removeprefix("Optional[").removesuffix("]") + " | None" if annotation.startswith("Optional[") else annotation
    kinds = [kind.strip() for kind in inner.split("|")]
    if not annotation or any(kind not in _PLAIN for kind in kinds):
        return None
    fits = any(type(value) in _PLAIN[kind] for kind in kinds)
    return None if fits else annotation
