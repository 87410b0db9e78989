"""Validation of single values, and of settings that do not go together. No torch.

Sizes of batches and layouts are checked in `run/config/rules/sizes.py`, the mathematics in `run/config/rules/grpo.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.base.files import plot_obstacle
from megatron_grpo.core.policy.requirements import DTYPES
from megatron_grpo.run.config.engine_kwargs import PASSED_ON
from megatron_grpo.run.config.evaluation import BEST, EVALUATION, longest_completion, longest_context
from megatron_grpo.run.config.rules import PLUG_INS, Rule, Rules, broken_rules, changed, in_typed_names, make_namespace, typed_fields
from megatron_grpo.run.config.rules.tuner import tuner_rules
from megatron_grpo.run.config.sampling_mask import GRAMMAR
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import parse_byte_size, table
from megatron_grpo.run.config.write import find_secrets

REWARD = "environment"  # the built-in reward that an environment gives
LARGEST_WEIGHT = 1e6  # times the largest reward (rewards.protocol), its square is still finite


def validate(cfg: Config, unreadable: Collection[str] = ()) -> list[Problem]:
    """Return every problem that can be found from the settings alone, except those of sizes and mathematics.

    Args:
        unreadable: Settings whose values could not be read. Problems about them are omitted.
    """
    sampling_rules = (PLUG_INS["a teacher"], PLUG_INS["servers"], *SAMPLING, *PASSED_ON, *GRAMMAR)
    run_rules = (*LENGTHS_AND_REWARDS, *EVALUATION, *DATA_AND_FILES, *BEST, *BEGINNING)
    rules: Rules = (RANGE, SECRET, *TRAINING, *tuner_rules(cfg), *sampling_rules, *run_rules)
    problems = broken_rules(rules, make_namespace(cfg, among=table(), longest=_longest(cfg)))
    return [in_typed_names(cfg, problem) for problem in problems if not set(problem.flags) & set(unreadable)]


# ---- conditions and words of rules


def _out_of_range(c: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """Yield, for each setting in `among` that is out of its range, the requirement and the nearest valid value if there is one."""
    for name in c.among:
        value, allowed = getattr(c, name), table()[name].range
        items = list(value.values()) if isinstance(value, dict) else value
        must, nearest = "", []
        if name == "reward_weights" and any(abs(weight) > LARGEST_WEIGHT for weight in value):
            must = f"at most {LARGEST_WEIGHT:g} each"
        elif isinstance(items, list):
            must = "" if all(isinstance(v, str) or allowed.admits(v) for v in items) else f"{allowed} each"
        elif value is not None and not isinstance(value, (str, bool)) and not allowed.admits(value):
            must, nearest = str(allowed), [type(value)(edge) for edge in allowed.nearest(value)]
        if must:
            use = f" Use {nearest[0]}." if nearest else ""
            yield {**_typed_name(c, name), "value": value, "must": must, "use": use, "near": {name: nearest} if nearest else {}}


def _typed_name(c: SimpleNamespace, name: str) -> dict[str, Any]:
    return {"name": name, "typed": c.cfg.typed.get(name, name)}


def _longest(cfg: Config) -> int:
    """Return the tokens of the longest prompt and completion together."""
    return longest_context(cfg, cfg.data.max_prompt_length or 1)


def _narrow(c: SimpleNamespace, names: Iterable[str] = DTYPES) -> dict[str, Any] | None:
    """Return the message fields of a problem for dtypes that are not float32."""
    narrow_types = {name: getattr(c, name) for name in names if getattr(c, name) != "fp32"}
    settings = " and ".join(f"{name} {value}" for name, value in narrow_types.items())
    return {"told": settings, "other": " ".join(narrow_types), "fp32": dict.fromkeys(narrow_types, ["fp32"])} if narrow_types else None


def _too_short(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem if the engine's `max_model_len` is shorter than prompt and completion."""
    if c.vllm_max_model_len is None or c.vllm_max_model_len >= c.longest:
        return None
    completion = longest_completion(c.cfg)
    prompt = f"max_prompt_length ({c.max_prompt_length})" if c.max_prompt_length else "a prompt (at least 1 token)"
    limit = "eval_max_completion_length" if completion > c.max_completion_length else "max_completion_length"
    return {"completion": completion, "prompt": prompt, "said": limit}


