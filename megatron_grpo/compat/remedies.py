"""What to type instead of a name that is no setting. A table of names comes before any likeness, and silence before a harmful guess."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megatron_grpo.base.errors import Problem
from megatron_grpo.compat.foreign import NOTHING, Dialect
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.config.table import close_to, names, table

ALIKE = 0.8  # difflib's ratio above which two names are taken for one with a slip of the finger

# Names of other systems, of launchers and of habit, that mean a setting here. Those of the dialects need no line of their own.
SAME_AS: Mapping[str, str] = {
    **{short: f"{name}_parallel_size" for short, name in (
        ("tp", "tensor_model"), ("pp", "pipeline_model"), ("vpp", "virtual_pipeline_model"), ("cp", "context"), ("ep", "expert_model"),
        ("etp", "expert_tensor"), ("tp_size", "tensor_model"), ("pp_size", "pipeline_model"), ("cp_size", "context"),
        ("ep_size", "expert_model"), ("tensor_parallel_size", "tensor_model"), ("tensor_parallel", "tensor_model"),
        ("pipeline_parallel_size", "pipeline_model"), ("pipeline_parallel", "pipeline_model"), ("expert_parallel_size", "expert_model"),
        ("context_parallel", "context"), ("num_virtual_stages", "virtual_pipeline_model"),
    )},
    "sp": "sequence_parallel", "mbs": "micro_batch_size", "gbs": "global_batch_size", "group_size": "num_generations",
    "per_device_train_batch_size": "micro_batch_size", "micro_train_batch_size_per_gpu": "micro_batch_size",
    "micro_train_batch_size": "micro_batch_size", "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "generation_batch_size", "rollout_batch_size": "generation_batch_size",
    "policy_mini_batch_size": "global_batch_size", "ppo_mini_batch_size": "global_batch_size", "mini_batch_size": "global_batch_size",
    "n_samples_per_prompt": "num_generations", "num_return_sequences": "num_generations", "rollout.n": "num_generations",
    "update_epochs_per_batch": "num_iterations", "ppo_epochs": "num_iterations", "num_ppo_epochs": "num_iterations",
    "epochs_per_rollout_batch": "num_iterations", "grad_accum": "gradient_accumulation_steps", "num_gpus": "world_size",
    "max_new_tokens": "max_completion_length", "max_response_length": "max_completion_length", "response_length": "max_completion_length",
    "max_tokens": "max_completion_length", "max_generate_length": "max_completion_length", "max_length": "max_prompt_length",
    "rollout_max_response_len": "max_completion_length", "rollout_max_prompt_len": "max_prompt_length",
    "prompt_length": "max_prompt_length", "max_model_len": "vllm_max_model_len",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization", "max_num_seqs": "vllm_max_num_seqs", "enforce_eager": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching", "rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size",
    "kl_coef": "beta", "kl_loss_coef": "beta", "kl_coeff": "beta", "kl_beta": "beta", "kl_penalty": "kl_estimator",
    "kl_loss_type": "kl_estimator", "kl_estimator_type": "kl_estimator", "use_kl_in_reward": "kl_in_reward",
    "target_entropy": "entropy_target", "entropy_coeff": "entropy_coef", "entropy_loss_coef": "entropy_coef", "ent_coef": "entropy_coef",
    "clip_ratio": "epsilon", "epsilon_low": "epsilon", "clip_ratio_low": "epsilon", "clip_eps": "epsilon", "cliprange": "epsilon",
    "eps_clip": "epsilon",
    "eps_clip_low": "epsilon", "clip_range": "epsilon", "clip_ratio_high": "epsilon_high", "eps_clip_high": "epsilon_high",
    "clip_ratio_c": "delta", "loss_agg_mode": "loss_type", "loss_reduction": "loss_type", "adv_estimator": "advantage_estimator",
    "norm_adv_by_std_in_grpo": "scale_rewards", "grpo_norm_by_std": "scale_rewards", "rollout.temperature": "temperature",
    "rollout_temperature": "temperature", "rollout_top_p": "top_p", "rollout_top_k": "top_k",
    "tis_imp_ratio_cap": "rollout_importance_sampling_threshold", "use_tis": "rollout_importance_sampling_mode",
    "rollout_is_threshold": "rollout_importance_sampling_threshold", "rollout_is": "rollout_importance_sampling_mode",
    "filter_groups": "dynamic_sample", "apply_overlong_filtering": "overlong_filter",
    "warmup_iters": "lr_warmup_iters", "num_warmup_steps": "lr_warmup_iters", "lr_warmup_steps": "lr_warmup_iters",
    "lr_warmup_steps_ratio": "lr_warmup_fraction", "lr_scheduler": "lr_decay_style", "scheduler": "lr_decay_style",
    "grad_clip": "clip_grad", "gradient_clipping": "clip_grad", "wd": "weight_decay", "optim.lr": "lr",
    "total_epochs": "num_train_epochs", "epochs": "num_train_epochs", "num_epoch": "num_train_epochs", "num_epochs": "num_train_epochs",
    "total_training_steps": "max_steps",
    "num_train_steps": "max_steps", "max_iters": "max_steps", "num_steps": "max_steps", "steps": "max_steps",
    "save_freq": "save_steps", "ckpt_interval": "save_steps", "test_freq": "eval_steps", "eval_interval": "eval_steps",
    "default_local_dir": "output_dir", "save_dir": "output_dir", "checkpoint_dir": "output_dir",
    "logger": "report_to", "trainer.logger": "report_to", "random_seed": "seed",
    "train_files": "dataset", "train_data": "dataset", "data_path": "dataset", "train_dataset": "dataset", "train_file": "dataset",
    "val_files": "eval_dataset", "val_data": "eval_dataset", "val_dataset": "eval_dataset", "dataset_path": "dataset",
    **dict.fromkeys(("drop_last", "dataloader_drop_last"), "dataset_drop_last"),
    "system_prompt": "system", "model_path": "model", "model_name": "model", "pretrained_model_name_or_path": "model", "hf_model": "model",
    "hf_checkpoint": "model", "model.path": "model",
    "teacher": "teacher_model", "teacher_model_path": "teacher_model", "teacher_model_name_or_path": "teacher_model",
    "opd_kl_coef": "teacher_kl_coef",
    "reward_func": "reward_funcs", "reward_function": "reward_funcs", "reward_functions": "reward_funcs",
    "custom_reward_function": "reward_funcs", "reward_plugin": "reward_funcs", "reward_fn": "reward_funcs",
    "optimizer_offload": "offload_optimizer", "param_offload": "offload_model", "grad_offload": "offload_model",
    "resume_mode": "resume", "resume_from": "resume",
    "distributed_timeout": "distributed_timeout_minutes", "precision": "torch_dtype",
}  # fmt: skip

# Of those, the sizes that some systems count in prompts.
COUNTED_IN_PROMPTS = (*("train_batch_size", "rollout_batch_size", "policy_mini_batch_size", "ppo_mini_batch_size", "mini_batch_size"),)

_RECOMPUTE = "recompute_granularity full, recompute_method uniform and recompute_num_layers 1 do it."
_RANKS = "the launcher says how many ranks there are; for plan, world_size is their number on all nodes together."

# Names without a setting of their own, and what does it here.
SAID_WITH: Mapping[str, str] = {
    "use_kl_loss": "a beta above 0 puts the KL into the loss.",
    "use_vllm": "sampling is always by vLLM: leave it out.",
    "use_dynamic_bsz": "max_tokens_per_micro_batch packs sequences up to so many tokens.",
    "ppo_max_token_len_per_gpu": "max_tokens_per_micro_batch packs sequences up to so many tokens.",
    "filter_overlong_prompts": "truncation_strategy delete drops prompts above max_prompt_length.",
    "truncation": "truncation_strategy says what happens to prompts above max_prompt_length.",
    "free_cache_engine": "sleep_level frees the engine's memory while training.",
    "activation_checkpointing": _RECOMPUTE,
    "enable_gradient_checkpointing": _RECOMPUTE,
    "n_gpus_per_node": _RANKS,
    "nproc_per_node": _RANKS,
    "nnodes": _RANKS,
    **{f"beta{n}": f"it is adam_beta{n}." for n in (1, 2)},
    "betas": "they are adam_beta1 and adam_beta2.",
    "use_wandb": "report_to wandb does it.",
    "hub_token": "it is a secret, and settings are written to files: the environment variable HF_TOKEN holds it.",
    "rollout.name": "sampling is always by vLLM: leave it out.",
    "ddp_timeout": "it is distributed_timeout_minutes, in minutes.",
    "timeout": "it is distributed_timeout_minutes for a collective, reward_timeout for a reward.",
    "num_workers": "data is read by the ranks themselves: leave it out.",
    "eval_iters": "eval_num_prompts is the number of held-out prompts that are used.",
    "max_seq_length": "max_prompt_length and max_completion_length bound the two parts of a sequence.",
    "seq_length": "max_prompt_length and max_completion_length bound the two parts of a sequence.",
    "tp_comm_overlap": "Transformer Engine's buffers for it have one number of tokens for all passes of a process, and passes here differ "
    "in theirs, whether they train or score: leave it out. "
    "overlap_grad_reduce and overlap_param_gather overlap what data-parallel ranks exchange.",
    **dict.fromkeys(
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "the trainer's softmax does not know which words were said before, so training draws without it; eval_generation_kwargs takes it "
        "for evaluation.",
    ),
    **dict.fromkeys(
        ("use_opd", "opd_teacher_load", "distill", "use_teacher"),
        "teacher_model names a teacher that the training ranks hold, teacher_model_server a server that holds one.",
    ),
    "num_rollout": "max_steps is the length of the run in optimizer steps; a rollout has steps_per_generation of them.",
    "colocate": "vllm_mode colocate samples inside the training ranks, which is the default.",
    "n": "num_generations is the number of completions of a prompt.",
    "log_prob_micro_batch_size_per_gpu": "forward passes are cut as training is: leave it out.",
    "ppo_micro_batch_size": "micro_batch_size counts the completions of one forward on one DP rank.",
    "use_remove_padding": "sequences are always packed: leave it out.",
    "critic_warmup": "there is no critic: leave it out.",
    "experiment_name": "it changes nothing that is trained: leave it out.",
    "val_before_train": "evaluation runs before and after a run where there is an eval_dataset: leave it out.",
    "dp": "dp_size follows from world_size / (TP x PP x CP): leave it out.",
    "dp_size": "dp_size follows from world_size / (TP x PP x CP): leave it out.",
    "data_parallel_size": "dp_size follows from world_size / (TP x PP x CP): leave it out.",
    "flash_attn": "kernels are chosen by transformer_impl: leave it out.",
    "use_flash_attn": "kernels are chosen by transformer_impl: leave it out.",
}


def remedy(name: str, dialects: Mapping[str, Dialect], *, hidden: Collection[str] = ()) -> str:
    """A sentence, with a space before it, on what to type instead of an unknown name. hidden: settings that go by other names just now."""
    last = name.rpartition(".")[2]
    for key in (name, ".".join(name.split(".")[-2:]), last):
        found = _from_tables(key, dialects, hidden)
        if found:
            return found
    return _alike(name, last, hidden)


def _from_tables(name: str, dialects: Mapping[str, Dialect], hidden: Collection[str]) -> str:
    if name in SAID_WITH:
        sentence = SAID_WITH[name]
        is_setting = sentence.partition(" ")[0] in names()  # which is spelt as it is typed
        return f" {sentence if is_setting else sentence[0].upper() + sentence[1:]}"
    if name in SAME_AS and SAME_AS[name] not in hidden:
        counted = ", and counts completions: prompts times num_generations" if name in COUNTED_IN_PROMPTS else ""
        return f" Here it is called {SAME_AS[name]}{counted}."
    for dialect in dialects.values():
        row = dialect.row(name)[1]
        if row is None:
            continue
        if row.native:
            return f" {dialect.title}'s {name} is called {row.native} here." if row.native != name else ""
        if row.hint:
            return f" {dialect.title}'s {name} is said here with {row.hint.replace('`', '')}."
        if row.lacks:
            return f" It is {dialect.title}'s: {row.lacks}. Leave it out."
        if row.read is None:
            why = f" ({row.why})" if row.why and row.why != NOTHING else ""
            return f" It is {dialect.title}'s and changes nothing that is sampled or trained here{why}. Leave it out."
    return ""


LIST = " `megatron-grpo train --help` lists all settings."


def _alike(name: str, last: str, hidden: Collection[str]) -> str:
    known = [known for known, setting in names().items() if setting.name not in hidden]
    if last != name and last in known:
        section, groups = name.rpartition(".")[0], sorted({setting.group for setting in table().values()})
        if section in groups or hidden:  # of a dialect, whose sections are others
            return f" {last} is a setting: on the command line, say --{last}."
        return f" {last} is a setting, but {section} is not a section; the sections are: {', '.join(groups)}."
    close = close_to(last, [*known, "config", "print_config"], limit=1, cutoff=ALIKE)
    return f" Did you mean {close[0]}?" if close else LIST


def reads_as(unknown: Sequence[str], dialects: Mapping[str, Dialect]) -> tuple[Dialect, list[str]] | None:
    """The dialect that most of these names, three at least, are words of; and which they are."""
    best: tuple[Dialect, list[str]] | None = None
    for dialect in dialects.values():
        known = [name for name in unknown if dialect.knows(name)]
        if best is None or len(known) > len(best[1]):
            best = dialect, known
    return best if best and len(best[1]) >= 3 and 2 * len(best[1]) > len(unknown) else None


def problems_of_unknown(found: Mapping[str, Sequence[str]], dialect: Dialect | None, dialects: Mapping[str, Dialect]) -> Iterator[Problem]:
    """A file full of another system's names is one mistake; any other name is one each, with what to type instead. found: by source."""
    for source, unknown in found.items():
        where = "" if source == COMMAND_LINE else f" in {source}"
        reads = reads_as(unknown, dialects) if dialect is None else None
        if reads:
            other, known = reads
            what = "This command line" if source == COMMAND_LINE else source
            some = ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
            message = f"{what} reads as a {other.title} file ({some}): add `--dialect {other.name}`."
            yield Problem(flags=tuple(known), message=message)
        hints = {name: _hint(name, dialect, dialects) for name in unknown if not reads or name not in reads[1]}
        if dialect and len(alike := [name for name, hint in hints.items() if LIST in hint]) > 1:
            message = f"{', '.join(alike)}{where} are neither settings nor {dialect.title} names that are known here, so they may \
change what is trained."
            yield Problem(flags=tuple(alike), message=message)
            hints = {name: hint for name, hint in hints.items() if name not in alike}
        for name, hint in hints.items():
            yield Problem(flags=(name,), message=f"{name}{where} is not a setting.{hint}")


def _hint(name: str, dialect: Dialect | None, dialects: Mapping[str, Dialect]) -> str:
    if dialect is None:
        return remedy(name, dialects)
    sizes = list(dialect.settings)
    if sizes and close_to(name, [*sizes, *dialect.hides], limit=1, cutoff=ALIKE):
        return f" In the {dialect.name} dialect the batch sizes are: {', '.join(sizes)}."
    found = remedy(name, dialects, hidden=dialect.hides)
    return f"{found} Nor is it a {dialect.title} name that is known here, so it may change what is trained."
