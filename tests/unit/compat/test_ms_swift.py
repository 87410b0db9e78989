"""Scripts of `swift rlhf` without Megatron: sizes of TRL, defaults of ms-swift, and unsupported arguments."""

from __future__ import annotations

import pytest

from megatron_grpo.core.base.errors import ConfigError
from tests.checked import check

SCRIPT = """# a comment
NPROC_PER_NODE=8 \\
swift rlhf --rlhf_type grpo --model /nowhere/model --dataset owner/rows#1000 --reward_funcs accuracy --use_vllm true \\
    --vllm_mode colocate --tuner_type full --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16 \\
    --steps_per_generation 32 --num_train_epochs 1 --learning_rate 1e-6 --warmup_ratio 0.05 --max_completion_length 64 \\
    --dataloader_num_workers 4 --per_device_eval_batch_size 4 --deepspeed zero3 --log_completions true
"""


def read(*words: str):
    return check(["--dialect", "ms-swift", *words])


def test_ms_swift_script_has_sizes_of_ms_swift(tmp_path):
    """A rollout is per_device x ranks x steps_per_generation, counted in micro-steps: swift/rlhf_trainers/args_mixin.py."""
    script = tmp_path / "gspo.sh"
    script.write_text(SCRIPT)
    checked = read("--config", str(script))
    sizes, cfg = checked.sizes, checked.config
    assert (cfg.parallel.world_size, sizes.micro_batch_size, sizes.global_batch_size, sizes.generation_batch_size) == (8, 2, 128, 512)
    assert (sizes.steps_per_generation, sizes.num_generations) == (4, 16)
    assert (cfg.optimizer.lr, cfg.optimizer.lr_warmup_fraction, cfg.rewards.reward_funcs) == (1e-6, 0.05, ["math"])
    assert (cfg.data.dataset, cfg.tuner.tuner_type) == ("owner/rows#1000", "full")
    assert "deepspeed zero3: optimizer state is sharded here" in " ".join(checked.parsed.notes)
    assert set(checked.parsed.aside["gspo.sh"]) >= {"dataloader_num_workers", "per_device_eval_batch_size", "log_completions"}


def test_ms_swift_defaults_apply_to_settings_not_given():
    """swift/arguments/rlhf_args.py, sft_args.py, tuner_args.py, swift/trainers/arguments.py."""
    cfg = read("--per_device_train_batch_size", "8").config
    assert (cfg.tuner.tuner_type, cfg.tuner.lora_rank, cfg.tuner.lora_alpha, cfg.tuner.lora_dropout) == ("lora", 8, 32.0, 0.05)
    assert (cfg.optimizer.lr, cfg.optimizer.lr_decay_style, cfg.optimizer.weight_decay, cfg.optimizer.adam_beta2) == (
        1e-4,
        "cosine",
        0.1,
        0.95,
    )
    assert (cfg.grpo.beta, cfg.rollout.temperature, cfg.rollout.max_completion_length, cfg.run.num_train_epochs) == (0.04, 0.9, 512, 3.0)
    assert (cfg.model.recompute_granularity, cfg.data.truncation_strategy, cfg.run.save_steps) == ("full", "left", 500)
    assert (cfg.tuner.merge_lora, cfg.grpo.kl_in_reward) == (False, False)
    full = read("--tuner_type", "full", "--per_device_train_batch_size", "8", "--advantage_estimator", "reinforce_plus_plus")
    assert full.config.optimizer.lr == 1e-5
    assert full.config.grpo.kl_in_reward, "true with every estimator but grpo"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--deepspeed my_config.json", "deepspeed (my_config.json) is a file that is not read"),
        ("--quant_method bnb --quant_bits 4", "quantised weights"),
        ("--chord_sft_dataset owner/rows --chord_mu_peak 0.9", "a supervised loss in addition to GRPO's"),
        ("--sequence_parallel_size 2", "sequences are cut by context_parallel_size"),
        ("--rlhf_type dpo --lr x", "only GRPO on causal language models is supported"),
        ("--advantage_reweight rlsd --rlsd_lambda 0.5", "self-distillation with a column teacher_prompt"),
        ("--eval_dataset gsm8k", "val_dataset sets held-out prompts"),
        ("--swanlab_token secret", "is a secret"),
        ("--use_vllm false", "sampling is by vLLM alone"),
    ],
)
def test_ms_swift_unsupported_arguments_give_one_problem(words, said):
    with pytest.raises(ConfigError) as error:
        read("--per_device_train_batch_size", "8", *words.split())
    (problem,) = error.value.problems
    assert said in problem.message and "secret)" not in problem.message


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--save_strategy no", {"save_steps": 0}),
        ("--val_dataset v.jsonl --eval_strategy no --eval_steps 5", {"eval_steps": 0}),
        ("--val_dataset v.jsonl --save_steps 7", {"eval_steps": 7}),
        ("--max_new_tokens 99", {"max_completion_length": 99}),
        ("--tuner_type full --vllm_enable_lora false", {"vllm_enable_lora": None}),
        ("--dataset owner/rows:subset", {"dataset": "owner/rows:subset"}),
        # vLLM cuts completions there where prompt and completion do not fit into its longest sequence
        ("--vllm_max_model_len 2048 --max_length 2048 --max_completion_length 1024", {"vllm_max_model_len": 3072}),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {\"min_lr\":1e-6}", {"min_lr": 1e-6}),
        ("--scale_rewards false", {"scale_rewards": "none"}),
    ],
)  # fmt: skip
def test_ms_swift_arguments_are_translated(words, values):
    cfg = read("--per_device_train_batch_size", "8", *words.split()).config
    assert {name: getattr(section, name) for section in cfg.groups().values() for name in values if hasattr(section, name)} == values
