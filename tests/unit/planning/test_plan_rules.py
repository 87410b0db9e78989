"""Size rules and nearest valid values, against naive rules and an exhaustive search."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.cli import main
from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes, size_problems
from megatron_grpo.run.config.sizes import ModelDivisors

NAMES = {
    "ws": "world_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "a": "gradient_accumulation_steps",
    "gen": "generation_batch_size",
    "spg": "steps_per_generation",
    "g": "num_generations",
    "mu": "num_iterations",
}


def is_multiple(a, b) -> bool:
    return b > 0 and a % b == 0


def compute_sizes(v: dict) -> dict | None:
    """Native sizes by the definitions of docs/batching.md section 1, written down without any cleverness; None when a rule is broken."""
    v = {"ws": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "mbs": 1, "g": 8, "mu": 1} | {k: x for k, x in v.items() if x is not None}
    if any(x < 1 for k, x in v.items() if k not in ("layers", "experts", "unaligned")) or v["g"] < 2:
        return None
    if not is_multiple(v["ws"], v["tp"] * v["pp"] * v["cp"]) or not is_multiple(v["ws"], v["etp"] * v["ep"] * v["pp"]):
        return None
    unit = v["mbs"] * v["ws"] // (v["tp"] * v["pp"] * v["cp"])
    if "gbs" not in v:
        v["gbs"] = v["a"] * unit if "a" in v else 16
    if not is_multiple(v["gbs"], unit) or v.get("a", v["gbs"] // unit) != v["gbs"] // unit:
        return None
    if "gen" not in v:
        v["gen"] = v["gbs"] * v.get("spg", 1)
    if not is_multiple(v["gen"], v["g"]) or not is_multiple(v["gen"], unit):
        return None
    if "spg" in v and v["gen"] != v["gbs"] * v["spg"]:
        return None
    if not v.get("unaligned") and not is_multiple(v["gen"], v["gbs"]):
        return None
    if "vpp" in v and (v["vpp"] < 2 or v["pp"] < 2 or not is_multiple(v["gbs"] // unit, v["pp"])):
        return None
    if v.get("layers") and not is_multiple(v["layers"], v["pp"] * v.get("vpp", 1)):
        return None
    if v.get("experts") and (not is_multiple(v["experts"], v["ep"]) or v["tp"] > 1):  # sequence_parallel is off throughout
        return None
    return v


def make_argv(values: dict) -> list[str]:
    words = [word for key, value in values.items() if key in NAMES and value is not None for word in (f"--{NAMES[key]}", str(value))]
    return words + (["--allow_unaligned_generation"] if values.get("unaligned") else [])


def list_problems(values: dict):
    parsed = parse(make_argv(values), dialects=lambda: DIALECTS)
    assert not parsed.problems
    return size_problems(parsed.config, ModelDivisors(num_layers=values.get("layers"), num_experts=values.get("experts"))), parsed.config


def draw_optional(*values):
    return st.one_of(st.none(), st.sampled_from(values))


configurations = st.fixed_dictionaries(
    {
        "ws": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]),
        "tp": st.sampled_from([1, 1, 2, 3]),
        "pp": st.sampled_from([1, 1, 2, 4]),
        "cp": st.sampled_from([1, 1, 2]),
        "vpp": draw_optional(1, 2, 3),
        "ep": st.sampled_from([1, 1, 2]),
        "etp": st.sampled_from([1, 1, 2]),
        "mbs": st.sampled_from([-32, 0, 1, 1, 2, 3, 4]),
        "gbs": draw_optional(8, 12, 16, 24, 32, 48, 60),
        "a": draw_optional(1, 2, 3, 4, 6),
        "gen": draw_optional(8, 16, 24, 36, 48, 64, 96),
        "spg": draw_optional(1, 2, 3, 5),
        "g": st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
        "mu": st.sampled_from([1, 1, 2, 0]),
        "unaligned": st.booleans(),
        "layers": draw_optional(4, 6, 24),
        "experts": draw_optional(4, 8),
    }
)
mostly_right = st.fixed_dictionaries(
    {
        "ws": st.sampled_from([1, 2, 4, 6, 8, 16]),
        "tp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2]),
        "cp": st.just(1),
        "vpp": st.none(),
        "ep": st.just(1),
        "etp": st.just(1),
        "mbs": st.sampled_from([1, 2, 3, 4]),
        "gbs": draw_optional(16, 24, 32, 48, 60),
        "a": draw_optional(2, 4),
        "gen": draw_optional(24, 48, 64, 96),
        "spg": draw_optional(1, 2, 3),
        "g": st.sampled_from([2, 3, 4, 5, 8]),
        "mu": st.just(1),
        "unaligned": st.booleans(),
        "layers": draw_optional(24),
        "experts": st.none(),
    }
)


@settings(max_examples=1500)
@given(st.one_of(configurations, mostly_right))
def test_config_is_valid_exactly_if_naive_rules_hold(values):
    problems, cfg = list_problems(values)
    expected = compute_sizes(values)
    assert (not problems) == (expected is not None), (values, problems)
    if expected is None:
        return
    sizes = checked_sizes(cfg, num_layers=values["layers"], num_experts=values["experts"])
    told = sizes.global_batch_size, sizes.generation_batch_size, sizes.num_generations
    assert told == (expected["gbs"], expected["gen"], expected["g"])
    assert sizes.global_batch_size == sizes.gradient_accumulation_steps * sizes.micro_batch_size * sizes.dp_size
    assert sizes.micro_steps_per_rollout * sizes.micro_batch_size * sizes.dp_size == sizes.generation_batch_size
    assert sizes.num_rollout_prompts * sizes.num_generations == sizes.generation_batch_size


@settings(max_examples=300)
@given(st.one_of(configurations, mostly_right))
def test_nearest_values_equal_exhaustive_search(values):
    problems, cfg = list_problems(values)
    key_of = {name: key for key, name in NAMES.items()}
    for problem in problems:
        assert problem.flags and problem.message.endswith(".")
        for flag in problem.flags:
            if flag not in key_of:
                continue
            key = key_of[flag]
            present = values[key]
            limit = 130
            below = next((x for x in range(present - 1, 0, -1) if compute_sizes({**values, key: x})), None)
            above = next((x for x in range(max(present, 0) + 1, limit) if compute_sizes({**values, key: x})), None)
            offered = [x for x in problem.nearest.get(flag, []) if x < limit]
            assert offered == [x for x in (below, above) if x is not None], (flag, values, problem)


@settings(max_examples=150)
@given(mostly_right)
def test_size_problem_flags_are_those_given(values):
    problems, cfg = list_problems(values)
    typed = {NAMES[key] for key, value in values.items() if key in NAMES and value is not None}
    for problem in problems:
        assert set(problem.flags) <= typed and set(problem.nearest) <= set(problem.flags)


DIALECT_CASES = {
    "trl": {
        "num_processes": (1, 2, 3, 4, 6),
        "per_device_train_batch_size": (1, 2, 3, 8),
        "gradient_accumulation_steps": (1, 2, 3),
        "steps_per_generation": (None, 1, 2, 5),
        "generation_batch_size": (None, None, 24, 50),
        "num_generations": (2, 5, 8),
    },
    "skyrl": {
        "world_size": (1, 2, 4, 6),
        "train_batch_size": (8, 16, 20),
        "policy_mini_batch_size": (4, 6, 8),
        "micro_train_batch_size_per_gpu": (1, 2, 3),
        "n_samples_per_prompt": (2, 5, 8),
    },
    "skyrl-doc": {
        "world_size": (1, 2, 4, 6),
        "train_batch_size": (8, 16, 20),
        "policy_mini_batch_size": (4, 6, 8),
        "micro_train_batch_size_per_gpu": (1, 2, 3),
        "n_samples_per_prompt": (2, 5, 8),
    },
    "cs336": {
        "world_size": (1, 2),
        "train_batch_size": (None, 16, 24, 32),
        "gradient_accumulation_steps": (None, 2, 4, 5),
        "micro_train_batch_size": (None, 1, 2, 3),
        "group_size": (2, 3, 8),
        "rollout_batch_size": (None, 32, 48),
    },
}


def is_valid_in_dialect(dialect: str, values: dict) -> bool:
    """Each system's own arithmetic, then the native rules on what comes out."""
    v = {key: value for key, value in values.items() if value is not None}
    if any(value < 1 for value in v.values()):
        return False
    if dialect == "trl":
        ws, mbs, a = v["num_processes"], v["per_device_train_batch_size"], v["gradient_accumulation_steps"]
        if "generation_batch_size" in v and "steps_per_generation" in v:
            return False
        gen = v.get("generation_batch_size", mbs * ws * v.get("steps_per_generation", a))
        return compute_sizes(dict(ws=ws, mbs=mbs, a=a, gen=gen, g=v["num_generations"], unaligned=True)) is not None
    if dialect.startswith("skyrl"):
        n = v["n_samples_per_prompt"]
        mini = v["policy_mini_batch_size"] * (n if dialect == "skyrl" else 1)
        return (
            compute_sizes(dict(ws=v["world_size"], mbs=v["micro_train_batch_size_per_gpu"], gbs=mini, gen=v["train_batch_size"] * n, g=n))
            is not None
        )
    gbs, a, mbs, ws = v.get("train_batch_size"), v.get("gradient_accumulation_steps"), v.get("micro_train_batch_size"), v["world_size"]
    if mbs is None and gbs is not None and a is not None:
        if gbs % (a * ws):
            return False
        mbs = gbs // (a * ws)
    return compute_sizes(dict(ws=ws, mbs=mbs, gbs=gbs, a=a, gen=v.get("rollout_batch_size"), g=v["group_size"])) is not None


