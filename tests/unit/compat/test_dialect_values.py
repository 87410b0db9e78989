"""Values that defaults and combined arguments of other frameworks translate to. The numbers are from the frameworks' sources."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.check import check_parsed
from megatron_grpo.run.config import parse, table
from megatron_grpo.run.config.read import format_value
from tests.checked import check

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
DEFAULTS = {
    "swift": dict(beta=0.04, lr=1e-5, lr_decay_style="cosine", weight_decay=0.1, temperature=0.9, max_completion_length=512,
                  truncation_strategy="left", recompute_granularity="selective", vllm_gpu_memory_utilization=0.9, save_steps=500),
    "trl": dict(loss_type="dapo", rollout_importance_sampling_mode="sequence_mask", rollout_importance_sampling_threshold=3.0,
                use_bias_correction_kl=True, lr_decay_style="linear", adam_beta2=0.999, num_train_epochs=3.0, max_completion_length=512,
                vllm_gpu_memory_utilization=0.3, save_steps=500, save_total_limit=None, num_generations=8, num_iterations=1,
                micro_batch_size=8, **FULL),
    "skyrl": dict(weight_decay=0.01, adam_beta2=0.999, max_prompt_length=512, max_completion_length=1024, use_bias_correction_kl=False,
                  vllm_gpu_memory_utilization=0.8, vllm_max_num_seqs=1024, save_steps=40, save_total_limit=None, num_generations=5,
                  num_iterations=1, micro_batch_size=1, beta=0.001, kl_in_reward=False, entropy_coef=0.0, **FULL),
}  # fmt: skip


def read_settings(cfg, names) -> dict:
    return {name: getattr(getattr(cfg, table()[name].group), name) for name in names}


@pytest.mark.parametrize("dialect", DEFAULTS)
def test_framework_defaults_apply_to_settings_not_given(dialect):
    cfg = check(["--dialect", dialect]).config
    assert read_settings(cfg, DEFAULTS[dialect]) == DEFAULTS[dialect]


SKYRL_EVALUATES = "--trainer.eval_interval 5"
TRL_EVALUATES = "--eval_strategy steps --eval_steps 7"


@pytest.mark.parametrize(
    ("dialect", "words", "found"),
    [
        ("skyrl", "--policy.optimizer_config.adam_betas 0.8 0.95", dict(adam_beta1=0.8, adam_beta2=0.95)),
        ("skyrl", "--algorithm.use_entropy_loss true", dict(entropy_coef=0.01)),
        ("skyrl", "--algorithm.use_entropy_loss true --algorithm.entropy_loss_coef 0.2", dict(entropy_coef=0.2)),
        ("skyrl", "--algorithm.use_entropy_loss false --algorithm.entropy_loss_coef 0.2", dict(entropy_coef=0.0)),
        ("skyrl", "--algorithm.use_kl_loss false", dict(beta=0.0, kl_in_reward=False)),
        ("skyrl", "--algorithm.use_kl_loss false --algorithm.use_kl_in_reward true", dict(beta=0.001, kl_in_reward=True)),
        ("skyrl", "--algorithm.advantage_estimator rloo", dict(advantage_estimator="rloo", scale_rewards="none")),
        ("skyrl", SKYRL_EVALUATES, dict(eval_steps=0)),
        ("skyrl", f"{SKYRL_EVALUATES} --eval_dataset held.jsonl", dict(eval_steps=20)),
        ("skyrl", "--data.train_data a.jsonl", dict(dataset="a.jsonl")),
        (
            "skyrl",
            "data.val_data=[a.jsonl,b.jsonl] trainer.eval_interval=5",
            dict(eval_datasets={"a": "a.jsonl", "b": "b.jsonl"}, eval_steps=20, num_generations_eval=1, eval_temperature=0.0),
        ),
        (
            "skyrl",
            "data.val_data=a.jsonl generator.eval_sampling_params.temperature=1.0 generator.sampling_params.top_p=0.9 "
            "generator.sampling_params.top_k=20 generator.sampling_params.min_p=0.1",
            dict(eval_temperature=1.0, eval_top_p=1.0, eval_top_k=0, eval_min_p=0.0, num_generations_eval=1, min_p=0.1),
        ),
        ("skyrl", "trainer.policy.megatron_config.transformer_config_kwargs.fp8=e4m3", dict(fp8_format="e4m3")),
        (
            "verl",
            "data.val_files=a.parquet actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.val_kwargs.top_k=20",
            dict(eval_temperature=0.0, eval_top_k=None),
        ),
        (
            "slime",
            "--eval-prompt-data a.jsonl --rollout-temperature 0.8 --n-samples-per-prompt 4 --rollout-batch-size 2",
            dict(eval_temperature=0.8, num_generations_eval=1),
        ),
        ("swift", "--dataset a.jsonl --split_dataset_ratio 0.01 --eval_steps 50", dict(split_dataset_ratio=0.01, eval_steps=50)),
        ("trl", "--eval_datasets a=b.jsonl --eval_strategy steps --eval_steps 7", dict(eval_steps=7)),
        (
            "swift",
            "--tuner_type lora",
            dict(
                tuner_type="lora",
                lora_rank=8,
                lora_alpha=32.0,
                lora_dropout=0.05,
                merge_lora=True,
                target_modules=["all-linear"],
                vllm_enable_lora=None,
            ),
        ),
        ("swift", "--train_type lora --lora_dropout 0 --merge_lora false", dict(lora_dropout=0.0, merge_lora=False)),
        ("swift", "--tuner_type lora --target_modules all-linear --target_regex .*q_proj", dict(target_regex=".*q_proj")),
        ("swift", "--merge_lora true", dict(tuner_type="full", merge_lora=False, lora_dropout=0.0)),
        (
            "trl",
            "--use_peft",
            dict(tuner_type="lora", lora_rank=16, lora_alpha=32.0, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]),
        ),
        ("trl", "--use_peft true --lora_r 4 --lora_target_modules all-linear", dict(lora_rank=4, target_modules=["all-linear"])),
        ("trl", "--use_peft false", dict(tuner_type="full", lora_rank=8)),
        (
            "skyrl",
            "--trainer.policy.model.lora.rank 32",
            dict(tuner_type="lora", lora_rank=32, lora_alpha=16.0, lora_dropout=0.0, target_modules=["all-linear"]),
        ),
        (
            "skyrl",
            "trainer.policy.model.lora.rank=4 trainer.policy.model.lora.alpha=8 trainer.policy.model.lora.target_modules=[q_proj,o_proj]",
            dict(lora_rank=4, lora_alpha=8.0, target_modules=["q_proj", "o_proj"]),
        ),
        ("skyrl", "trainer.policy.model.lora.rank=0", dict(tuner_type="full")),
        ("skyrl", "data.train_data=['a.jsonl','b.jsonl']", dict(dataset="a.jsonl", further_datasets=["b.jsonl"])),
        ("skyrl", "trainer.policy.megatron_config.freeze_moe_router=true", dict(freeze_parameters_regex=r"\.gate\.weight$")),
        ("trl", "--vllm_enable_sleep_mode true", dict(sleep_level=2)),
        ("trl", "--vllm_enable_sleep_mode false", dict(sleep_level=0)),
        ("trl", TRL_EVALUATES, dict(eval_steps=0)),
        ("trl", f"{TRL_EVALUATES} --eval_dataset held.jsonl", dict(eval_steps=7)),
        ("trl", "--eval_strategy no --eval_steps 7 --eval_dataset held.jsonl", dict(eval_steps=0)),
        ("trl", "--loss_type cispo", dict(epsilon_high=0.2)),
        ("trl", "--loss_type cispo --epsilon 0.3", dict(epsilon_high=0.3)),
        ("trl", "--loss_type cispo --epsilon_high 5.0", dict(epsilon_high=5.0)),
        ("trl", "--loss_type grpo", dict(epsilon_high=None)),
    ],
)
def test_framework_arguments_read_together_give_native_values(dialect, words, found):
    cfg = check_parsed(parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS)).config
    assert read_settings(cfg, found) == found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--policy.optimizer_config.adam_betas 0.8", "requires two numbers, not '0.8'"),
    ],
)
def test_skyrl_arguments_invalid_in_skyrl_are_rejected(words, says):
    with pytest.raises(ConfigError) as error:
        check(["--dialect", "skyrl", *words.split()])
    assert any(says in problem.message for problem in error.value.problems)


@pytest.mark.parametrize(
    ("dialect", "words", "found"),
    [
        ("swift", "--wandb_project ours --wandb_exp_name mine", dict(project="ours", run_name="mine")),
        ("swift", "--swanlab_project ours --load_from_cache_file false", dict(project="ours", load_from_cache_file=False)),
        ("trl", "--project ours --run_name mine --report_to all", dict(project="ours", run_name="mine", report_to=["all"])),
        ("trl", "--push_to_hub --hub_model_id me/a", dict(push_to_hub=True, hub_model_id="me/a")),
        ("trl", "--hub_model_id me/a --hub_private_repo true", dict(push_to_hub=False, hub_model_id=None, hub_private_repo=None)),
        ("swift", "--hub_model_id me/a --hub_token none", dict(push_to_hub=False, hub_model_id=None)),
        ("skyrl", "trainer.project_name=ours trainer.run_name=mine", dict(project="ours", run_name="mine")),
    ],
)
def test_framework_tracker_and_hub_arguments_are_translated(dialect, words, found):
    parsed = parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS)
    assert parsed.problems == [] and read_settings(parsed.config, found) == found
    assert ("has no effect without push_to_hub" in " ".join(parsed.notes)) == ("hub_model_id" in found and not found["push_to_hub"])


def test_framework_kl_default_does_not_replace_given_value():
    format_value = {
        words: [row.name for row in parse(["--dialect", "skyrl", *words.split()], dialects=lambda: DIALECTS).defaults]
        for words in ("", "--algorithm.kl_loss_coef 0.5")
    }
    assert ["beta" in names or "algorithm.kl_loss_coef" in names for names in format_value.values()] == [True, False]


def test_format_value_returns_command_line_form():
    typed = [format_value(value) for value in (None, True, False, 1, 0, 0.5, "False", [1, False, "x"])]
    assert typed == ["none", "true", "false", "1", "0", "0.5", "False", "1 false x"]


TURNS = [
    ("swift", "--multi_turn_scheduler e.py:E --max_turns 3 --completion_length_limit_scope total", dict(environment="e.py:E", max_turns=3)),
    ("swift", "--multi_turn_scheduler gym_scheduler --gym_env e.py:E --use_gym_env true --reward_funcs r.py:f",
     dict(environment="e.py:E", reward_funcs=["r.py:f", "environment"])),
    ("swift", "--gym_env e.py:E --max_length 100", dict(max_prompt_length=100, truncation_strategy="delete")),
    ("trl", "--environment_factory e.py:E --max_tool_calling_iterations 3", dict(environment="e.py:E", max_turns=4)),
    ("trl", "--tools t.py:f t.py:g --max_prompt_length 100", dict(tools=["t.py:f", "t.py:g"], truncation_strategy="delete", max_turns=8)),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "words", "wanted"), TURNS, ids=[words for _, words, _ in TURNS])
def test_framework_turn_limits_are_translated(dialect, words, wanted):
    """TRL counts rounds of tools: the model speaks once more than that. Megatron-SWIFT's use_gym_env adds a reward."""
    assert read_settings(check(["--dialect", dialect, *words.split()]).config, wanted) == wanted


