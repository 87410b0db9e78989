"""Suggestions for names and values of other frameworks."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.compat.suggestions import by_name
from megatron_grpo.commands.compat.tables import contents
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import names, parse, table
from tests.checked import check


def list_problems(*words: str) -> list[str]:
    return [problem.message for problem in parse(words, dialects=lambda: DIALECTS).problems]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gradient_checkpointing", "recompute_granularity full"),
        ("pp", "called pipeline_model_parallel_size"),
        ("tp", "called tensor_model_parallel_size"),
        ("use_peft", "tuner_type lora"),
        ("use_dora", "vLLM does not support it"),
        ("modules_to_save", "vLLM supports no adapter with fully trained layers"),
        ("use_vllm", "always uses vLLM"),
        ("per_device_train_batch_size", "called micro_batch_size"),
        ("dataset_name", "called dataset here"),
        ("dataloader_num_workers", "affects neither sampling nor training"),
        ("freeze_parameters_ratio", "counts the parameters of one rank"),
        ("vllm_group_port", "affects neither sampling nor training"),
        ("multi_turn_scheduler", "is set here with environment"),
        ("external_plugins", "path/to/file.py:function"),
        ("move_model_batches", "affects neither sampling nor training"),
        ("actor_rollout_ref.actor.megatron.param_offload", "set here with offload_model true"),
        ("deepspeed", "Megatron shards"),
        ("max_new_tokens", "called max_completion_length"),
        ("max_length", "called max_prompt_length"),
        ("kl_coef", "called beta"),
        ("kl_loss_coef", "called beta"),
        ("entropy_coeff", "called entropy_coef"),
        ("clip_ratio", "called epsilon"),
        ("clip_ratio_high", "called epsilon_high"),
        ("n_samples_per_prompt", "called num_generations"),
        ("gpu_memory_utilization", "called vllm_gpu_memory_utilization"),
        ("actor_rollout_ref.rollout.n", "num_generations"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "called global_batch_size"),
        ("actor_rollout_ref.actor.optim.lr", "called lr"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "called vllm_tensor_parallel_size"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "called tensor_model_parallel_size"),
        ("actor_rollout_ref.model.path", "called model here"),
        ("data.train_batch_size", "called generation_batch_size, and counts completions"),
        ("epsilon_low", "called epsilon."),
        ("num_workers", "ranks read the data"),
        ("eval_iters", "eval_num_prompts"),
        ("enable_gradient_checkpointing", "recompute_granularity full"),
        ("reward_plugin", "called reward_funcs"),
        ("optimizer.lr", "use --lr"),
        ("algorithm.adv_estimator", "set here with advantage_estimator"),
        ("data.train_files", "set here with dataset"),
        ("trainer.total_epochs", "called num_train_epochs"),
        ("trainer.n_gpus_per_node", "set here with world_size, which is nodes times GPUs"),
        ("trainer.policy.optimizer_config.lr", "called lr here"),
        ("save_freq", "called save_steps"),
        ("mirco_batch_size", "Did you mean micro_batch_size?"),
        ("num_generation", "Did you mean num_generations?"),
        ("gpus", "called world_size"),
        ("max_staleness", "async_rollout_depth is the largest age"),
        ("lora", "tuner_type lora trains an adapter"),
        ("rollout_n", "called num_generations"),
        ("num_train_samples", "max_steps is the length of the run in optimizer steps, each of global_batch_size completions"),
        ("flux_capacitor", None),
    ],
)  # fmt: skip
def test_suggestion_for_unknown_name_is_correct_or_absent(name, remedy):
    (message,) = list_problems(f"--{name}", "1")
    assert message.startswith(f"{name} is not a setting.")
    if remedy is None:
        assert "Did you mean" not in message and "called" not in message
    else:
        assert remedy in message, message


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("--loss_type gspo", "GSPO is importance_sampling_level sequence"),
        ("--loss_type dr.grpo", "Use dr_grpo. Dr. GRPO is loss_type dr_grpo with scale_rewards none."),
        ("--loss_type DAPO", "Use dapo."),
        ("--loss_type rloo", "RLOO is advantage_estimator rloo"),
        ("--advantage_estimator reinforce++", "REINFORCE++ is reinforce_plus_plus."),
        ("--advantage_estimator REINFORCE++-baseline", "Use reinforce_plus_plus_baseline."),
        ("--advantage_estimator gae", "there is no critic"),
        ("--kl_estimator low_var_kl", "Use k3."),
        ("--scale_rewards true", "Use group."),
        ("--dialect slime --loss_type grpo-x", None),
        ("--dialect trl --loss_type gspo --per_device_train_batch_size 8", "GSPO is importance_sampling_level sequence"),
        ("--loss_type nobodys", None),
    ],
)
def test_suggestion_for_framework_value_is_correct_or_absent(typed, remedy):
    (message,) = list_problems(*typed.split())
    assert message.endswith(".") and (remedy is None or remedy.lower() in message.lower()), message
    if remedy is None:
        assert message.endswith("real.") or "slime" in typed, message


def test_suggestions_for_values_exist_for_rejected_values_only():
    """And of a setting with choices; its words are written as they are compared."""
    for name, sentences in contents("suggestions")["values"].items():
        words = [word for text in sentences.values() for word in text.split()]
        assert len(words) == len(set(words)) and not set(words) & set(table()[name].choices), name
        assert words == [re.sub("[^a-z0-9+]", "", word) for word in words]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("--async_generate true", "async_rollout_depth was typed as async_generate."),
        ("--vllm_mode server --vllm_server_base_url host:8000", "vllm_server_base_url 'host:8000' is not a URL"),
        ("--vllm_server_base_url http://host:8000", "vllm_server_base_url sets addresses of rollout servers"),
        ("--learning_rate 1e-6 --min_lr 1e-5", "lr was typed as learning_rate."),
        ("--dialect trl --vllm_importance_sampling_cap 2 --vllm_importance_sampling_clip_min 3", "was typed as vllm_importance_sampling"),
    ],
)
def test_suggestion_message_names_the_given_flag(typed, name):
    with pytest.raises(ConfigError) as error:
        check(typed.split())
    assert name in "\n".join(problem.message for problem in error.value.problems)


def test_suggestions_name_existing_settings():
    assert {target for target in by_name("same_as").values() if target not in names()} == set()
    assert {name for name in by_name("same_as") if name in names()} == set(), "a setting needs no remedy"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("megatron rlhf --rlhf_type grpo --padding_free true --use_hf true --lr 1 --finetune", "a Megatron-SWIFT file"),
        ("trl grpo --per_device_train_batch_size 4 --logging_steps 1 --gradient_checkpointing true --use_peft true", "a TRL file"),
        ("main trainer.policy.optimizer_config.lr=1 trainer.epochs=2 generator.sampling_params.top_p=1.0", "a SkyRL file"),
    ],
)
def test_suggestion_for_framework_file_is_one_problem_with_one_remedy(tmp_path, text, says):
    script = tmp_path / "run.sh"
    script.write_text(text)
    (message,) = list_problems("--config", str(script))
    assert message.startswith(f"run.sh looks like {says} (") and "Add `--dialect " in message


def test_suggestion_for_framework_file_also_reports_unknown_names(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("megatron rlhf --rlhf_type grpo --padding_free true --use_hf true --flux_capacitor 1")
    file, other = list_problems("--config", str(script))
    assert "--dialect swift-megatron" in file and other.startswith("flux_capacitor in run.sh is not a setting.")


def test_dialect_swift_is_alias_of_swift_megatron():
    assert parse(["--dialect", "swift"], dialects=lambda: DIALECTS).config.plan.dialect == "swift-megatron"


@pytest.mark.parametrize("name", ["optimizer.adam.beta2", "optim.beta2", "beta2"])
def test_suggestion_for_adam_beta_is_not_kl_beta(name):
    (message,) = list_problems(f"--{name}", "1")
    assert "adam_beta2" in message and "Did you mean" not in message