def _uncounted(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem if the length is given in epochs of a streamed data set, whose rows are not counted.

    The fields include how many prompts a step trains, if the settings determine it.
    """
    if not c.streaming or c.max_steps is not None:
        return None
    epochs, rows, group = c.num_train_epochs, c.global_batch_size, c.num_generations
    text = f": each step trains {rows} / {group} = {rows / group:g} prompts, so max_steps 1000 trains {1000 * rows / group:,.0f} prompts" \
        if rows and group else ""  # fmt: skip
    return {"epochs": "an epoch" if epochs is None else f"num_train_epochs ({epochs:g})", "told": text}


def _undrawable(c: SimpleNamespace) -> dict[str, Any] | None:
    if not c.png:
        return None
    if not Path(c.png).parent.is_dir():
        return {"wrong": f"the directory of {c.png} does not exist."}
    obstacle = plot_obstacle(Path(c.png))
    return {"wrong": obstacle} if obstacle else None


def _find_server_flags(c: SimpleNamespace) -> list[dict[str, Any]]:
    """Return the message fields of a problem for server settings on the command line. A file may describe a run and its servers."""
    return [{**s, "typed": c.cfg.typed[s["name"]]} for s in typed_fields(c, *vars(c.cfg.serve)) if s["name"] in c.cfg.typed]


# fmt: off
RANGE = Rule("{name}", lambda c: list(_out_of_range(c)), "{typed} ({value}) must be {must}.{use}", lambda c: c.near)

SECRET = Rule("{name}", lambda c: [{**_typed_name(c, name), "held": secret} for name, secret in find_secrets(c.cfg)],
              "{typed} seems to hold {held}. Settings are written to config.yaml and to tracking services. Put secrets into an environment "
              "variable.")

TRAINING = (
    Rule("moe_aux_loss_coeff", lambda c: c.moe_aux_loss_coeff != 0,
         "moe_aux_loss_coeff ({moe_aux_loss_coeff}) must be 0: the load-balancing loss is computed per micro-batch, so the gradient would "
         "depend on the micro-batch size. Use 0, or moe_z_loss_coeff.", {"moe_aux_loss_coeff": [0.0]}),
    Rule("{name} recompute_granularity", lambda c: c.recompute_granularity != "full" and [
            {**field, "which": c.recompute_granularity or "not given"} for field in changed(c, "recompute_method", "recompute_num_layers")],
         "{name} ({value}) requires recompute_granularity full; recompute_granularity is {which}. Omit {name}, or use "
         "recompute_granularity full."),
    Rule("recompute_granularity", lambda c: c.recompute_granularity == "full"
         and (missing := [name for name in ("recompute_method", "recompute_num_layers") if getattr(c, name) is None])
         and {"missing": " and ".join(missing)},
         "recompute_granularity full requires {missing}, for example recompute_method uniform and recompute_num_layers 1."),
    Rule("overlap_param_gather overlap_grad_reduce use_distributed_optimizer",
         lambda c: c.overlap_param_gather and not (c.use_distributed_optimizer and c.overlap_grad_reduce),
         "overlap_param_gather requires overlap_grad_reduce true and use_distributed_optimizer true.", {"overlap_param_gather": [False]}),
    # the dtypes of gradients and optimizer state
    Rule("{other} use_precision_aware_optimizer", lambda c: not c.use_precision_aware_optimizer and _narrow(c),
         "{told}: only supported with use_precision_aware_optimizer true. Add it, or use fp32.",
         lambda c: {"use_precision_aware_optimizer": [True], **c.fp32}),
    Rule("use_precision_aware_optimizer use_distributed_optimizer",
         lambda c: c.use_precision_aware_optimizer and not c.use_distributed_optimizer,
         "use_precision_aware_optimizer true requires use_distributed_optimizer true in Megatron-Core.",
         {"use_distributed_optimizer": [True], "use_precision_aware_optimizer": [False]}),
    Rule("{other} optimizer_cpu_offload", lambda c: c.use_precision_aware_optimizer and c.optimizer_cpu_offload and _narrow(c),
         "{told}: not supported with optimizer_cpu_offload true: Megatron-Core's optimizer on the host keeps float32. Use fp32, or "
         "optimizer_cpu_offload false.", lambda c: {"optimizer_cpu_offload": [False], **c.fp32}),
    Rule("{other} torch_dtype", lambda c: c.use_precision_aware_optimizer and c.torch_dtype == "float32" and _narrow(c, DTYPES[:2]),
         "{told}: not supported with torch_dtype float32: gradients are float32, and the optimizer updates the weights themselves. Use "
         "fp32, or torch_dtype bfloat16.", lambda c: {"torch_dtype": ["bfloat16"], **c.fp32}),
    # the learning rate and weight decay over a run
    Rule("min_lr lr", lambda c: c.min_lr > c.lr, "min_lr ({min_lr}) must not be above lr ({lr}).",
         lambda c: {"min_lr": [c.lr], "lr": [c.min_lr]}),
    Rule("lr_warmup_init lr", lambda c: c.lr_warmup_init > c.lr,
         "lr_warmup_init ({lr_warmup_init}) must not be above lr ({lr}): the warm-up rises to it.", lambda c: {"lr_warmup_init": [c.lr]}),
    Rule("lr_warmup_iters lr_warmup_fraction", lambda c: c.lr_warmup_iters and c.lr_warmup_fraction is not None,
         "lr_warmup_iters ({lr_warmup_iters}) and lr_warmup_fraction ({lr_warmup_fraction}) both set the length of the warm-up. Use one of "
         "them.", {"lr_warmup_iters": [0], "lr_warmup_fraction": ["none"]}),
    Rule("lr_decay_style lr_wsd_decay_iters", lambda c: c.lr_decay_style == "WSD" and c.lr_wsd_decay_iters is None,
         "lr_decay_style WSD requires lr_wsd_decay_iters, the number of optimizer steps of the decay at the end."),
    Rule("{name} lr_decay_style",
         lambda c: c.lr_decay_style != "WSD" and changed(c, "lr_wsd_decay_iters", "lr_wsd_decay_style"),
         "{name} ({value}) requires lr_decay_style WSD; lr_decay_style is {lr_decay_style}.", {"lr_decay_style": ["WSD"]}),
    Rule("lr_decay_iters lr_decay_style", lambda c: c.lr_decay_style == "constant" and c.lr_decay_iters is not None,
         "lr_decay_iters ({lr_decay_iters}) has no effect with lr_decay_style constant. Omit it."),
    (
        Rule("start_weight_decay end_weight_decay weight_decay_incr_style", lambda c: c.weight_decay_incr_style == "constant"
             and (c.start_weight_decay is not None or c.end_weight_decay is not None),
             "start_weight_decay and end_weight_decay require weight_decay_incr_style linear or cosine. For a constant one use "
             "weight_decay.",
             {"weight_decay_incr_style": ["linear", "cosine"]}),
        Rule("weight_decay_incr_style start_weight_decay end_weight_decay", lambda c: c.weight_decay_incr_style != "constant"
             and (c.start_weight_decay is None or c.end_weight_decay is None),
             "weight_decay_incr_style {weight_decay_incr_style} requires start_weight_decay and end_weight_decay.",
             {"weight_decay_incr_style": ["constant"]}),
        Rule("weight_decay weight_decay_incr_style", lambda c: c.weight_decay_incr_style != "constant" and c.weight_decay,
             "weight_decay ({weight_decay}) has no effect with start_weight_decay and end_weight_decay. Omit it.",
             {"weight_decay": [0.0]}),
        Rule("end_weight_decay start_weight_decay", lambda c: c.weight_decay_incr_style != "constant"
             and c.end_weight_decay < c.start_weight_decay,
             "end_weight_decay ({end_weight_decay}) must not be below start_weight_decay ({start_weight_decay}): Megatron-Core only "
             "increases weight decay.", lambda c: {"end_weight_decay": [c.start_weight_decay]}),
    ),
)

SAMPLING = (
    # asynchronous rollouts
    Rule("async_rollout_depth rollout_importance_sampling_mode old_logprobs", lambda c: c.async_rollout_depth
         and c.old_logprobs != "rollout" and c.rollout_importance_sampling_mode == "none",
         "async_rollout_depth {async_rollout_depth} trains on completions of older weights, and old log-probs are those of the weights "
         "when the rollout arrives; with rollout_importance_sampling_mode none nothing corrects for the difference. Use "
         "rollout_importance_sampling_mode token_truncate, or old_logprobs rollout (ratio to the sampler's log-probs).",
         {"rollout_importance_sampling_mode": ["token_truncate"], "old_logprobs": ["rollout"]}),
    PLUG_INS["partial rollouts"], PLUG_INS["episodes"],
    Rule("reward_funcs environment", lambda c: not c.plays and REWARD in c.reward_funcs,
         "reward_funcs environment requires an environment that returns rewards. Set --environment."),
    PLUG_INS["a rollout function"],
)

LENGTHS_AND_REWARDS = (
    Rule("vllm_max_model_len max_prompt_length {said}", _too_short,
         "vllm_max_model_len ({vllm_max_model_len}) is less than {prompt} + {said} ({completion}) = {longest}. Use vllm_max_model_len "
         "{longest}.", lambda c: {"vllm_max_model_len": [c.longest]}),
    Rule("reward_weights reward_funcs", lambda c: c.reward_weights and len(c.reward_weights) != len(c.reward_funcs)
         and {"weights": len(c.reward_weights), "functions": len(c.reward_funcs)},
         "reward_weights has {weights} values for {functions} reward_funcs. Set one weight per function, or omit it."),
)

DATA_AND_FILES = (
    # mixtures
    (
        Rule("interleave_prob dataset", lambda c: len(c.interleave_prob) == 1 and not c.further_datasets and c.dataset,
             "interleave_prob requires several data sets, and dataset has one. Omit it, or add data sets.",
             {"interleave_prob": []}),
        Rule("interleave_prob dataset", lambda c: c.interleave_prob and len(c.interleave_prob) != 1 + len(c.further_datasets)
             and {"weights": len(c.interleave_prob), "sets": 1 + len(c.further_datasets)},
             "interleave_prob has {weights} weights for {sets} data sets. Set one weight per data set, or omit it."),
    ),
    Rule("stopping_strategy interleave_prob", lambda c: not c.interleave_prob and c.stopping_strategy != "first_exhausted",
         "stopping_strategy ({stopping_strategy}) requires interleave_prob, which is not set.",
         {"stopping_strategy": ["first_exhausted"]}),
    Rule("further_datasets dataset", lambda c: c.further_datasets and not c.dataset,
         "further_datasets requires dataset, which is not set."),
    Rule("{name}", lambda c: [{"name": name} for name in ("columns", "eval_columns")
         if len(set(getattr(c, name).values())) < len(getattr(c, name))], "{name}: two columns cannot have the same new name."),
    # streamed data sets
    Rule("shuffle_buffer_size streaming", lambda c: not c.streaming and typed_fields(c, "shuffle_buffer_size"),
         "shuffle_buffer_size ({value}) has no effect without streaming true. Set it, or omit shuffle_buffer_size.", {"streaming": [True]}),
    Rule("max_steps streaming", _uncounted,
         "streaming reads rows during the run, so the number of optimizer steps in {epochs} is unknown. Set max_steps{told}.",
         {"streaming": [False]}),
    Rule("dataset_drop_last streaming", lambda c: c.streaming and c.dataset_drop_last,
         "streaming cannot detect the end of an epoch in advance, so rollouts continue into the next epoch. Omit dataset_drop_last.",
         {"dataset_drop_last": [False], "streaming": [False]}),
    Rule("max_prompt_length streaming", lambda c: c.streaming and c.max_prompt_length is None,
         "streaming requires max_prompt_length: rows are read during the run, and the sampler is created before, for the longest prompt. "
         "truncation_strategy handles longer prompts.", {"streaming": [False]}),
    Rule("split_dataset_ratio streaming", lambda c: c.streaming and c.split_dataset_ratio,
         "split_dataset_ratio ({split_dataset_ratio:g}) is a share of all rows, whose number is unknown with streaming. Use eval_dataset.",
         {"split_dataset_ratio": [0.0], "streaming": [False]}),
    # files that a run writes
    Rule("max_shard_size", lambda c: parse_byte_size(c.max_shard_size) is None,
         "max_shard_size ({max_shard_size}) is a size above 0, such as 5GB, 500MB or 2GiB."),
    Rule("{name} push_to_hub", lambda c: not c.push_to_hub and changed(c, "hub_model_id", "hub_private_repo"),
         "{name} ({value}) has no effect without push_to_hub true. Set it, or omit {name}.", {"push_to_hub": [True]}),
    Rule("push_to_hub export_hf", lambda c: c.push_to_hub and not c.export_hf,
         "push_to_hub true requires export_hf true, whose export it uploads; export_hf is false. Use export_hf true.",
         {"export_hf": [True], "push_to_hub": [False]}),
    Rule("{name} check_replicas", lambda c: not c.check_replicas and typed_fields(c, "check_replicas_interval", "check_replicas_action"),
         "{name} ({value}) has no effect without check_replicas true. Set it, or omit {name}.", {"check_replicas": [True]}),
    Rule("debug_dump_weights_gb debug_dump_steps", lambda c: c.debug_dump_steps == 0 and typed_fields(c, "debug_dump_weights_gb"),
         "debug_dump_weights_gb ({value:g}) has no effect with debug_dump_steps 0. Use debug_dump_steps 1, or omit it.",
         {"debug_dump_steps": [1]}),
    Rule("lengths", lambda c: c.lengths and not Path(c.lengths).is_file(),
         "lengths: {lengths} is not a file. Expected a file with a prompt and a completion length per line."),
    Rule("png", _undrawable, "png: {wrong}"),
)

BEGINNING = (
    Rule("finetune mcore_model", lambda c: c.finetune and not c.mcore_model,
         "finetune true requires a checkpoint to start from. Set mcore_model, or omit finetune."),
    Rule("mcore_model tuner_type", lambda c: c.mcore_model and c.tuner_type == "lora",
         "mcore_model ({mcore_model}) is not supported with tuner_type lora. Convert the checkpoint with `megatron-grpo export`; pass the "
         "result as model, or as adapters if it is the checkpoint of an adapter."),
    Rule("{name} resume", lambda c: c.resume in ("auto", "never") and [{"name": name, "what": action} for name, action in (
            ("no_load_optim", "its optimizer"), ("no_load_rng", "its random generators")) if getattr(c, name)],
         "{name} true resumes from a checkpoint without {what}, and resume is not a checkpoint. Set resume to its path, or omit {name}.",
         lambda c: {c.name: [False]}),
    Rule("{name}", _find_server_flags, "{typed} is used by `megatron-grpo serve` only and has no effect here. Omit it."),
)
# fmt: on