@pytest.mark.parametrize(
    ("dialect", "words", "note", "found"),
    [
        ("skyrl", "environment.env_class=gsm8k --reward_funcs math", "environment.env_class (gsm8k) is an environment of SkyRL, which is "
         "not run; reward_funcs is used. An environment of your own is --environment", dict(environment=None)),
        ("skyrl", "environment.env_class=search generator.max_turns=4 --environment e.py:E",
         "environment.env_class (search) is an environment of SkyRL, which is not run; environment is used.", dict(max_turns=4)),
        ("verl", "custom_reward_function.path=r.py --reward_funcs math", "custom_reward_function.path (r.py) is a function with verl's "
         "signature, which is not run; reward_funcs is used.", dict(reward_funcs=["math"])),
        ("verl", "actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 "
         "--environment e.py:E", "actor_rollout_ref.rollout.multi_turn.enable (True) is not read, because environment is set.",
         dict(max_turns=5)),
        ("verl", "actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml --tools t.py:f",
         "actor_rollout_ref.rollout.multi_turn.tool_config_path (t.yaml) is not read, because tools is set.", dict(tools=["t.py:f"])),
        ("swift", "--gym_env maze --environment e.py:E", "gym_env (maze) is an environment registered in Megatron-SWIFT, which is not run; "
         "environment is used.", dict(environment="e.py:E")),
        ("slime", "--custom-rm-path r.f --reward_funcs math", "custom_rm_path (r.f) is a function with slime's signature",
         dict(reward_funcs=["math"])),
    ],
)  # fmt: skip
def test_framework_reward_and_episode_arguments_with_native_replacement_are_listed(dialect, words, note, found):
    parsed = parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS)
    assert not parsed.problems and read_settings(parsed.config, found) == found
    assert any(line.startswith(f"What differs: {note}") for line in parsed.notes), parsed.notes


