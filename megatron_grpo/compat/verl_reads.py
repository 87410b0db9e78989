"""What verl's names are read by, one at a time; `verl_settle` reads several together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.compat import features
from megatron_grpo.compat.vocabulary import Given, text_of, together, where_true, whole
from megatron_grpo.config.foreign import OFF, Foreign, Reader, reads
from megatron_grpo.config.table import TRUE, BadValue


def resumed(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    if text_of(given, "resume_mode", "auto") == "resume_path":
        raise BadValue(f"({' '.join(words)}): {features.RESUMED_ELSEWHERE}")
    return {}


def ranks(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"world_size": whole(given, "nnodes", 1) * whole(given, "n_gpus_per_node", 8)}


def column(ours: str) -> Reader:
    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        return {} if list(words) == [ours] else {"columns": {words[0]: ours}}

    return read


def sleep(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"sleep_level": 2 if words[0].lower() in TRUE else 0}


def offload(native: str) -> Foreign:
    return where_true(f"`{native}` true", **{native: "true"})


def rank(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if list(words) == ["0"] else {"tuner_type": "lora", "lora_rank": list(words)}


def _has_adapter(given: Given) -> bool:
    ranks = [text_of(given, name, "0") for name in ("model.lora.rank", "model.lora_rank")]
    paths = [text_of(given, name, "none").lower() for name in ("model.lora_adapter_path", "model.lora.adapter_path")]
    return any(rank != "0" for rank in ranks) or any(path not in OFF for path in paths)


def of_adapter(native: str) -> Foreign:
    """It does nothing without an adapter, there as here."""
    return reads(lambda words, given: {native: list(words)} if _has_adapter(given) else {}, f"`{native}`, where there is an adapter")


def threshold(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if " ".join(words).lower() in OFF else {"rollout_importance_sampling_threshold": list(words)}


ROUTERS = where_true("`freeze_parameters_regex`", freeze_parameters_regex=r"\.gate\.weight$")
REPLAY = where_true("`router_replay_mode` R3", router_replay_mode="R3")
BYPASS = where_true("`old_logprobs` rollout", old_logprobs="rollout")
TRUSTS = where_true("`trust_remote_code` true, of either name", trust_remote_code="true")
LOSS = together("`loss_type`, `importance_sampling_level`, `delta` and `epsilon_high`, of all names of the loss")
KL = together("`beta`, `kl_estimator` and `kl_in_reward`, of all names of the KL")
PACKED = together("`max_tokens_per_micro_batch`, which is `ppo_max_token_len_per_gpu` times the ranks that share a sequence")
TOO_LONG = together("`truncation_strategy`, of both names")
ENGINE = together("`vllm_engine_kwargs`, or the setting that says it (`vllm_max_model_len`)")
SOFT = together("the reward `soft_overlong` beside `reward_funcs`, with `soft_max_length` and `soft_cache_length`")
