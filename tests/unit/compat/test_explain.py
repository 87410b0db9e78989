"""Explanations of sizes for users of other frameworks, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from megatron_grpo.cli import main
from tests.checked import check


def explain_sizes(dialect: str, words: str) -> str:
    checked = check(["--dialect", dialect, *words.split()])
    return "\n".join(checked.parsed.system.explain(checked.sizes, checked.config.run.max_steps))


CS336 = "--train_batch_size 16 --gradient_accumulation_steps 4 --group_size 8"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rollout_batch_size 32", ["took 2 optimizer steps per rollout of 32 completions"]),
        ("", ["took 1 optimizer step per rollout of 16 completions; so does this configuration"]),
        ("--rollout_batch_size 32 --epochs_per_rollout_batch 3", ["took 6 optimizer steps (3 passes of 2) per rollout of 32"]),
        (
            "--rollout_batch_size 32 --epochs_per_rollout_batch 3 --n_grpo_steps 12",
            ["With 6 optimizer steps per rollout this is 2 rollouts; for 12 rollouts use max_steps 72."],
        ),
        ("--rollout_batch_size 32 --n_grpo_steps 12", ["With 2 optimizer steps per rollout this is 6 rollouts", "use max_steps 24."]),
    ],
)
def test_explain_cs336_counts_optimizer_steps(words, says):
    found = explain_sizes("cs336", f"{CS336} {words}")
    assert "train_batch_size is global_batch_size, and n_grpo_steps is max_steps" in found
    assert [part for part in says if part not in found] == []
    assert ("n_grpo_steps (12) counts optimizer steps here" in found) == ("n_grpo_steps" in words)


def test_explain_cs336_with_one_step_per_rollout_adds_nothing():
    assert "counts optimizer steps here" not in explain_sizes("cs336", f"{CS336} --n_grpo_steps 12")


def test_explain_trl_counts_micro_steps():
    found = explain_sizes(
        "trl", "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 6 --num_generations 8"
    )
    assert "took 3 optimizer steps per rollout of 24 completions" in found
    assert "6 micro-steps / gradient_accumulation_steps 2 = 3" in found and "What differs from TRL: it shuffles samples" in found


def test_the_guide_of_ms_swift_has_a_rule_on_steps_per_generation():
    sizes = "--per_device_train_batch_size 8 --gradient_accumulation_steps 3 --steps_per_generation"
    found = explain_sizes("ms-swift", f"{sizes} 2")
    assert "requires steps_per_generation (2) to be a multiple of gradient_accumulation_steps (3)" in found
    assert "Its guide requires" not in explain_sizes("ms-swift", f"{sizes} 6") + explain_sizes("trl", f"{sizes} 2")


def test_stale_rollouts_are_counted_over_whole_periods(capsys):
    """TRL's issue 5770: two micro-steps a rollout and three a step make the second of each three rollouts straddle a step."""
    argv = "plan --dialect trl --per_device_train_batch_size 8 --gradient_accumulation_steps 3 --steps_per_generation 2"
    assert main(argv.split()) == 0
    assert "2 of 12 slices; 2 of 6 rollouts are stale: 1, 4" in " ".join(capsys.readouterr().out.split())
    assert main([*argv.split(), "--max_steps", "1"]) == 0
    assert "1 of 4 slices; 1 of 2 rollouts are stale: 1" in " ".join(capsys.readouterr().out.split())


SKYRL = "--train_batch_size 8 --policy_mini_batch_size 4 --micro_train_batch_size_per_gpu 2 --n_samples_per_prompt 4"


def test_explain_skyrl_mini_batch_by_code_and_by_guide():
    by_code, by_guide = explain_sizes("skyrl", SKYRL), explain_sizes("skyrl-doc", SKYRL)
    assert "took 2 optimizer steps per rollout of 32 completions" in by_code
    assert "policy_mini_batch_size (4) is read in prompts, as SkyRL's code does: 16 completions" in by_code
    assert "gradient_accumulation_steps 8. Read in completions, as SkyRL's guide says, it would be 4 completions and 8 optimizer" in by_code
    assert "is read in completions, as SkyRL's guide says: 4 completions" in by_guide and "be 16 completions and 2 optimizer" in by_guide


def test_explain_megatron_swift_sizes_equal_native_ones():
    found = explain_sizes("swift", "--global_batch_size 16 --num_generations 8 --steps_per_generation 2")
    assert found.startswith(
        "Your old setup took 2 optimizer steps per rollout of 32 completions; so does this configuration: names and meanings of the sizes "
        "are Megatron-SWIFT's. It rounds a run of epochs down to optimizer steps"
    )