def make_dialect_argv(dialect: str, values: dict) -> list[str]:
    return ["--dialect", dialect, *(word for key, value in values.items() if value is not None for word in (f"--{key}", str(value)))]


@pytest.mark.parametrize("dialect", DIALECT_CASES)
@settings(max_examples=300)
@given(data=st.data())
def test_size_problems_of_frameworks_use_their_names(dialect, data):
    values = {key: data.draw(st.sampled_from(choices), label=key) for key, choices in DIALECT_CASES[dialect].items()}
    parsed = parse(make_dialect_argv(dialect, values), dialects=lambda: DIALECTS)
    assert not parsed.problems
    problems = size_problems(parsed.config)
    assert (not problems) == is_valid_in_dialect(dialect, values), (values, problems)
    for problem in problems:
        assert set(problem.nearest) <= set(problem.flags) <= set(values), problem
        for flag in problem.flags:
            present, limit = values[flag], 100
            below = next((x for x in range(present - 1, 0, -1) if is_valid_in_dialect(dialect, {**values, flag: x})), None)
            above = next((x for x in range(present + 1, limit) if is_valid_in_dialect(dialect, {**values, flag: x})), None)
            offered = [x for x in problem.nearest.get(flag, []) if x < limit]
            assert offered == [x for x in (below, above) if x is not None], (flag, values, problem)


