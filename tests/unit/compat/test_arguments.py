"""The argument pages of five frameworks against `plan` and `train`: each argument has a row, and no row contradicts a message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.commands.compat import DIALECTS, settle, tables
from megatron_grpo.commands.compat.foreign_args import NOTHING
from megatron_grpo.run.config import parse, table
from megatron_grpo.run.config.table import InvalidValueError, names, read_value
from tools import arguments, their_arguments

SYSTEMS = list(arguments.SYSTEMS)


def read_setting(cfg, name: str):
    return getattr(getattr(cfg, table()[name].group), name)


def test_argument_pages_have_one_row_per_argument():
    for system in SYSTEMS:
        listed, section = [], ""
        for line in arguments.make_page(system).splitlines():
            if line.startswith("## "):
                section = line.strip("# `") + "."
            elif line.startswith("| `"):
                assert len(re.split(r"(?<!\\)\|", line)) == 5, line
                listed.append(section + line.split("`")[1])
        assert sorted(listed) == sorted(name for name, *_ in arguments.iterate_arguments(system))


def test_the_index_has_the_counts_of_each_system():
    index = (Path(__file__).parents[3] / "docs" / "arguments.md").read_text(encoding="utf-8")
    for system, (_, title) in arguments.SYSTEMS.items():
        assert f"| {title} | `{system}` | " + " | ".join(map(str, arguments.count_kinds(system))) + " |" in index


def test_trl_argument_list_equals_installed_trl():
    """Names and defaults; `python tools/their_arguments.py trl` writes it anew."""
    assert arguments.read_arguments("trl")[1] == their_arguments.read_trl("")[1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_argument_rows_are_not_empty_and_name_existing_settings(system):
    rows = list(arguments.iterate_arguments(system))
    assert len(rows) > 150
    assert [name for name, _, what, _ in rows if not what or what.endswith(": ")] == []
    dialect = DIALECTS[system]
    for row in [*dialect.names.values(), *dialect.patterns.values()]:
        assert not row.native or row.native in table(), row
    for default in dialect.defaults:
        assert set(default.native) <= set(table()), default


# Names, places and hubs, which are nobody's default here; what is the same in other words; and what `settle` makes where it is asked for.
OTHERWISE = {
    "swift-megatron": {"output_dir", "report_to", "swanlab_project", "wandb_project", "global_batch_size", "lora_dropout", "offload_model",
                       "offload_optimizer", "async_generate", "recompute_modules", "load_from_cache_file", "use_hf", "merge_lora",
                       "target_modules", "vllm_enable_lora"},
    "trl": {"project", "vllm_server_host", "bf16"},
    "verl": {"data.train_files", "data.val_files", "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name",
             "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.dtype", "actor_rollout_ref.actor.megatron.sequence_parallel",
             "actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
             "actor_rollout_ref.rollout.val_kwargs.n", "actor_rollout_ref.rollout.val_kwargs.temperature"},
    "skyrl": {"trainer.policy.model.path", "trainer.project_name", "trainer.run_name", "trainer.export_path", "trainer.bf16",
              "generator.eval_n_samples_per_prompt", "generator.eval_sampling_params.temperature", "trainer.algorithm.eps_clip_high",
              "generator.inference_engine.model_dtype", "trainer.ckpt_interval", "trainer.epochs", "trainer.eval_interval"},
    "slime": {"n_samples_per_eval_prompt"},
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_framework_defaults_that_differ_from_native_ones_are_applied(system):
    """With nothing typed, the configuration holds what their list has, wherever one of their names is one of our settings.

    `none` is no default but what their program works out.
    """
    dialect = DIALECTS[system]
    cfg = parse(["--dialect", system], dialects=lambda: DIALECTS).config
    kept = {each.name for each in dialect.defaults if not each.native}
    unlike = []
    for name, default in arguments.read_arguments(arguments.SYSTEMS[system][0])[1].items():
        native = arguments.find_setting(dialect, name)
        passed_over = (
            default == "none"
            or "val_kwargs" in name
            or "eval_sampling_params" in name
            or "$" in default
            or name in OTHERWISE[system]
            or {name, name.split(".", 1)[-1]} & kept
        )
        if not native or dialect.size(name) is not None or native in dialect.settings or passed_over:
            continue
        row, setting = dialect.row(name)[1], table()[native]
        word = row.values.get(default, default) if row else default
        try:
            theirs = read_value(setting, word.strip("[]") or "none" if setting.is_list else word)
        except InvalidValueError:  # a word of theirs ("auto") that is no value here
            continue
        if read_setting(cfg, native) != theirs:
            unlike.append((name, default, read_setting(cfg, native)))
    assert unlike == []


# What their program works out, or reads elsewhere: (module, name).
WORKED_OUT = {
    ("skyrl", "strategy"), ("skyrl", "max_input_length"), ("skyrl", "algorithm.max_seq_len"),
    ("verl", "algorithm.adv_estimator"), ("verl", "actor.ppo_micro_batch_size"), ("verl", "actor.strategy"),
    ("slime", "global_batch_size"), ("slime", "rollout_seed"), ("slime", "seed"), ("slime", "rollout_batch_size"),
    ("slime", "num_steps_per_rollout"), ("slime", "dynamic_sampling_filter_path"), ("slime", "eps_clip_high"),
    ("slime", "max_tokens_per_gpu"), ("slime", "over_sampling_batch_size"),
}  # fmt: skip


def list_names_read_together(module) -> Iterator[tuple[str, str]]:
    """Yield (name, default if it is not one of `fallbacks`) of names that are read together, by functions and by rules."""
    implicit = {"is_true": "false", "integer": "0"}
    folder = Path(tables.__file__).parent
    for call in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
        if isinstance(call, ast.Call) and (match := re.fullmatch(r"args\.(text|number|integer|is_true|choice)", ast.unparse(call.func))):
            default = call.args[1:2] if match[1] in ("text", "integer") else []
            if isinstance(call.args[0], ast.Constant) and all(isinstance(node, ast.Constant) for node in default):
                yield call.args[0].value, str(default[0].value) if default else implicit.get(match[1], "none")
    for name, word in re.findall(r"\btheir ([\w.]+)(=true)?", (folder / f"{module}.yaml").read_text()):
        yield name, "false" if word else "none"


@pytest.mark.parametrize("system", ["skyrl", "verl", "slime", "trl"])
def test_translation_fallback_defaults_equal_class_defaults(system):
    """Names that are read together have their defaults in `fallbacks` of the table; others are false, 0 or none."""
    dialect = DIALECTS[system]
    theirs = {dialect.row(name)[0]: default for name, default in arguments.read_arguments(arguments.SYSTEMS[system][0])[1].items()}
    theirs |= {dialect.size(name): default for name, default in theirs.items() if dialect.size(name)}
    ours = {name: dialect.fallbacks.get(name, default) for name, default in list_names_read_together(system)}
    ours |= tables.contents(system)["fallbacks"]
    compared = {name for name in ours if name in theirs and (system, name) not in WORKED_OUT}
    unlike = []
    for name in compared:
        are_numbers = (ours[name].lstrip("-") + theirs[name].lstrip("-")).replace(".", "").isdigit()
        if float(ours[name]) != float(theirs[name]) if are_numbers else ours[name] != theirs[name]:
            unlike.append((name, ours[name], theirs[name]))
    assert unlike == [] and len(compared) >= (2 if system == "trl" else 15), compared


@pytest.mark.parametrize("system", ["swift-megatron", "ms-swift", *SYSTEMS])
def test_framework_rules_name_existing_settings_or_arguments(system):
    """A condition on a misspelled name would never hold."""
    dialect = DIALECTS[system]

    def rules(rows) -> Iterator[dict]:
        for row in rows:
            if isinstance(row, dict):
                yield row
                yield from rules(row.get("then", ()))

    file = system.removesuffix("-megatron").replace("-", "_")
    parts = [part for part in tables.contents(file)["settle"].values() if not isinstance(part, str)]
    all_rules = list(rules(row for part in [*parts, *tables.contents("common")["rules"].values()] for row in part))
    ours, foreign = set(), set()
    for condition in (part for rule in all_rules for text in rule.get("if", ()) for part in text.split(" | ")):
        _, kind, name, *_ = settle.CONDITION.fullmatch(condition).groups()
        (foreign if kind in ("typed", "their") else ours).add(name)
    for rule in all_rules:
        ours |= {*rule.get("drop", "").split(), *rule.get("set", ())}
        foreign |= set(rule.get("unread", "").split())
        assert set(rule) <= {"if", "then", "drop", "unread", "set", "note", "refuse", "default"}
    assert ours - set(table()) == set()
    assert {name for name in foreign if not (dialect.knows(name) or name in table())} == set()
    for name in dialect.fallbacks:
        assert dialect.knows(name) or name in table(), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_framework_arguments_are_rejected_or_listed_with_text_of_their_row(system):
    dialect = DIALECTS[system]
    rows = {name: dialect.row(name)[1] for name, *_ in arguments.iterate_arguments(system) if dialect.size(name) is None}
    tasks = {name for name, row in rows.items() if row is not None and row.is_task}  # of which nothing else is said
    spoken = {name: row for name, row in rows.items() if row is not None and not (row.native or row.read) and name not in tasks}
    for name in tasks:
        alone = parse(["--dialect", system, f"--{name}=something-else", "--lr", "x"], dialects=lambda: DIALECTS)
        assert [problem.message for problem in alone.problems] == [f"{name} (something-else): {rows[name].lacks}."]
    parsed = parse(["--dialect", system, *(f"--{name}=something-else" for name in spoken)], dialects=lambda: DIALECTS)
    messages = "\n".join(problem.message for problem in parsed.problems)
    for name, row in spoken.items():
        assert (row.lacks or row.why or NOTHING) in arguments.describe_argument(dialect, name)
        lines = [line for line in messages.split("\n") if re.search(rf"(^|, ){re.escape(name)} \(something-else\)", line)]
        assert [line.endswith(f": {row.lacks}.") for line in lines] == ([True] if row.lacks else []), name
        assert (name in parsed.aside.get("command line", [])) == (not row.lacks), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_native_setting_names_are_not_rejected_by_frameworks(system):
    """Settings that arrive here must leave the tables of what is not there. Named are those that mean another thing in their program."""
    means_another = {
        "swift-megatron": {"reward_model", "resume_from_checkpoint", "vllm_data_parallel_size"},
        "trl": {"rollout_func"},
        "skyrl": {"max_turns"},
        "slime": {"load", "loss_type"},
    }.get(system, set())
    dialect = DIALECTS[system]
    refused = {
        name
        for name, row in dialect.names.items()
        if name in names() and not (row.native or row.read or row.values) and row.off != ("true",)
    }
    assert refused - means_another == set()