@pytest.mark.parametrize(
    ("dialect", "words", "said"),
    [
        ("skyrl", "environment.env_class=gsm8k", "Add --reward_funcs. An environment of your own is --environment path/to/file.py:Class"),
        ("verl", "actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml --reward_funcs math", "agents with --agent_command"),
        ("swift", "--context_manager mine", "multi-turn environments are named with --environment"),
        ("skyrl", "trainer.algorithm.use_tis=true", "use_tis requires tis_imp_ratio_cap, in SkyRL too, whose default (-1)"),
    ],
)
def test_framework_reward_and_episode_arguments_without_replacement_are_rejected(dialect, words, said):
    problems = parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS).problems
    assert any(said in problem.message for problem in problems), problems


def test_swift_reward_funcs_accept_native_reward_names():
    """GRPO there cannot call the class that it registers as `math`."""
    for dialect in ("swift", "ms-swift"):
        parsed = parse(["--dialect", dialect, "--reward_funcs", "math", "accuracy_is_mine"], dialects=lambda: DIALECTS)
        assert [problem.message.partition(" is a reward")[0] for problem in parsed.problems] == ["reward_funcs (accuracy_is_mine)"]
        assert parse(["--dialect", dialect, "--reward_funcs", "math"], dialects=lambda: DIALECTS).config.rewards.reward_funcs == ["math"]