MENDED = [
    (
        "verl rollout.n=5 actor.ppo_mini_batch_size=7 data.train_batch_size=56",
        "global_batch_size 35 (ppo_mini_batch_size 7 x rollout.n 5) must be a multiple of micro_batch_size 1 "
        "(ppo_micro_batch_size_per_gpu 1 by default) x dp_size (world_size 8) = 8: 35 = 4 x 8 + 3. "
        "Use ppo_mini_batch_size 8, or rollout.n 8.",
    ),
    (
        "trl --steps_per_generation 3 --per_device_train_batch_size 1",
        "a rollout of 3 micro-steps (steps_per_generation 3 / gradient_accumulation_steps 1) x micro_batch_size 1 "
        "(per_device_train_batch_size 1) x dp_size (world_size 1) = 3 completions must be a multiple of num_generations (8, the default): "
        "3 = 0 x 8 + 3. Use steps_per_generation 8, or per_device_train_batch_size 8.",
    ),
    (
        "skyrl --train_batch_size 0",
        "generation_batch_size must be at least 1, not 0 (train_batch_size 0 x n_samples_per_prompt 5 by default). "
        "Use train_batch_size 256.",
    ),
]


@pytest.mark.parametrize(("words", "message"), MENDED)
def test_size_problem_of_framework_names_native_and_original_setting(words, message):
    parsed = parse(["--dialect", *words.split()], dialects=lambda: DIALECTS)
    assert message in [problem.message for problem in size_problems(parsed.config)]


def test_size_problem_shows_arithmetic_and_valid_values():
    with pytest.raises(ConfigError) as error:
        checked_sizes(parse(["--global_batch_size", "64", "--generation_batch_size", "96"], dialects=lambda: DIALECTS).config)
    [problem] = error.value.problems
    assert problem.message.startswith("generation_batch_size (96) must be a multiple of global_batch_size (64): 96 = 1 x 64 + 32")
    assert "generation_batch_size 64 or 128" in problem.message
    assert problem.nearest == {"generation_batch_size": [64, 128], "global_batch_size": [48, 96]}


def test_size_problems_that_are_independent_are_both_reported_without_values():
    problems, _ = list_problems({"ws": 7, "tp": 2, "gbs": 30, "gen": 64, "g": 7})
    assert len(problems) >= 3
    assert not any(problem.nearest for problem in problems)


def test_nearest_values_of_100000_ranks_are_found_quickly():
    problems, _ = list_problems({"ws": 100_000, "mbs": 3, "gbs": 1_000_000, "g": 8})
    assert problems[0].nearest["global_batch_size"] == [900_000, 1_200_000]
    assert problems[0].nearest["micro_batch_size"] == [2, 5]


