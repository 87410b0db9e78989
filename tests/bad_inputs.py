"""Invalid command lines and files, and the report that each must give.

A report has the right exit code, no traceback, and names what the user typed. `make_settings_cases` is made from the table of settings, so
a new setting is covered. The other cases are files and launch lines: sizes that do not divide, YAML, data sets, models, rewards,
checkpoints. tools/bad_inputs.py runs all cases, CI some of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.run.config.table import Setting, table
from tests.tiny_models import write_tiny

ACCEPTED = 99  # what `run` gives where `train` found nothing wrong
BOTH, TRAIN, PLAN = ("plan", "train"), ("train",), ("plan",)
REPORT = "in the configuration; nothing was started."
# Eight ranks on one machine, as a launcher would say it: rank 0 speaks.
EIGHT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

Arguments = Sequence[str]
DEEP = "[" * 100_000  # as JSON and YAML: deeper than Python's limit of recursion


@dataclass(frozen=True, kw_only=True)
class Case:
    """An invalid input.

    flags: changes to valid flags; None removes a flag. extra: further words of the command line. says: texts that must all be in the
    report. says_any: texts of which one must be. flags, extra and says may be functions of (directory of the case, valid flags).
    """

    name: str
    flags: Mapping[str, str | None] | Callable[[Path, Mapping[str, str]], Mapping[str, str | None]] = field(default_factory=dict)
    extra: Arguments | Callable[[Path, Mapping[str, str]], Arguments] = ()
    says: Arguments | Callable[[Path, Mapping[str, str]], Arguments] = ()
    says_any: Arguments = ()
    commands: Arguments = BOTH
    environ: Mapping[str, str] = field(default_factory=dict)
    code: int = 2
    reports: int = 1


# ---- running and judging ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def problems(self) -> list[str]:
        """Return the numbered lines of the report."""
        lines = self.stderr.partition(REPORT)[2].splitlines()
        return [line for line in lines if line.strip()]


def write_good(folder: Path) -> dict[str, str]:
    """Write valid inputs, and return the flags of a valid run."""
    write_tiny(folder / "model", "qwen3")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"5 {n}", "answer": n}) + "\n" for n in range(6, 16)))
    (folder / "reward.py").write_text("def good(completions, **columns): return [0.0] * len(completions)\n")
    return {"model": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "reward_funcs": f"{folder}/reward.py:good",
            "output_dir": str(folder / "out"), "max_completion_length": "8", "num_generations": "4"}  # fmt: skip


def split_words(case: Case, at: Path, good: Mapping[str, str]) -> list[str]:
    change = case.flags(at, good) if callable(case.flags) else case.flags
    extra = case.extra(at, good) if callable(case.extra) else case.extra
    flags = {name: value for name, value in ({**good, **change}).items() if value is not None}
    return [*(word for name, value in flags.items() for word in (f"--{name}", value)), *extra]


def run(command: str, words: Sequence[str], environ: Mapping[str, str], at: Path) -> Outcome:
    """Run `megatron-grpo command words` in this process; `train` ends before it would join other ranks."""
    from megatron_grpo import cli
    from megatron_grpo.run import lifecycle

    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "NNODES", "SLURM_NTASKS")
    before, training, here, path = dict(os.environ), lifecycle.run_training, os.getcwd(), list(sys.path)
    out, err = io.StringIO(), io.StringIO()
    said = logging.StreamHandler(err)
    try:
        for name in launchers:
            os.environ.pop(name, None)
        os.environ.update({"HF_HUB_OFFLINE": "1", **environ})
        os.chdir(at)
        lifecycle.run_training = lambda *args, **parts: ACCEPTED
        logging.getLogger().addHandler(said)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([command, *words])
    finally:
        logging.getLogger().removeHandler(said)
        lifecycle.run_training = training
        os.chdir(here)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)
    return Outcome(code, out.getvalue(), err.getvalue())


def check_outcome(case: Case, command: str, outcome: Outcome, says: Sequence[str]) -> list[str]:
    """Return what is wrong with the report of an invalid input; empty if nothing is."""
    text, faults = outcome.stderr, []
    if outcome.code != case.code:
        faults.append(f"{command} gave {'no error' if outcome.code == ACCEPTED else f'exit code {outcome.code}'}, not {case.code}")
    if "Traceback" in text:
        faults.append(f"{command} gave a traceback: {text.strip().splitlines()[-1][:160]}")
    if outcome.code == case.code and text.count(REPORT) != case.reports:
        faults.append(f"{command} reported {text.count(REPORT)} times, not {case.reports}")
    lacking = [word for word in says if word not in text]
    if case.says_any and not any(word in text for word in case.says_any):
        lacking.append(" or ".join(case.says_any))
    if lacking and not faults:
        faults.append(f"{command} did not say {', '.join(map(repr, lacking))}")
    if len(set(outcome.problems)) != len(outcome.problems):
        faults.append(f"{command} said a thing twice")
    return faults


def find_problems(case: Case, at: Path, good: Mapping[str, str]) -> tuple[list[str], str]:
    """Return (problems, output) of a case with both commands, in a directory of its own."""
    at.mkdir(parents=True, exist_ok=True)
    words = split_words(case, at, good)
    says = case.says(at, good) if callable(case.says) else case.says
    outcomes = {command: run(command, words, case.environ, at) for command in case.commands}
    faults = [fault for command, outcome in outcomes.items() for fault in check_outcome(case, command, outcome, says)]
    plan, train = outcomes.get("plan"), outcomes.get("train")
    if plan and train and not faults and set(map(_sentence, plan.problems)) != set(map(_sentence, train.problems)):
        faults.append("plan and train differ")
    return faults, "\n".join(f"[{command}] {outcome.code}\n{outcome.stderr[-2500:]}" for command, outcome in outcomes.items())


def _sentence(line: str) -> str:
    return line.strip().partition(". ")[2]


# ---- settings --------------------------------------------------------------------------------------------------------------------------

_FREE_TEXT = ("report_to", "recompute_modules")  # lists of words that are checked elsewhere


def make_settings_cases() -> Iterator[Case]:
    for setting in table().values():
        is_of_lora = setting.group == "tuner" and setting.name != "tuner_type" and not setting.name.startswith(("freeze_", "trainable_"))
        flags = {setting.name: None, **({"tuner_type": "lora"} if is_of_lora else {})}
        for value, what in _make_bad_values(setting):
            typed = () if not value or value.isspace() else (value,)
            yield Case(name=f"{setting.name} {what}", flags=flags, extra=[f"--{setting.name}", value],
                       says=[setting.name, *typed])  # fmt: skip
        if setting.kind != "bool" and not setting.is_list and not setting.is_map:
            yield Case(name=f"{setting.name} without a value", flags=flags, extra=[f"--{setting.name}"], says=[setting.name])
        if not setting.is_list and setting.name != "dataset":  # several are a mixture
            pair = {"int": "3 4", "float": "0.3 0.4", "bool": "true false", "str": "one two", "Any": "one two"}[setting.kind].split()
            yield Case(name=f"{setting.name} with two values", flags=flags, extra=[f"--{setting.name}", *pair],
                       says=[setting.name, pair[0] if setting.is_map else " ".join(pair)])  # fmt: skip


def _make_bad_values(setting: Setting) -> Iterator[tuple[str, str]]:
    kind, bounds = setting.kind, setting.range
    if kind in ("int", "float"):
        yield from (("two", "a word"), ("", "empty"), ("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("1e400", "too large"))
        yield from (("0x10", "hexadecimal"), ("1,5", "a comma"))
    if kind == "int":
        yield "1.5", "a fraction"
    if kind == "bool":
        yield from (("maybe", "a word"), ("2", "a number"), ("", "empty"))
    if setting.choices:
        yield from (("nonsense", "unknown"), (setting.choices[0] + "x", "misspelled"), ("", "empty"))
    if kind in ("int", "float") and not setting.optional and not setting.is_list and not setting.is_map:
        yield "none", "none"
    for edge, step in ((bounds.at_least, -1), (bounds.at_most, 1)):
        if edge is not None:
            yield f"{edge + step:g}" if kind == "float" else str(int(edge) + step), "out of range"
    for edge in (bounds.above, bounds.below):
        if edge is not None:
            yield f"{edge:g}", "at its bound"
    yield from ((word, "refused") for word in setting.refused)
    is_size = kind == "int" and bounds == type(bounds)() and setting.name != "stop_token_ids"
    if is_size:
        yield from (("0", "zero"), ("-4", "negative"))


# ---- sizes -----------------------------------------------------------------------------------------------------------------------------

MBS, GBS, GAS, GEN = "micro_batch_size", "global_batch_size", "gradient_accumulation_steps", "generation_batch_size"
TP, PP, CP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
VPP, ETP, VLLM = "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "vllm_tensor_parallel_size"
G, SPG, MU = "num_generations", "steps_per_generation", "num_iterations"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"

_SIZES: Sequence[Mapping[str, Any]] = (
    {GBS: 10}, {GBS: 12, MBS: 8}, {GBS: 6, G: 4}, {GBS: 16, MBS: 3}, {GBS: 16, G: 5}, {GBS: 16, GEN: 24}, {GBS: 16, GEN: 20},
    {GBS: 16, GEN: 8}, {GBS: 16, GEN: 17}, {GBS: 32, MBS: 4, GAS: 3}, {GAS: 3, MBS: 1, G: 16}, {GEN: 32, SPG: 3}, {GBS: 16, GEN: 32,
    SPG: 4},
    {GBS: 8, GEN: 16, SPG: 1}, {G: 1}, {G: 7}, {G: 32, GBS: 16}, {MBS: 32, GBS: 16}, {MBS: 7}, {TP: 3}, {TP: 16}, {PP: 3}, {PP: 16},
    {PP: 8},
    {CP: 3}, {CP: 16}, {TP: 2, PP: 3}, {TP: 4, PP: 4}, {TP: 2, CP: 3}, {TP: 3, PP: 3, CP: 3}, {EP: 2}, {EP: 3}, {ETP: 2}, {ETP: 3, EP: 2},
    {VPP: 1}, {VPP: 2}, {PP: 2, VPP: 2}, {PP: 2, VPP: 3}, {PP: 4}, {FIRST: 1}, {LAST: 1}, {PP: 2, FIRST: 3}, {PP: 2, FIRST: 2, LAST: 1},
    {PP: 2, LAST: 2}, {VLLM: 3}, {VLLM: 8}, {VLLM: 16}, {VLLM: 5}, {TP: 8, VLLM: 3}, {"sequence_parallel": "true"}, {TP: 8},
    {TP: 2, GBS: 6}, {GBS: 100, MBS: 8, G: 16}, {GBS: 128, MBS: 3, G: 7}, {PP: 3, VLLM: 3, GBS: 5}, {CP: 2, GBS: 9, MBS: 2}, {MU: 0,
    GBS: 10},
    {GBS: 0, MBS: 0, G: 0}, {GBS: -16, MBS: -2}, {TP: 0, PP: 0, CP: 0}, {TP: -1, GBS: 10}, {G: 0, GBS: 7}, {VPP: 0, PP: 2}, {VLLM: 0,
    TP: 3},
    {GBS: 16, "allow_unaligned_generation": "true", GEN: 18}, {GBS: 8, MBS: 2, G: 4}, {GEN: 16, GBS: 16, SPG: 1, G: 3, TP: 3},
    {"max_tokens_per_micro_batch": 64, MBS: 2, GBS: 10}, {GBS: 10**12 + 1}, {TP: 10**9},
    {GBS: 2**70 + 1},
    {"world_size": 4}, {"world_size": 0}, {"world_size": -8}, {"world_size": 16, TP: 16},
)  # fmt: skip


def make_size_cases() -> Iterator[Case]:
    for sizes in _SIZES:
        flags = {name: str(value) for name, value in sizes.items()}
        yield Case(name=" ".join(f"{name} {value}" for name, value in sizes.items()), flags=flags, environ=EIGHT, says_any=list(sizes),
                   commands=BOTH if "world_size" not in sizes else TRAIN)  # fmt: skip


# ---- pairs of settings -----------------------------------------------------------------------------------------------------------------

_PAIRS: Sequence[tuple[Mapping[str, str], Arguments]] = (
    ({"lr": "1e-6", "min_lr": "1e-5"}, ("min_lr (1e-05)", "lr (1e-06)")),
    ({"lr_warmup_iters": "5", "lr_warmup_fraction": "0.1"}, ("lr_warmup_iters (5)", "lr_warmup_fraction (0.1)")),
    ({"overlap_param_gather": "true"}, ("overlap_param_gather",)),
    ({"exp_avg_dtype": "bf16"}, ("exp_avg_dtype bf16", "use_precision_aware_optimizer true")),
    ({"use_precision_aware_optimizer": "true", "use_distributed_optimizer": "false"}, ("use_distributed_optimizer true",)),
    ({"use_precision_aware_optimizer": "true", "main_grads_dtype": "bf16", "torch_dtype": "float32"}, ("torch_dtype bfloat16",)),
    ({"use_precision_aware_optimizer": "true", "main_grads_dtype": "fp16"}, ("'fp16'", "fp32, bf16")),
    ({"use_precision_aware_optimizer": "true", "main_params_dtype": "bf16"}, ("'bf16'", "fp32, fp16")),
    ({"use_precision_aware_optimizer": "true", "exp_avg_sq_dtype": "uint8"}, ("'uint8'", "fp8")),
    ({"recompute_method": "uniform"}, ("recompute_method (uniform)",)),
    ({"recompute_num_layers": "2"}, ("recompute_num_layers (2)",)),
    ({"recompute_granularity": "full"}, ("recompute_granularity full",)),
    ({"recompute_granularity": "selective", "recompute_modules": "nonsense"}, ("nonsense",)),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "100"}, ("100",)),
    ({"moe_aux_loss_coeff": "0.01"}, ("moe_aux_loss_coeff (0.01)",)),
    ({"vllm_max_model_len": "4"}, ("vllm_max_model_len (4)", "max_completion_length (8)")),
    ({"max_prompt_length": "100", "vllm_max_model_len": "50"}, ("vllm_max_model_len (50)", "108")),
    ({"max_completion_length": "1000"}, ("1001", "max_position_embeddings (256)")),
    ({"max_prompt_length": "250"}, ("258", "256")),
    ({"max_completion_length": "255"}, ("257", "256")),
    ({"max_prompt_length": "1"}, ("max_prompt_length (1)", "the longest has 2")),
    ({"reward_weights": "nan"}, ("reward_weights", "nan")),
    ({"reward_weights": "1e7"}, ("reward_weights", "1e+06")),
    ({"eval_steps": "5"}, ("eval_steps (5)", "eval_dataset")),
    ({"eval_reward": "math"}, ("eval_reward (math)", "good")),
    ({"bf16": "true", "torch_dtype": "float32"}, ("bf16 (true)", "float32")),
    ({"lengths": "gone.txt"}, ("gone.txt",)),
    ({"lengths": "."}, ("lengths: .",)),
    ({"png": "no/such/folder/a.png"}, ("no/such/folder/a.png",)),
    ({"report_to": "tensorbord"}, ("tensorbord",)),
    ({"report_to": ""}, ("report_to",)),
    ({"resume": "never", "overwrite_output_dir": "maybe"}, ("overwrite_output_dir", "maybe")),
    ({"resume": "/no/such/checkpoint"}, ("/no/such/checkpoint",)),
    ({"resume": "iter_5"}, ("iter_5",)),
    ({"resume": ""}, ("resume",)),
    ({"output_dir": ""}, ("output_dir",)),
    ({"output_dir": "/dev/null"}, ("/dev/null",)),
    ({"output_dir": "/dev/null/below"}, ("/dev/null",)),
    ({"stop_token_ids": "x"}, ("stop_token_ids", "'x'")),
    ({"stop_token_ids": "-1"}, ("stop_token_ids", "-1")),
    ({"stop_token_ids": "100000"}, ("stop_token_ids", "100000")),
    ({"stop": ""}, ("stop",)),
    ({"format_tags": ""}, ("format_tags",)),
    ({"dataset_split": ""}, ("dataset_split",)),
    ({"top_k": "-1"}, ("top_k (-1)",)),
    ({"sync_ref_model": "true"}, ("sync_ref_model", "beta")),
    ({"teacher_model": "/no/such/teacher"}, ("teacher_model (/no/such/teacher)", "does not exist")),
    ({"teacher_model": "teacher"}, ("teacher_model (teacher)", "neither a directory here nor a Hub name")),
    ({"teacher_model": "/dev/null"}, ("teacher_model (/dev/null)", "does not exist")),
    ({"offload_teacher_model": "true"}, ("offload_teacher_model",)),
    ({"teacher_kl_coef": "0.5"}, ("teacher_kl_coef (0.5)", "teacher_model")),
    ({"kl_in_reward": "true"}, ("kl_in_reward", "beta")),
    ({"loss_type": "sapo", "epsilon_high": "0.1", "delta": "2"}, ("delta",)),
    ({"loss_type": "cispo", "delta": "2"}, ("delta",)),
    ({"rollout_importance_sampling_mode": "token_mask", "rollout_importance_sampling_min": "3"}, ("rollout_importance_sampling_min",)),
    ({"rollout_is_geometric": "true"}, ("rollout_is_geometric",)),
    ({"scale_rewards": "gdpo", "advantage_estimator": "rloo"}, ("scale_rewards",)),
    ({"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "rloo"}, ("multi_objective_aggregation",)),
    ({"lora_rank": "4"}, ("lora_rank (4)", "tuner_type lora")),
    ({"merge_lora": "true", "target_modules": "q_proj"}, ("target_modules (q_proj), merge_lora (true)",)),
    ({"tuner_type": "lora", "freeze_parameters": "model"}, ("freeze_parameters (model)", "only supported with tuner_type full")),
    ({"tuner_type": "lora", "sync_ref_model": "true", "beta": "0.1"}, ("sync_ref_model", "not an adapter of rank r")),
    ({"tuner_type": "lora", "lora_dtype": "float32"}, ("lora_dtype (float32)", "torch_dtype (bfloat16)")),
    ({"tuner_type": "lora", "merge_lora": "true", "export_hf": "false"}, ("merge_lora", "export_hf false")),
    ({"tuner_type": "lora", "target_regex": "(["}, ("target_regex (([)",)),
    ({"tuner_type": "lora", "target_regex": ".*q_proj", "target_modules": "o_proj"}, ("target_regex (.*q_proj), target_modules (o_proj)",)),
    ({"tuner_type": "lora", "rank_pattern": "*=4"}, ("rank_pattern (*)",)),
    ({"tuner_type": "lora", "rank_pattern": "q_proj=513"}, ("513", "at most 512 each")),
    ({"tuner_type": "lora", "rank_pattern": "q_proj"}, ("rank_pattern", "name=value")),
    ({"tuner_type": "lora", "target_modules": "qq_proj"}, ("qq_proj", "q_proj, up_proj")),
    ({"tuner_type": "lora", "target_modules": "all-linear all-router"}, ("adapters on all-router are not supported",)),
    ({"tuner_type": "lora", "target_modules": "q_proj lm_head"}, ("adapters on lm_head are not supported",)),
    ({"tuner_type": "lora", "exclude_modules": "linear_qkv linear_proj linear_fc1 linear_fc2"}, ("selects no linear layer",)),
    ({"tuner_type": "lora", "ref_adapters": "gone"}, ("ref_adapters", "beta 0", "gone is not an adapter")),
    ({"freeze_parameters": "model lm_head"}, ("freeze every weight",)),
    ({"freeze_parameters": "decoder.layers.0"}, ("decoder.layers.0", "model.layers.0.")),
    ({"freeze_parameters_regex": "("}, ("freeze_parameters_regex (()",)),
    ({"freeze_parameters_regex": "q_proj"}, ("q_proj.weight would be frozen", "k_proj.weight")),
    ({"trainable_parameters": "model.norm"}, ("trainable_parameters (model.norm)", "nothing is frozen")),
    ({"soft_cache_length": "100", "reward_funcs": "soft_overlong"}, ("soft_cache_length",)),
    ({"reward_funcs": "soft_overlong"}, ("soft_cache_length",)),
    ({"reward_funcs": "soft_overlong", "soft_cache_length": "4", "soft_max_length": "3"}, ("soft_max_length",)),
    ({"reward_funcs": "reward_model"}, ("reward_model",)),
    ({"reward_funcs": "reward_model", "reward_model": "/no/such/classifier"}, ("/no/such/classifier",)),
    ({"reward_funcs": "reward_model", "reward_model_url": "127.0.0.1"}, ("127.0.0.1",)),
    ({"reward_funcs": "llm_judge"}, ("llm_judge_url",)),
    ({"reward_funcs": "llm_judge", "llm_judge_url": "http://127.0.0.1:1/v1"}, ("llm_judge_model",)),
    ({"reward_funcs": "llm_judge", "llm_judge_url": "nonsense", "llm_judge_model": "m"}, ("nonsense",)),
    ({"reward_funcs": "llm_judge", "llm_judge_url": "http://127.0.0.1:1/v1", "llm_judge_model": "m", "llm_judge_prompt": "gone.txt"},
     ("gone.txt",)),
    ({"reward_funcs": "format", "format_tags": "a b<"}, ("b<",)),
    ({"reward_funcs": "accuracy", "answer_column": "hint"}, ("hint",)),
    ({"reward_funcs": "code"}, ("code",)),
    ({"overwrite_output_dir": "true", "resume": "x"}, ("overwrite_output_dir", "resume (x)")),
    ({"num_iterations": "2", "max_steps": "0"}, ("max_steps (0)",)),
    ({"oversample_ratio": "inf"}, ("oversample_ratio", "inf")),
    ({"vllm_dtype": "float16"}, ("vllm_dtype", "float16")),
    ({"vllm_gpu_memory_utilization": "90"}, ("vllm_gpu_memory_utilization (90",)),
    ({"streaming": "true"}, ("max_prompt_length", "streaming")),
    ({"streaming": "true", "max_prompt_length": "20", "split_dataset_ratio": "0.1"}, ("split_dataset_ratio (0.1)", "eval_dataset")),
    ({"streaming": "true", "max_prompt_length": "20", "dataset_drop_last": "true"}, ("Omit dataset_drop_last",)),
    ({"global_batch_size": "4096", "dataset_drop_last": "true"}, ("Nothing would be trained: the data set has", "dataset_drop_last false")),
    ({"shuffle_buffer_size": "5"}, ("shuffle_buffer_size (5)", "streaming true")),
    ({"model": ""}, ("model is missing",)),
    ({"dataset": ""}, ("dataset",)),
    ({"reward_funcs": ""}, ("reward_funcs",)),
)  # fmt: skip


def make_pair_cases() -> Iterator[Case]:
    for number, (flags, says) in enumerate(_PAIRS):
        only_train = len(flags) == 1 and next(iter(flags)) in ("model", "dataset") or flags == {"reward_funcs": ""}
        only_train |= flags in ({"max_prompt_length": "1"}, {"max_completion_length": "255"})  # a tokenizer says how long a prompt is
        change = {name: None for name in flags}
        extra = [word for name, value in flags.items() for word in (f"--{name}", *(value.split() or [""]))]
        name = " ".join(f"{name} {value!r}" for name, value in flags.items())
        yield Case(name=f"pair {number}: {name}", flags=change, extra=extra, says=says, commands=TRAIN if only_train else BOTH)


# ---- the command line ------------------------------------------------------------------------------------------------------------------


def make_command_line_cases() -> Iterator[Case]:
    rows: Sequence[tuple[Arguments, Arguments]] = (
        (["stray"], ["stray"]), (["-x"], ["-x"]), (["--"], ["--"]), (["--no_such_flag", "1"], ["no_such_flag"]),
        (["--micro_batch_sizes", "1"], ["micro_batch_sizes", "micro_batch_size?"]), (["--Lr", "1"], ["Lr"]),
        (["--no_lr"], ["no_lr"]), (["--no_export_hf", "true"], ["no_export_hf"]), (["--config"], ["config"]),
        (["--config", "gone.yaml"], ["gone.yaml"]), (["--config", "."], ["config ."]), (["--config=gone.yaml"], ["gone.yaml"]),
        (["--lr=1e-6=2"], ["lr", "1e-6=2"]), (["--lr", "--seed", "1"], ["lr"]), (["--dialect", "openrlhf"], ["dialect", "openrlhf"]),
        (["--dialect", "sft"], ["dialect", "sft"]), (["--dialect"], ["dialect"]), (["lr=1e-6"], ["lr=1e-6"]),
        (["optimizer.lr=two"], ["optimizer.lr", "--lr"]), (["trainer.lr=1"], ["trainer.lr"]), (["--lr\u00a0", "1"], ["lr"]),
        (["--lr", "１ｅ"], ["lr"]), (["\u2014lr", "1"], ["\u2014lr"]), (["--seed", "4294967296"], ["seed (4294967296)"]),
        (["--learning_rate", "1e-6", "--lr", "2e-6"], ["learning_rate", "lr", "2e-06"]), (["--beta", "0.1x"], ["beta", "0.1x"]),
        (["--eval_dataset", "gone.jsonl"], ["gone.jsonl"]), (["--system"], ["system"]), (["--model_name_or_path", "/no/a"], ["/no/a"]),
        (["--micro_batch_size", "two", "--lr", "x", "--seed", "-1", "--no_such", "1"], ["two", "'x'", "seed (-1)", "no_such"]),
        (["--config", "a.yaml", "b.yaml"], ["a.yaml", "b.yaml"]),
    )  # fmt: skip
    for extra, says in rows:
        replaced = {"model": None} if "--model_name_or_path" in extra else {}
        yield Case(name=f"line {' '.join(extra)}", flags=replaced, extra=extra, says=says)
    yield Case(
        name="no launcher: world_size 4",
        extra=["--world_size", "4"],
        says=["world_size (4)", "torchrun --nproc_per_node 4"],
        commands=TRAIN,
    )
    yield Case(
        name="no launcher: tp 2", extra=[f"--{TP}", "2", "--global_batch_size", "16"], says=["torchrun --nproc_per_node 2"], commands=TRAIN
    )
    for name, environ, says in (
        ("NPROC_PER_NODE", {"NPROC_PER_NODE": "2"}, ["NPROC_PER_NODE (2)", "torchrun --nproc_per_node 2"]),
        ("SLURM_NTASKS", {"SLURM_NTASKS": "4"}, ["SLURM_NTASKS (4)"]),
        ("WORLD_SIZE alone", {"WORLD_SIZE": "4"}, ["WORLD_SIZE (4)"]),
        ("RANK alone", {"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ("a RANK that is no number", {**EIGHT, "RANK": "x"}, ["RANK is 'x'"]),
        ("a RANK too high", {**EIGHT, "RANK": "9"}, ["RANK is 9 and WORLD_SIZE 8"]),
        ("no MASTER_PORT", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, ["MASTER_PORT is not set"]),
        ("a MASTER_PORT that is no number", {**EIGHT, "MASTER_PORT": "many"}, ["MASTER_PORT is 'many'"]),
        ("another world_size", EIGHT, ["world_size (4)", "(8)"]),
    ):
        extra = ["--world_size", "4"] if name == "another world_size" else []
        yield Case(name=f"launch: {name}", environ=environ, says=says, commands=TRAIN, extra=extra)
    for word in ("trian", "serve", "", "-v", "--model"):
        yield Case(name=f"command {word!r}", commands=(word,), says=[word])


# ---- configuration files ---------------------------------------------------------------------------------------------------------------


def _written(name: str, content: str | bytes) -> Callable[[Path, Mapping[str, str]], Arguments]:
    def extra(at: Path, good: Mapping[str, str]) -> Arguments:
        (at / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--config", str(at / name)]

    return extra


def make_yaml_cases() -> Iterator[Case]:
    rows: Sequence[tuple[str, str | bytes, Arguments]] = (
        ("an unknown key", "learning_rat: 1\n", ["learning_rat", "run.yaml", "learning_rate?"]),
        ("an unknown section", "optimiser:\n  lr: 1\n", ["optimiser.lr"]),
        ("a section in a section", "optimizer:\n  adam:\n    beta1: 0.9\n", ["adam"]),
        ("a setting that is a section", "lr:\n  value: 1\n", ["lr.value"]),
        ("a known section in a section", "grpo:\n  optimizer:\n    lr: 1\n", ["optimizer"]),
        ("a list for a scalar", "lr: [1, 2]\n", ["lr", "1 2"]),
        ("an empty list for a scalar", "lr: []\n", ["lr"]),
        ("a map in a list", "reward_funcs:\n  - name: math\n", ["reward_funcs", "math"]),
        ("a list in a list", "reward_weights: [[1, 2]]\n", ["reward_weights"]),
        ("a key twice", "lr: 1\nlr: 2\n", ["lr is set twice"]),
        ("a key twice in a section", "optimizer:\n  lr: 1\n  lr: 2\n", ["lr is set twice"]),
        ("a key flat and in a section", "lr: 1\noptimizer:\n  lr: 2\n", ["lr"]),
        ("a key with a dash and a bar", "min-lr: 1e-7\nmin_lr: 1e-8\n", ["min_lr"]),
        ("an alias and its name", "learning_rate: 1e-6\nlr: 2e-6\n", ["learning_rate", "lr"]),
        ("tabs", "optimizer:\n\tlr: 1\n", ["run.yaml", "line 2"]),
        ("an open bracket", "reward_funcs: [math\nlr: 1\n", ["run.yaml", "line"]),
        ("an open quote", 'system: "abc\nlr: 1\n', ["run.yaml"]),
        ("a colon in a value", "system: a: b\n", ["run.yaml", "line 1"]),
        ("a list at the top", "- lr: 1\n", ["run.yaml", "list"]),
        ("a word at the top", "hello\n", ["run.yaml", "str"]),
        ("two documents", "lr: 1e-6\n---\nlr: 2e-6\n", ["run.yaml"]),
        ("an unknown tag", "lr: !!python/object:os.system 1\n", ["run.yaml"]),
        ("an unknown alias", "lr: *rate\n", ["run.yaml", "rate"]),
        ("a null", "lr:\n", ["lr", "none"]),
        ("an empty text", 'lr: ""\n', ["lr"]),
        ("a bool for a number", "micro_batch_size: true\n", ["micro_batch_size"]),
        ("a bool for a number, as YAML reads yes", "seed: yes\n", ["seed"]),
        ("a number for a bool", "export_hf: 2\n", ["export_hf", "2"]),
        ("nan", "lr: .nan\n", ["lr", "nan"]),
        ("inf", "lr: .inf\n", ["lr", "inf"]),
        ("a date", "max_steps: 2024-01-01\n", ["max_steps", "2024-01-01"]),
        ("a number as a key", "1: 2\n", ["1", "run.yaml"]),
        ("a null as a key", "~: 2\n", ["run.yaml"]),
        ("a list as a key", "? [a, b]\n: 2\n", ["run.yaml"]),
        ("a word for a list of numbers", "reward_weights: much\n", ["reward_weights", "much"]),
        ("an unknown choice", "loss_type: ppo\n", ["loss_type", "ppo", "run.yaml"]),
        ("out of range", "top_p: 2\n", ["top_p (2"]),
        ("bytes that are no text", b"\xff\xfe\x00\x01", ["run.yaml", "UTF-8"]),
        ("UTF-16", "lr: 1e-6\n".encode("utf-16"), ["run.yaml", "UTF-8"]),
        ("a null byte", b"lr: 1e-6\x00\n", ["run.yaml"]),
        ("another config in it", "config: other.yaml\n", ["config"]),
        ("JSON that is cut", '{"lr": 1e-6', ["run.yaml"]),
        ("dashes in its keys", "--lr: 1e-6\n--nothing: 2\n", ["nothing"]),
        ("INI", "[optimizer]\nlr = 1e-6\n", ["run.yaml"]),
        ("a bomb", "a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nlr: *b\n", ["lr"]),
        ("a bomb of 9 to the power of 9", "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)),
         ["run.yaml", "100,000 values", "line 6"]),
        ("a bomb of merges", f"a: &a {{{', '.join(f'k{i}: 1' for i in range(999))}}}\nb: {{<<: [{', '.join(['*a'] * 999)}]}}\n",
         ["run.yaml", "100,000 values", "line 2"]),
        ("100,000 brackets", f"lr: {DEEP}", ["run.yaml", "more than 100 levels"]),
        ("400 dashes", "lr:\n " + "- " * 400 + "1\n", ["run.yaml", "more than 100 levels"]),
        ("a value without the form of its tag", "export_hf: !!bool x\n", ["run.yaml", "not valid YAML"]),
        ("a day that no month has", "max_steps: 2026-02-30\n", ["run.yaml", "not valid YAML: day"]),
        ("itself", "lr: &x [*x]\n", ["run.yaml", "100,000 values", "line 1"]),
        ("itself, merged", "optimizer: &x {<<: *x}\n", ["run.yaml", "100,000 values", "line 1"]),
        ("a section that is a list", "optimizer: [lr, 1]\n", ["optimizer"]),
        ("a section that is a word", "optimizer: adam\n", ["optimizer"]),
        ("a section that is empty and a mistake", "optimizer:\nlrr: 1\n", ["lrr"]),
    )  # fmt: skip
    for name, content, says in rows:
        yield Case(name=f"yaml: {name}", extra=_written("run.yaml", content), says=says)
    foreign = (
        ("TRL", "per_device_train_batch_size: 4\nnum_train_epochs: 1\nlogging_steps: 1\ngradient_checkpointing: true\nuse_vllm: true\n",
         ["TRL", "--dialect trl"]),
        ("SkyRL", "trainer:\n  train_batch_size: 32\n  policy_mini_batch_size: 16\ngenerator:\n  n_samples_per_prompt: 4\n",
         ["--dialect skyrl"]),
        ("Megatron-SWIFT", "rlhf_type: grpo\nload_safetensors: true\npadding_free: true\nattention_backend: flash\ntuner_type: full\n",
         ["--dialect swift-megatron"]),
        ("verl", "actor_rollout_ref:\n  rollout:\n    n: 8\n    name: vllm\n", ["actor_rollout_ref.rollout.n", "num_generations"]),
    )  # fmt: skip
    for name, content, says in foreign:
        yield Case(name=f"yaml: a {name} file", extra=_written("run.yaml", content), says=says)
    yield Case(name="a file that may not be read", extra=_make_forbidden, says=["run.yaml"])
    scripts = (
        ("a quote left open", "megatron rlhf --lr '1e-6\n", ["run.sh"]),
        ("a variable from outside", "megatron rlhf --lr $RATE\n", ["$RATE"]),
        ("a command substitution", "megatron rlhf --seed $(date +%s)\n", ["run.sh"]),
        ("a space behind a backslash", "megatron rlhf \\ \n --lr 1e-6\n", ["--lr"]),
        ("an unknown flag", "megatron rlhf --lrr 1e-6\n", ["lrr"]),
        ("a bad value", "megatron rlhf --lr two\n", ["lr", "two", "run.sh"]),
    )
    for name, content, says in scripts:
        yield Case(name=f"script: {name}", extra=_written("run.sh", content), says=says)
    lengths = (("words", "a b\n", ["lengths", "line 1"]), ("one number", "3\n", ["lengths", "line 1"]), ("nothing", "\n", ["no lengths"]),
               ("negative", "3 4\n-1 4\n", ["line 2"]), ("zeros", "0 0\n", ["line 1"]), ("bytes", b"\xff\xff\n", ["line 1"]))  # fmt: skip
    for name, content, says in lengths:

        def extra(at: Path, good: Mapping[str, str], content: str | bytes = content) -> Arguments:
            return ["--lengths", _written("lengths.txt", content)(at, good)[1]]

        yield Case(name=f"lengths: {name}", extra=extra, says=says)


def _make_forbidden(at: Path, good: Mapping[str, str]) -> Arguments:
    (at / "run.yaml").mkdir()  # root may read everything, but not a folder as a file
    return ["--config", str(at / "run.yaml")]


# ---- dialects --------------------------------------------------------------------------------------------------------------------------


def make_framework_cases() -> Iterator[Case]:
    rows: Sequence[tuple[str, str, Arguments]] = (
        ("swift", "--tuner_type lora_llm", ["tuner_type", "lora_llm"]), ("swift", "--train_type vera", ["train_type", "vera"]),
        ("swift", "--tuner_type lora --modules_to_save lm_head", ["modules_to_save (lm_head)"]),
        ("swift", "--tuner_type lora --lora_dtype float16", ["lora_dtype", "float16"]), ("swift", "--adapters a b", ["adapters", "a b"]),
        ("swift", "--freeze_parameters_ratio 0.5", ["freeze_parameters_ratio (0.5)"]),
        ("swift", "--rlhf_type dpo", ["rlhf_type (dpo)"]),
        ("swift", "--loss_type real --top_entropy_quantile 0.5", ["top_entropy_quantile", "real"]),
        ("swift", "--multi_turn_scheduler math_tip_trick", ["multi_turn_scheduler"]),
        ("swift", "--lora_rank 8", ["lora_rank (8)"]), ("swift", "--external_plugins plugin.py --reward_funcs mine", ["mine", "plugin.py"]),
        ("swift", "--system prompt.txt", ["prompt.txt"]),
        ("swift", "--mtp_num_layers 1", ["mtp_num_layers (1)"]),
        ("swift", "--optimizer sgd", ["optimizer (sgd)"]), ("swift", "--deepspeed zero3", ["deepspeed (zero3)"]),
        ("swift", "--micro_batch_size two", ["micro_batch_size", "two"]), ("swift", "--no_such_name 1", ["no_such_name"]),
        ("swift", "--moe_aux_loss_coeff 0.01", ["moe_aux_loss_coeff (0.01)"]), ("swift", "--ref_model a", ["ref_model (a)"]),
        ("swift", "--router_replay_mode R2", ["router_replay_mode R2"]), ("swift", "--ddp_timeout long", ["ddp_timeout", "long"]),
        ("swift", "--freeze_llm true", ["freeze_llm true"]), ("swift", "--template qwen", ["template (qwen)"]),
        ("swift", "--split_dataset_ratio 1", ["split_dataset_ratio"]), ("swift", "--repetition_penalty 1.1",
         ["repetition_penalty (1.1)"]),
        ("swift", "--advantage_estimator rloo --scale_rewards group", ["advantage_estimator rloo", "scale_rewards group"]),
        ("swift", "--global_batch_size 10 --num_generations 4", ["global_batch_size"]), ("swift", "--top_p 3", ["top_p (3"]),
        ("trl", "--use_peft true --use_dora true", ["use_dora"]), ("trl", "--lora_r 8", ["lora_r", "tuner_type lora"]),
        ("trl", "--loss_type vespo --delta 4", ["delta", "vespo"]),
        ("trl", "--per_device_train_batch_size 0", ["per_device_train_batch_size"]),
        ("trl", "--per_device_train_batch_size x", ["per_device_train_batch_size", "x"]), ("trl", "--use_liger_kernel maybe --nothing 1",
         ["nothing"]),
        ("trl", "--optim adafactor", ["optim (adafactor)"]), ("trl", "--lr_scheduler_type polynomial", ["lr_scheduler_type", "polynomial"]),
        ("trl", "--repetition_penalty 1.2", ["repetition_penalty (1.2)"]), ("trl", "--generation_batch_size 10", ["generation_batch_size"]),
        ("trl", "--generation_batch_size 16 --steps_per_generation 2", ["generation_batch_size", "steps_per_generation"]),
        ("trl", "--micro_batch_size 4", ["micro_batch_size"]), ("trl", "--global_batch_size 16", ["global_batch_size"]),
        ("trl", "--load_in_4bit true", ["load_in_4bit"]), ("trl", "--fp16 true", ["fp16"]), ("trl", "--min_p 0.1", ["min_p (0.1)"]),
        ("trl", "--num_generations 1", ["num_generations"]), ("trl", "--max_steps x", ["max_steps", "x"]),
        ("trl", "--reward_funcs nonsense", ["nonsense"]),
        ("skyrl", "trainer.train_batch_size=10 trainer.policy_mini_batch_size=3", ["train_batch_size", "policy_mini_batch_size"]),
        ("skyrl", "trainer.strategy=deepspeed", ["trainer.strategy (deepspeed)"]), ("skyrl", "trainer.algorithm.policy_loss_type=nonsense",
         ["nonsense"]),
        ("skyrl", "trainer.nothing=3", ["trainer.nothing"]), ("skyrl", "generator.n_samples_per_prompt=x", ["n_samples_per_prompt", "x"]),
        ("skyrl", "generator.n_samples_per_prompt=0", ["n_samples_per_prompt"]), ("skyrl", "trainer.algorithm.advantage_estimator=gae",
         ["gae"]),
        ("skyrl", "generator.backend=sglang", ["generator.backend (sglang)"]), ("skyrl-doc", "trainer.policy_mini_batch_size=0",
         ["policy_mini_batch_size"]),
        ("skyrl", "trainer.policy.model.lora.rank=x", ["lora.rank", "x"]),
        ("skyrl", "trainer.placement.colocate_all=false", ["colocate_all"]),
        ("cs336", "--rollout_batch_size 10 --group_size 4", ["rollout_batch_size", "group_size"]),
        ("cs336", "--group_size 0", ["group_size"]), ("cs336", "--nothing 3", ["nothing"]),
    )  # fmt: skip
    for dialect, line, says in rows:
        without = {name: None for name in ("model", "dataset", "reward_funcs", "max_completion_length", "num_generations")}
        kept = {name: None for name in without if f"--{name}" in line or name == "num_generations"}
        yield Case(name=f"{dialect}: {line}", flags=kept, extra=["--dialect", dialect, *line.split()], says=says)
    # `train` misses the servers' token besides.
    for dialect, line, says in (
        ("swift", "--vllm_mode server", ["vllm_server_host"]),
        ("trl", "--vllm_mode server --vllm_server_port 1 2 --vllm_server_host a b c", ["vllm_server_port", "3 hosts"]),
    ):
        extra = ["--dialect", dialect, *line.split()]
        yield Case(name=f"{dialect}: {line}", flags={"num_generations": None}, extra=extra, says=says, commands=PLAN)


# ---- data sets -------------------------------------------------------------------------------------------------------------------------

_ROW = '{"prompt": "5 6", "answer": 1}\n'


def make_dataset_cases() -> Iterator[Case]:
    rows: Sequence[tuple[str, str, str | bytes, Arguments]] = (
        ("empty", "d.jsonl", "", ["d.jsonl", "no rows"]), ("blank lines alone", "d.jsonl", "\n\n \n", ["no rows"]),
        ("an empty array", "d.json", "[]", ["no rows"]), ("broken at line 3", "d.jsonl", _ROW * 2 + '{"prompt": "a"\n' + _ROW, ["d.jsonl",
         "line 3"]),
        ("cut at its end", "d.jsonl", _ROW * 3 + '{"prompt": "5 6", "an', ["line 4"]),
        ("150 levels", "d.jsonl", _ROW + '{"prompt": "5", "x": ' + "[" * 150 + "]" * 150 + "}", ["line 2", "100 levels"]),
        ("no JSON", "d.jsonl", "hello\nworld\n", ["line 1",
         "line 2"]),
        ("lists", "d.jsonl", "[1, 2]\n", ["line 1", "list"]), ("numbers", "d.jsonl", "1\n2\n", ["2 line(s)", "int"]),
        ("wrong columns", "d.jsonl", '{"question": "a", "answer": "b"}\n', ["'question'", "'answer'"]),
        ("no columns", "d.jsonl", "{}\n", ["(none)"]), ("an empty prompt", "d.jsonl", _ROW + '{"prompt": ""}\n', ["d.jsonl line 2",
         "empty"]),
        ("a null prompt", "d.jsonl", '{"prompt": null}\n', ["line 1"]), ("a number as a prompt", "d.jsonl", '{"prompt": 5}\n', ["int"]),
        ("an object as a prompt", "d.jsonl", '{"prompt": {"role": "user", "content": "5"}}\n', ["dict"]),
        ("no messages", "d.jsonl", '{"prompt": []}\n', ["nothing to answer"]),
        ("messages without content", "d.jsonl", '{"prompt": [{"role": "user"}]}\n', ["role", "content"]),
        ("messages that are strings", "d.jsonl", '{"prompt": ["5 6"]}\n', ["role", "content"]),
        ("messages as a string", "d.jsonl", '{"messages": "5 6"}\n', ["messages"]),
        ("an answer alone", "d.jsonl", '{"messages": [{"role": "assistant", "content": "5"}]}\n', ["nothing to answer"]),
        ("ShareGPT without a question", "d.jsonl", '{"conversations": [{"from": "gpt", "value": "5"}]}\n', ["`messages` without"]),
        ("ShareGPT without content", "d.jsonl", '{"messages": [{"from": "human", "text": "5"}]}\n', ["role", "content"]),
        ("content that is a number", "d.jsonl", '{"prompt": [{"role": "user", "content": 5}]}\n', ["int"]),
        ("content that is null", "d.jsonl", '{"prompt": [{"role": "user", "content": null}]}\n', ["NoneType"]),
        ("an image part", "d.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "5"}]}]}\n',
         ["image", "text alone"]),
        ("an image_url part", "d.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}\n',
         ["image_url"]),
        ("images beside", "d.jsonl", '{"prompt": "5", "images": ["a.png"]}\n', ["`images`"]),
        ("videos beside", "d.jsonl", '{"prompt": "5", "videos": ["a.mp4"]}\n', ["`videos`"]),
        ("one image beside", "d.jsonl", '{"prompt": "5", "image": "a.png"}\n', ["`image`"]),
        ("an <image> in the text", "d.jsonl", '{"prompt": "<image>5", "images": ["a.png"]}\n', ["images"]),
        ("mixed prompts", "d.jsonl", _ROW + '{"prompt": 7}\n{"prompt": [{"role": "user", "content": "5"}]}\n', ["line 2", "int"]),
        ("a part without text", "d.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}\n', ["text"]),
        ("text that is csv", "d.csv", "prompt,answer\n1,2\n", ["d.csv", ".csv"]), ("a text file", "d.txt", "5 6\n", [".txt"]),
        ("no suffix", "d", "5 6\n", ["nothing"]), ("gzip", "d.jsonl.gz", b"\x1f\x8b\x08\x00", [".gz"]),
        ("bytes", "d.jsonl", b"\x00\xff\xfe" * 9, ["line 1"]), ("UTF-16", "d.jsonl", _ROW.encode("utf-16"), ["d.jsonl", "iconv"]),
        ("no parquet", "d.parquet", "hello", ["d.parquet", "parquet"]), ("an empty parquet", "d.parquet", "", ["d.parquet"]),
        ("an array of numbers", "d.json", "[1, 2]", ["2 entries", "entry 0"]), ("a broken array", "d.json",
         '[{"prompt": "5"},\n{"prompt": }]', ["line 2"]),
        ("a map of rows", "d.json", '{"data": [{"prompt": "5"}]}', ["'data'"]), ("a map over lines", "d.json", '{\n"data": []\n}',
         ["over several lines (data)"]),
        ("a lone surrogate", "d.jsonl", '{"prompt": "\\ud800"}\n', ["line 1"]), ("deep", "d.jsonl", "[" * 100000 + "\n", ["line 1"]),
        ("a large number", "d.jsonl", '{"prompt": "5", "answer": ' + "9" * 5000 + "}\n", ["line 1"]),
    )  # fmt: skip

    def at_file(name: str, content: str | bytes) -> Callable[[Path, Mapping[str, str]], Mapping[str, str]]:
        return lambda at, good: {"dataset": _written(name, content)(at, good)[1]}

    for name, file, content, says in rows:
        only = TRAIN if "surrogate" in name else BOTH
        yield Case(name=f"data: {name}", flags=at_file(file, content), says=says, commands=only)
        if name in ("empty", "broken at line 3", "wrong columns", "an image part", "a map of rows"):
            yield Case(name=f"eval data: {name}", flags=lambda at, good, file=file, content=content: {"eval_dataset": _written(file,
            content)(at, good)[1]},
                       says=[*says])  # fmt: skip
    for name, file, content, says in (
        ("broken at line 3", "d.jsonl", _ROW * 2 + "{oops\n", ["rows 0 to 2", "d.jsonl line 3"]),
        ("no prompt", "d.jsonl", '{"a": 1}\n', ["d.jsonl line 1", "'a'"]),
        ("one array", "d.json", '[{"prompt": "5"}]', ["d.json", "a JSON array", "one object per line"]),
        ("images beside", "d.jsonl", '{"prompt": "5", "images": ["a.png"]}\n', ["`images`"]),
        ("empty", "d.jsonl", "\n", ["no rows"]), ("no parquet", "d.parquet", "hello", ["d.parquet", "parquet"]),
    ):  # fmt: skip
        yield Case(name=f"streamed data: {name}", flags=at_file(file, content), says=says,
                   extra=["--streaming", "true", "--max_prompt_length", "20"])  # fmt: skip
    yield Case(
        name="data: an empty folder", flags=lambda at, good: {"dataset": _make_folder(at / "data")}, says=["data", "directory without"]
    )
    yield Case(
        name="data: a folder of text",
        flags=lambda at, good: {"dataset": _make_folder(at / "data", {"a.txt": "5"})},
        says=["directory without"],
    )
    yield Case(
        name="data: a folder with one bad file",
        flags=lambda at, good: {"dataset": _make_folder(at / "data", {"a.jsonl": _ROW, "b.jsonl": "x\n"})},
        says=["b.jsonl", "line 1"],
    )
    for value, says in (
        ("/no/such/file.jsonl", ["/no/such/file.jsonl"]),
        ("gone.jsonl", ["gone.jsonl"]),
        ("./gone", ["gone"]),
        ("~/no/file.jsonl", ["~/no/file.jsonl"]),
        ("data.jsonl#100", ["data.jsonl"]),
    ):
        yield Case(name=f"data: {value}", flags={"dataset": value}, says=says)
    yield Case(name="data: a name nobody has", flags={"dataset": "nobody/nothing"}, says=["nobody/nothing"], commands=TRAIN)
    yield Case(name="data: two files", flags={"dataset": None}, extra=["--dataset", "a.jsonl", "b.jsonl"], says=["dataset", "a.jsonl"])
    yield Case(
        name="data: too long for the model",
        flags=at_file("d.jsonl", json.dumps({"prompt": "5 " * 300}) + "\n"),
        says=["308", "256"],
        commands=TRAIN,
    )
    yield Case(
        name="data: all longer than max_prompt_length",
        flags={"max_prompt_length": "1", "truncation_strategy": "delete"},
        says=["leaves no rows", "max_prompt_length (1)"],
        commands=TRAIN,
    )
    yield Case(name="data: chats for a base model", flags=_write_base_model, says=["chat template", "d.jsonl line 1"], commands=TRAIN)
    yield Case(name="data: a template that refuses", flags=_write_strict_template, says=["d.jsonl line 1", "no system"], commands=TRAIN)


def _make_folder(path: Path, files: Mapping[str, str] | None = None) -> str:
    path.mkdir(parents=True)
    for name, content in (files or {}).items():
        (path / name).write_text(content)
    return str(path)


def _copy(good: Mapping[str, str], at: Path) -> Path:
    shutil.copytree(good["model"], at / "model")
    return at / "model"


def _write_base_model(at: Path, good: Mapping[str, str]) -> Mapping[str, str]:
    model = _copy(good, at)
    (model / "chat_template.jinja").unlink()
    return {"model": str(model), "dataset": _written("d.jsonl", '{"prompt": [{"role": "user", "content": "5"}]}\n')(at, good)[1]}


def _write_strict_template(at: Path, good: Mapping[str, str]) -> Mapping[str, str]:
    model = _copy(good, at)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    return {"model": str(model), "dataset": _written("d.jsonl", '{"prompt": [{"role": "user", "content": "5"}]}\n')(at, good)[1]}


# ---- models ----------------------------------------------------------------------------------------------------------------------------


def make_model_cases() -> Iterator[Case]:
    def changed(change: Callable[[Path], Any]) -> Callable[[Path, Mapping[str, str]], Mapping[str, str]]:
        def flags(at: Path, good: Mapping[str, str]) -> Mapping[str, str]:
            model = _copy(good, at)
            change(model)
            return {"model": str(model)}

        return flags

    def config(**values: Any) -> Callable[[Path], Any]:
        def change(model: Path) -> None:
            found = json.loads((model / "config.json").read_text()) | values
            (model / "config.json").write_text(json.dumps({name: value for name, value in found.items() if value != "absent"}))

        return change

    def text(name: str, content: str | bytes) -> Callable[[Path], Any]:
        return lambda model: (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def cut(model: Path) -> None:
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])

    def index(content: Any) -> Callable[[Path], Any]:
        return text("model.safetensors.index.json", json.dumps(content))

    def without(*names: str) -> Callable[[Path], Any]:
        return lambda model: [(model / name).unlink() for name in names]

    rows: Sequence[tuple[str, Callable[[Path], Any], Arguments, Arguments]] = (
        ("no config.json", without("config.json"), ["config.json", "model"], BOTH),
        ("an empty config.json", text("config.json", ""), ["config.json"], BOTH),
        ("a broken config.json", text("config.json", "{"), ["config.json", "not valid JSON"], BOTH),
        ("a deep config.json", text("config.json", DEEP), ["config.json", "100 levels"], BOTH),
        ("a list for a config", text("config.json", "[]"), ["config.json"], BOTH),
        ("a config without sizes", text("config.json", '{"architectures": ["Qwen3ForCausalLM"]}'), ["num_attention_heads", "hidden_size"],
         BOTH),
        ("a config of bytes", text("config.json", b"\xff\xff"), ["config.json"], BOTH),
        ("no architecture", config(architectures="absent", model_type="absent"), ["architectures"], BOTH),
        ("an empty list of architectures", config(architectures=[], model_type="x"), ["architectures"], BOTH),
        ("an unknown architecture", config(architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel"], BOTH),
        ("a vision model", config(architectures=["Qwen2_5_VLForConditionalGeneration"]), ["vision_config"], BOTH),
        ("a classifier", config(architectures=["Qwen3ForSequenceClassification"]), ["Qwen3ForSequenceClassification"], BOTH),
        ("a size that is a word", config(hidden_size="many"), ["hidden_size", "many"], BOTH),
        ("a size of zero", config(num_hidden_layers=0), ["num_hidden_layers"], BOTH),
        ("a negative size", config(num_attention_heads=-4), ["num_attention_heads", "-4"], BOTH),
        ("a missing size", config(vocab_size="absent"), ["vocab_size"], BOTH),
        ("key heads that do not divide", config(num_key_value_heads=3), ["num_attention_heads (4)", "(3)"], BOTH),
        ("key heads that are a word", config(num_key_value_heads="two"), ["num_key_value_heads", "two"], BOTH),
        ("key heads below zero", config(num_key_value_heads=-2), ["num_key_value_heads", "-2"], BOTH),
        ("a head size that is a word", config(head_dim="wide"), ["head_dim", "wide"], BOTH),
        ("another activation", config(hidden_act="gelu"), ["hidden_act", "gelu"], BOTH),
        ("quantized", config(quantization_config={"bits": 4}), ["quantization_config"], BOTH),
        ("unknown rope", config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), ["longrope"], BOTH),
        ("rope without its factor", config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), ["factor"], BOTH),
        ("rope that is a word", config(rope_parameters="linear", rope_scaling="linear"), ["rope"], BOTH),
        ("an epsilon that is a word", config(rms_norm_eps="small"), ["rms_norm_eps", "small"], BOTH),
        ("positions that are a word", config(max_position_embeddings="long"), ["max_position_embeddings", "long"], BOTH),
        ("architectures that is a word", config(architectures="Qwen3ForCausalLM"), ["architectures"], BOTH),
        ("architectures of numbers", config(architectures=[3]), ["architectures"], BOTH),
        ("no weights", without("model.safetensors"), ["model.safetensors"], TRAIN),
        ("pickled weights", lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), ["pytorch_model.bin"], TRAIN),
        ("weights that are cut", cut, ["damaged"], BOTH), ("weights of no bytes", text("model.safetensors", b""), ["damaged"], BOTH),
        ("weights that are an LFS pointer", text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d\n"),
         ["model.safetensors", "damaged"], BOTH),
        ("an index without files", index({"weight_map": {"a": "model-1.safetensors"}}), ["model-1.safetensors"], BOTH),
        ("an index of nothing", index({}), ["model.safetensors.index.json"], BOTH),
        ("an index that is broken", text("model.safetensors.index.json", "{"), ["model.safetensors.index.json"], BOTH),
        ("an index that is deep", text("model.safetensors.index.json", DEEP), ["model.safetensors.index.json", "100 levels"], BOTH),
        ("an index with an empty map", index({"weight_map": {}}), ["index"], BOTH),
        ("an index that names a number", index({"weight_map": {"a": 3}}), ["index"], BOTH),
        ("no tokenizer", without("tokenizer.json", "tokenizer_config.json"), ["tokenizer"], TRAIN),
        ("a broken tokenizer", text("tokenizer.json", "{"), ["tokenizer"], TRAIN),
        ("a broken tokenizer_config", text("tokenizer_config.json", "{"), ["tokenizer"], TRAIN),
        ("a deep tokenizer", text("tokenizer.json", DEEP), ["tokenizer"], TRAIN),
        ("a deep tokenizer_config", text("tokenizer_config.json", DEEP), ["tokenizer"], TRAIN),
        ("a tokenizer of another kind", text("tokenizer.json", "{}"), ["tokenizer"], TRAIN),
        ("a broken chat template", lambda m: ((m / "chat_template.jinja").write_text("{% for"), None), ["template"], ()),
    )  # fmt: skip
    for name, change, says, commands in rows:
        if commands:
            yield Case(name=f"model: {name}", flags=changed(change), says=says, commands=commands)
    for value, says in (("/no/such/model", ["/no/such/model"]), ("./gone", ["./gone"]), ("~/gone", ["~/gone"]), ("a/b/c", ["a/b/c"])):
        yield Case(name=f"model: {value}", flags={"model": value}, says=says)
    yield Case(name="model: a file", flags=lambda at, good: {"model": good["dataset"]}, says=["data.jsonl"])
    yield Case(
        name="model: its weights", flags=lambda at, good: {"model": good["model"] + "/model.safetensors"}, says=["model.safetensors"]
    )
    yield Case(name="model: an empty folder", flags=lambda at, good: {"model": _make_folder(at / "none")}, says=["config.json"])
    yield Case(name="model: a name nobody has", flags={"model": "nobody/nothing"}, says=["nobody/nothing"], commands=TRAIN)
    yield Case(name="model: no name", flags={"model": "a b"}, says=["a b"], commands=TRAIN)
    yield Case(name="model: bad characters", flags={"model": "what?"}, says=["what?"], commands=TRAIN)
    yield Case(
        name="model: its folder has a model in it", flags=lambda at, good: {"model": str(Path(good["model"]).parent)}, says=["config.json"]
    )


# ---- adapters --------------------------------------------------------------------------------------------------------------------------


def make_adapter_cases() -> Iterator[Case]:
    """Return a valid adapter (rank 2, alpha 16, q_proj and down_proj), each time invalid in one way."""
    from megatron_grpo.core.weights.lora import LoraSettings
    from tests.lora_cases import write_random_adapter

    def changed(change: Callable[[Path], Any], **flags: str) -> Callable[[Path, Mapping[str, str]], Mapping[str, str]]:
        def made(at: Path, good: Mapping[str, str]) -> Mapping[str, str]:
            if not (at / "adapter").exists():
                write_random_adapter(good["model"], at / "adapter", LoraSettings(rank=2, alpha=16, target_modules=("q_proj", "down_proj")))
            change(at / "adapter")
            return {"tuner_type": "lora", "adapters": str(at / "adapter"), **flags}

        return made

    def config(**changes: Any) -> Callable[[Path], Any]:
        def change(folder: Path) -> None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

        return change

    def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
        def write(folder: Path) -> None:
            from safetensors.numpy import load_file, save_file

            held = load_file(folder / "adapter_model.safetensors")
            change(held)
            save_file(held, folder / "adapter_model.safetensors")

        return write

    down = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    rows: tuple[tuple[str, Callable[[Path], Any], dict[str, str], Arguments], ...] = (
        ("no configuration", lambda a: (a / "adapter_config.json").unlink(), {}, ["adapter_config.json"]),
        ("no tensors", lambda a: (a / "adapter_model.safetensors").unlink(), {}, ["adapter_model.safetensors"]),
        ("a broken configuration", lambda a: (a / "adapter_config.json").write_text("{"), {}, ["adapter_config.json cannot be read"]),
        ("a deep configuration", lambda a: (a / "adapter_config.json").write_text(DEEP), {}, ["adapter_config.json cannot be read"]),
        ("cut tensors", lambda a: (a / "adapter_model.safetensors").write_bytes(b"12345678"), {}, ["damaged"]),
        ("another kind", config(peft_type="VERA"), {}, ["peft_type VERA"]),
        ("DoRA", config(use_dora=True), {}, ["use_dora is not there"]),
        ("modules_to_save", config(modules_to_save=["lm_head"]), {}, ["modules_to_save is not there"]),
        ("PiSSA", config(init_lora_weights="pissa"), {}, ["'pissa' is not there"]),
        ("a rank that is a word", config(r="two"), {}, ["r (two)"]),
        ("a rank above vLLM's", config(r=1024), {}, ["r (1024)"]),
        ("an alpha of none", config(lora_alpha=None), {}, ["lora_alpha (None)"]),
        ("a pattern that is none", config(target_modules="(["), {}, ["not a regular expression"]),
        ("an embedding", config(target_modules=["q_proj", "down_proj", "embed_tokens"]), {}, ["embed_tokens"]),
        ("another model's layers", config(target_modules=["c_attn"]), {}, ["c_attn", "q_proj"]),
        ("another rank than its tensors", config(r=4), {}, ["(2, 64)", "(4, 64)"]),
        ("a tensor too few", tensors(lambda held: held.pop(down)), {}, ["lacks 1", down]),
        ("a tensor too many", tensors(lambda held: held.update({"stray.weight": held[down]})), {}, ["besides", "stray.weight"]),
        ("another rank typed", lambda a: None, {"lora_rank": "8"}, ["lora_rank (8)", "adapters (2 in"]),
        ("another alpha typed", lambda a: None, {"lora_alpha": "8"}, ["lora_alpha (8.0)", "adapters (16.0 in"]),
        ("other targets typed", lambda a: None, {"target_modules": "q_proj"}, ["target_modules (q_proj)", "down_proj"]),
    )  # fmt: skip
    for name, change, flags, says in rows:
        yield Case(name=f"adapter: {name}", flags=changed(change, **flags), says=says)
    yield Case(
        name="adapter: of the reference, without tensors",
        flags=lambda at, good: {
            **(made := changed(lambda a: (a / "adapter_model.safetensors").unlink())(at, good)),
            "adapters": None,
            "ref_adapters": made["adapters"],
            "beta": "0.1",
        },
        says=["ref_adapters", "adapter_model.safetensors"],
    )


# ---- rewards ---------------------------------------------------------------------------------------------------------------------------


def make_reward_cases() -> Iterator[Case]:
    def file(content: str, function: str = "f") -> Callable[[Path, Mapping[str, str]], Mapping[str, str]]:
        return lambda at, good: {"reward_funcs": f"{_written('r.py', content)(at, good)[1]}:{function}"}

    rows = (
        ("a syntax error", "def f(:\n", ["r.py", "SyntaxError"]), ("an empty file", "", ["no functions"]),
        ("an import that fails", "import no_such_module\n", ["no_such_module"]), ("sys.exit", "import sys; sys.exit(0)\n",
         ["SystemExit: 0"]),
        ("exit()", "exit()\n", ["r.py"]), ("KeyboardInterrupt", "raise KeyboardInterrupt\n", ["KeyboardInterrupt"]),
        ("an exception", "raise ValueError('no key')\n", ["ValueError: no key"]), ("a BaseException", "raise GeneratorExit('x')\n",
         ["GeneratorExit"]),
        ("an exception without words", "assert False\n", ["AssertionError"]), ("a NameError", "f = g\n", ["'g' is not defined"]),
        ("another name", "def ff(completions): return []\n", ["'f'", "Did you mean ff?"]), ("a number", "f = 3\n", ["'f'"]),
        ("a class without __call__", "class f: pass\n", ["without `__call__`"]),
        ("a class that needs arguments", "class f:\n  def __init__(self, a): pass\n  def __call__(self, completions): return []\n",
         ["without arguments"]),
        ("a class that fails", "class f:\n  def __init__(self): 1/0\n  def __call__(self, completions): return []\n",
         ["ZeroDivisionError"]),
        ("a column that is missing", "def f(completions, hint): return []\n", ["`hint`", "`answer`"]),
        ("two columns that are missing", "def f(completions, hint, level): return []\n", ["`hint`", "`level`"]),
        ("a positional column", "def f(completions, hint, /): return []\n", ["hint"]), ("no arguments", "def f(): return []\n", ["f"]),
        ("bytes", "# \udcff".encode("utf-8", "surrogateescape") + b"\n", ["r.py"]), ("a null byte", "f = 1\x00\n", ["r.py"]),
        ("a file that recurses", "def g(): g()\ng()\n", ["RecursionError"]), ("an import of itself", "from r import f\n", ["r.py"]),
        ("tabs and spaces", "def f(completions):\n\treturn []\n        x = 1\n", ["r.py"]),
    )  # fmt: skip
    for name, content, says in rows:
        text = content if isinstance(content, str) else content.decode("utf-8", "surrogateescape")
        flags = (
            file(text)
            if isinstance(content, str)
            else (lambda at, good, content=content: {"reward_funcs": f"{_written('r.py', content)(at, good)[1]}:f"})
        )
        yield Case(name=f"reward: {name}", flags=flags, says=says)
    for value, says in (
        ("gone.py:f", ["gone.py"]), ("/no/such/r.py:f", ["/no/such/r.py"]), ("lenght", ["'lenght'", "length"]), ("mine", ["'mine'"]),
        ("reward.py", ["reward.py"]), (":f", ["''"]), ("r.py:", ["r.py"]), ("no_such_package.module:f", ["no_such_package"]),
        ("json:no_such", ["json", "no_such"]), ("a b:c:d", ["a"]), ("os:getpid:x", ["os:getpid"]), ("..:f", ["'..'"]), (".a:f", [".a"]),
        ("gone.py::f", ["gone.py"]), ("math,format", ["math,format"]), ("math math", ["math more than once"]), ("json:dumps", ["dumps",
         "obj"]),
        ("os", ["'os'"]), ("builtins:int", ["builtins:int"]), ("math.py:f", ["math.py"]), ("none", ["reward_funcs"]),
    ):  # fmt: skip
        yield Case(name=f"reward: {value}", flags={"reward_funcs": None}, extra=["--reward_funcs", *value.split(" ")], says=says,
                   commands=TRAIN if value == "none" else BOTH)  # fmt: skip
    yield Case(name="reward: a folder", flags=lambda at, good: {"reward_funcs": f"{_make_folder(at / 'r.py')}:f"}, says=["r.py"])
    for weights in ("1 2", "1 2 3"):
        yield Case(
            name=f"reward: weights {weights} for one",
            extra=["--reward_weights", *weights.split()],
            says=["reward_weights", str(len(weights.split()))],
        )
    yield Case(
        name="reward: a weight for two",
        flags={"reward_funcs": None},
        extra=["--reward_funcs", "length", "accuracy", "--reward_weights", "1"],
        says=["reward_weights has 1", "2 reward_funcs"],
    )
    for value in ("nan", "inf", "x", "1,2", "none 1"):
        yield Case(name=f"reward: weight {value}", extra=["--reward_weights", *value.split()], says=["reward_weights"])


# ---- checkpoints and places ------------------------------------------------------------------------------------------------------------


def make_path_cases() -> Iterator[Case]:
    def place(name: str, content: str | None) -> Callable[[Path, Mapping[str, str]], Mapping[str, str]]:
        """Write a file at a path in output_dir; a directory if `content` is None."""

        def flags(at: Path, good: Mapping[str, str]) -> Mapping[str, str]:
            path = at / "out" / name if name else at / "out"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(parents=True) if content is None else path.write_text(content)
            return {"output_dir": str(at / "out")}

        return flags

    pointer, manifest = "checkpoints/latest_checkpointed_iteration.txt", "checkpoints/iter_0000001/manifest.json"
    rows = (
        ("output_dir is a file", "", "x", ["out", "is a file"]), ("the pointer names a missing step", pointer, "7", ["7"]),
        ("the pointer is a word", pointer, "release", ["release"]), ("the pointer is empty", pointer, "",
         ["latest_checkpointed_iteration"]),
        ("the pointer is a folder", pointer, None, ["latest_checkpointed_iteration"]), ("a broken manifest", manifest, "{",
         ["manifest.json"]),
        ("an empty manifest", manifest, "", ["manifest.json"]), ("a manifest of another format", manifest, '{"format": 9}', ["9"]),
        ("a manifest that is a list", manifest, "[]", ["manifest.json"]), ("a manifest without files", manifest,
         '{"format": 2, "files": {}}', ["manifest.json"]),
        ("a manifest that is a folder", manifest, None, ["manifest.json"]), ("checkpoints is a file", "checkpoints", "x", ["checkpoints"]),
        ("a checkpoint without a manifest", "checkpoints/iter_0000001/model.pt", "x", ["iter_0000001"]),
    )  # fmt: skip
    for name, file, content, says in rows:
        yield Case(name=f"place: {name}", flags=place(file, content), says=says)
    yield Case(
        name="place: an earlier run and resume never",
        flags=lambda at, good: {**place("metrics.jsonl", "{}\n")(at, good), "resume": "never"},
        says=["resume is never"],
    )
    for name, file, content, says in rows[5:11]:
        yield Case(
            name=f"resume: {name}",
            flags=lambda at, good, file=file, content=content: {
                "resume": str(Path(place(file, content)(at, good)["output_dir"]) / "checkpoints/iter_0000001"),
                "output_dir": str(at / "other"),
            },
            says=says,
        )
    yield Case(name="resume: an empty folder", flags=lambda at, good: {"resume": _make_folder(at / "empty")}, says=["empty"])
    yield Case(name="resume: a file", flags=lambda at, good: {"resume": good["dataset"]}, says=["data.jsonl"])
    yield Case(name="resume: a model", flags=lambda at, good: {"resume": good["model"]}, says=["model"])
    yield Case(name="eval: no such file", flags={"eval_dataset": "gone.jsonl", "eval_steps": "1"}, says=["gone.jsonl"])
    yield Case(name="eval: none of the rewards", flags={"eval_reward": "accuracy"}, says=["accuracy"])
    yield Case(name="eval: no prompts", flags={"eval_dataset": "data.jsonl", "eval_num_prompts": "0"}, says=["eval_num_prompts (0)"])
    for service in ("wandb", "swanlab", "mlflow", "tensorboard"):
        from importlib.util import find_spec

        if find_spec(service) is None:
            yield Case(name=f"report_to {service}, which is not installed", flags={"report_to": service}, says=[service])
    yield Case(name="report_to none and another", flags={"report_to": None}, extra=["--report_to", "none", "nothing"], says=["nothing"])


def make_all_cases() -> list[Case]:
    makers = (
        make_settings_cases,
        make_size_cases,
        make_pair_cases,
        make_command_line_cases,
        make_yaml_cases,
        make_framework_cases,
        make_dataset_cases,
        make_model_cases,
        make_adapter_cases,
        make_reward_cases,
        make_path_cases,
    )
    return [case for maker in makers for case in maker()]