@pytest.mark.parametrize("dialect", ["swift", "ms-swift"])
def test_swift_kl_in_reward_follows_advantage_estimator(dialect):
    """ms-swift 4.6.0: `_init_grpo` of rlhf_args.py and of megatron_args.py."""

    def found(*words: str):
        return parse(["--dialect", dialect, *words], dialects=lambda: DIALECTS)

    assert [found("--advantage_estimator", name).config.grpo.kl_in_reward for name in ("grpo", "rloo", "reinforce_plus_plus")] == [
        False, True, True]  # fmt: skip
    assert not found("--advantage_estimator", "rloo", "--kl_in_reward", "false").config.grpo.kl_in_reward
    assert ("kl_in_reward", "true with rloo") in [(row.name, row.theirs) for row in found("--advantage_estimator", "rloo").defaults]


def test_skyrl_splits_sequences_with_its_default_strategy():
    parsed = parse(["--dialect", "skyrl", "trainer.policy.sequence_parallel_size=2"], dialects=lambda: DIALECTS)
    assert not parsed.problems and parsed.config.parallel.context_parallel_size == 2
    (problem,) = parse(
        ["--dialect", "skyrl", "trainer.policy.sequence_parallel_size=2", "trainer.strategy=megatron"], dialects=lambda: DIALECTS
    ).problems
    assert "splits sequences only with FSDP" in problem.message


def test_swift_completion_length_limit_per_turn_is_noted():
    notes = " ".join(parse(["--dialect", "swift", "--gym_env", "e.py:E"], dialects=lambda: DIALECTS).notes)
    assert "completion_length_limit_scope per_round" in notes and "max_turns is unlimited by default" in notes
