"""A name of another system gets a remedy that is right, or none."""

from __future__ import annotations

import pytest

from megatron_grpo.compat import DIALECTS
from megatron_grpo.compat.suggestions import by_name
from megatron_grpo.config import names, parse


def said(*words: str) -> list[str]:
    return [problem.message for problem in parse(words, dialects=DIALECTS).problems]


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
        ("flux_capacitor", None),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_right_remedy_or_none(name, remedy):
    (message,) = said(f"--{name}", "1")
    assert message.startswith(f"{name} is not a setting.")
    if remedy is None:
        assert "Did you mean" not in message and "called" not in message
    else:
        assert remedy in message, message


def test_every_remedy_names_a_setting():
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
def test_a_file_full_of_another_systems_names_is_one_mistake_with_one_remedy(tmp_path, text, says):
    script = tmp_path / "run.sh"
    script.write_text(text)
    (message,) = said("--config", str(script))
    assert message.startswith(f"run.sh looks like {says} (") and "Add `--dialect " in message


def test_names_that_no_system_knows_are_still_named_beside_it(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("megatron rlhf --rlhf_type grpo --padding_free true --use_hf true --flux_capacitor 1")
    file, other = said("--config", str(script))
    assert "--dialect swift-megatron" in file and other.startswith("flux_capacitor in run.sh is not a setting.")


def test_swift_is_short_for_swift_megatron():
    assert parse(["--dialect", "swift"], dialects=DIALECTS).config.plan.dialect == "swift-megatron"


@pytest.mark.parametrize("name", ["optimizer.adam.beta2", "optim.beta2", "beta2"])
def test_adams_beta_is_not_the_one_of_the_kl(name):
    (message,) = said(f"--{name}", "1")
    assert "adam_beta2" in message and "Did you mean" not in message