def test_size_problems_of_25_kinds_each_give_one_message():
    """Each of these breaks one rule, and is told so in one sentence."""
    cases = [
        ["--micro_batch_size", "0"],
        ["--num_generations", "1"],
        ["--virtual_pipeline_model_parallel_size", "1"],
        ["--world_size", "3", "--tensor_model_parallel_size", "2"],
        ["--world_size", "2", "--expert_model_parallel_size", "4"],
        ["--world_size", "2", "--vllm_tensor_parallel_size", "3"],
        ["--micro_batch_size", "3"],
        ["--global_batch_size", "16", "--gradient_accumulation_steps", "3"],
        ["--num_generations", "5"],
        ["--allow_unaligned_generation", "--micro_batch_size", "16", "--generation_batch_size", "24"],
        ["--generation_batch_size", "24"],
        ["--generation_batch_size", "32", "--steps_per_generation", "3"],
        ["--dialect", "trl", "--generation_batch_size", "64", "--steps_per_generation", "3"],
        ["--dialect", "cs336", "--train_batch_size", "8", "--gradient_accumulation_steps", "3"],
        ["--virtual_pipeline_model_parallel_size", "2"],
        (
            "--world_size 4 --pipeline_model_parallel_size 4 --virtual_pipeline_model_parallel_size 2 "
            "--global_batch_size 18 --num_generations 2"
        ).split(),
        ["--decoder_first_pipeline_num_layers", "2"],
        ["--sequence_parallel"],
        ["--mirco_batch_size", "2"],
        ["--micro_batch_size", "x"],
        ["--micro_batch_size"],
        ["--loss_type", "dap"],
        ["--lr", "none"],
        ["--sequence_parallel", "perhaps"],
        ["--lr", "1", "--learning_rate", "2"],
        ["--top_p", "1.5"],
        ["--adam_beta1", "1"],
        ["--min_lr", "1"],
        ["--lr_warmup_iters", "2", "--lr_warmup_fraction", "0.1"],
        ["--overlap_param_gather"],
        ["--recompute_method", "uniform"],
        ["--recompute_granularity", "full"],
        ["--moe_aux_loss_coeff", "0.1"],
        ["--vllm_max_model_len", "100"],
        ["--reward_weights", "1"],
        ["--eval_steps", "3"],
        ["--eval_reward", "x"],
        ["--eval_datasets", "no_name.jsonl"],
        ["--eval_datasets", "a=x.jsonl", "a=y.jsonl"],
        ["--eval_datasets", "../a=x.jsonl"],
        ["--eval_dataset", "x.jsonl", "--eval_datasets", "eval=y.jsonl"],
        ["--num_generations_eval", "4", "--eval_temperature", "0"],
        ["--lengths", "/nowhere"],
        ["--config", "/nowhere.yaml"],
        ["--bf16", "--torch_dtype", "float32"],
        ["--beta", "-1"],
        ["--skip_grad_norm_above", "0"],
        ["--skip_grad_norm_factor", "1"],
        ["--max_skipped_steps", "0"],
        ["--save_interval_seconds", "-1"],
        ["stray"],
    ]
    from tests.checked import check

    for argv in cases:
        with pytest.raises(ConfigError) as error:
            check(argv)
        assert len(error.value.problems) == 1, (argv, [str(problem) for problem in error.value.problems])
    assert len(cases) >= 25


@pytest.mark.parametrize("zero", ["--micro_batch_size 0", "--num_iterations 0", "--vllm_tensor_parallel_size -1"])
def test_size_of_zero_does_not_hide_other_problems(zero):
    from tests.checked import check

    others = "--world_size 6 --tensor_model_parallel_size 4 --generation_batch_size 12 --num_generations 5 --clip_grad=-1".split()
    with pytest.raises(ConfigError) as error:
        check([*zero.split(), *others])
    said = [problem.message for problem in error.value.problems]
    flag = zero.split()[0][2:]
    for begin in (
        f"{flag} must be at least 1, not",
        "world_size (6) must be a multiple of tensor_model_parallel_size",
        "generation_batch_size (12) must be a multiple of num_generations (5)",
        "clip_grad (-1.0) must be at least 0",
    ):
        assert any(message.startswith(begin) for message in said), (begin, said)
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("words", "warned"), [("", False), ("--distributed_timeout_minutes 5", True), ("--rank_heartbeat_timeout 0", False)]
)
def test_plan_warns_of_heartbeat_timeout_above_collective_timeout(words, warned, capsys):
    sizes = "--world_size 2 --global_batch_size 16 --micro_batch_size 1 --num_generations 8"
    assert main(["plan", "--json", *sizes.split(), *words.split()]) == 0
    told = [said for said in json.loads(capsys.readouterr().out)["warnings"] if said.startswith("A hanging rank would not be identified")]
    assert bool(told) == warned
    if warned:
        assert "rank_heartbeat_timeout (300 s) is not shorter than distributed_timeout_minutes (5 = 300 s)" in told[0]
