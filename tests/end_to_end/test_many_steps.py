"""Several optimizer steps per rollout, several passes, a KL in loss or reward, a moving reference: each step equals transformers'.

Completions are scripted, so both sides train on the same tokens; each computes its own old log-probs.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.core.weights.lora import PREFIX
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.metrics.plots import PARTS_OF_A_STEP
from tests import parity_cases
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

STEPS = 5
SIZES = ["--num_generations", "2", "--global_batch_size", "8", "--micro_batch_size", "2"]
TWICE_TWO = ["--steps_per_generation", "2", "--num_iterations", "2"]
UNALIGNED = ["--allow_unaligned_generation", "true", "--generation_batch_size", "12", "--num_iterations", "2"]
SHORT = ["--allow_unaligned_generation", "true", "--generation_batch_size", "12", "--dataset_drop_last", "true", "--dataset", "#9"]
MOVING = ["--beta", "0.1", "--sync_ref_model", "true", "--ref_model_sync_steps", "2"]
WARM_UP = ["--lr_warmup_iters", "2", "--min_lr", "1e-4"]
TP2, PP2 = ["--tensor_model_parallel_size", "2"], ["--pipeline_model_parallel_size", "2"]
OVERLAP = ["--overlap_grad_reduce", "true", "--overlap_param_gather", "true"]

LORA = ["--tuner_type", "lora", "--lora_rank", "4", "--rank_pattern", "v_proj=3", "--use_rslora", "true"]

CASES = {
    "two steps per rollout, two passes": (1, [*TWICE_TWO, "--beta", "0.1", "--kl_estimator", "k2"]),
    "rollouts that straddle steps": (2, [*UNALIGNED, "--loss_type", "dapo", "--lr_decay_style", "linear"]),
    # 9 prompts: an epoch is a rollout of 6 of them, one optimizer step and half of one.
    "epochs that end with a short step": (2, [*SHORT, "--loss_type", "dapo", "--lr_decay_style", "linear"]),
    "a short step under a token budget": (2, [*SHORT, "--max_tokens_per_micro_batch", "40", "--loss_type", "dr_grpo"]),
    "a token budget": (2, [*UNALIGNED, *PP2, "--max_tokens_per_micro_batch", "40", "--importance_sampling_level", "sequence"]),
    "the sampler's own old log-probs": (2, [*UNALIGNED, *TP2, "--old_logprobs", "rollout"]),
    "corrected for the sampler": (2, [*TWICE_TWO, *TP2, "--rollout_importance_sampling_mode", "sequence_truncate", "--loss_type", "cispo"]),
    "a learning rate that warms up and decays": (1, [*TWICE_TWO, *WARM_UP, "--lr_decay_style", "cosine"]),
    "a reference that follows": (2, [*TWICE_TWO, *MOVING, *PP2]),
    # Not with alpha 1: a KL of nothing but rounding would be what groups of equal rewards learn from.
    "a reference that follows, in the reward": (2, [*MOVING, *TP2, "--ref_model_mixup_alpha", "0.9", "--kl_in_reward", "true"]),
    "a reference that follows weights still on their way": (2, [*MOVING, *OVERLAP]),
    "an adapter, held to the model without it": (2, [*LORA, *TWICE_TWO, *TP2, "--beta", "0.1"]),
    "an adapter, held in the reward, weights merged": (2, [*LORA, *PP2, "--beta", "0.1", "--kl_in_reward", "true"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Clipping always applies, and Adam's epsilon is so large that no element moves in the direction of its rounding error."""
    optimizer = "--lr 2e-3 --adam_eps 1e-5 --clip_grad 0.5 --weight_decay 0.1"
    others = f"--max_steps {STEPS} --temperature 0.9 --log_completions_steps 0"
    return [*write_inputs(tmp_path_factory.mktemp("inputs")), *SIZES, *optimizer.split(), *others.split()]


def get_weights(out: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    if (out / "hf" / "adapter_model.safetensors").exists():
        return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(out / "hf" / "adapter_model.safetensors").items()}
    return load_file(out / "hf" / "model.safetensors")


def with_rows(inputs: list[str], changes: list[str]) -> list[str]:
    """Return the flags, with `#N` replaced by a data set of N rows."""
    dataset = inputs[inputs.index("--dataset") + 1]
    return [*inputs, *(dataset + word if word.startswith("#") else word for word in changes)]


@pytest.mark.parametrize("case", CASES)
def test_many_steps_equal_transformers_in_float64(inputs, tmp_path, case):
    world_size, changes = CASES[case]
    flags = [*with_rows(inputs, changes), "--output_dir", str(tmp_path / "out")]
    assert run_ranks(scripted.train, world_size, flags) == [0] * world_size
    right, found = scripted.compute_expected(flags, world_size, scripted.score_even), read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [step["loss"] for step in found] == pytest.approx(right.losses, rel=1e-5, abs=2e-6)
    assert [step["grad_norm"] for step in found] == pytest.approx(right.grad_norms, rel=1e-5)
    optimizer = resolve(flags, launcher_world_size=world_size).optimizer
    rates = [parity_cases.learning_rate(optimizer, step, STEPS) for step in range(STEPS)]
    assert [step["learning_rate"] for step in found] == pytest.approx(rates, rel=1e-12)
    weights = get_weights(tmp_path / "out")
    for name, wanted in right.weights.items():
        bound = 5e-5 if name.endswith("lora_B.weight") else 1e-5  # it began at zero: all of it is updates
        assert np.linalg.norm(weights[name] - wanted) <= bound * np.linalg.norm(wanted), name


def train_with_longer_answers_at_each_version(rank: int, world_size: int, flags: list[str]) -> int:
    from megatron_grpo.cli import main
    from megatron_grpo.core.rollout.engine import make_completion
    from tests.scripted_engine import ScriptedEngine

    def answer(prompt, place, version):
        ids = [4 + place] * (version + 1)
        return make_completion(prompt.token_ids, ids, [-1.0] * len(ids), text="", finish_reason="stop", version=version)

    return main(["train", "--verify_weight_sync", "false", *flags], engine=lambda *_: ScriptedEngine(answer))


def test_evaluation_between_rollouts_uses_current_weights(inputs, tmp_path):
    """No rollout begins at optimizer step 1 or 3, so only the evaluation syncs their weights."""
    flags = [*inputs, *TWICE_TWO, "--max_steps", "4", "--eval_dataset", inputs[inputs.index("--dataset") + 1], "--eval_steps", "1"]
    flags += ["--eval_num_prompts", "2", "--output_dir", str(tmp_path), "--save_steps", "0"]
    assert run_ranks(train_with_longer_answers_at_each_version, 1, flags) == [0]
    found = [(line["step"], line["mean_length"]) for line in read_jsonl(tmp_path / "evaluations.jsonl")]
    assert found == [(step, step + 1) for step in range(5)]


@pytest.mark.parametrize(
    ("changes", "other"),
    [(TWICE_TWO, ["--old_logprobs", "rollout"]), ([*TWICE_TWO, *MOVING], ["--sync_ref_model", "false"])],
    ids=["old log-probs", "reference"],
)
def test_many_steps_comparison_detects_differences(inputs, changes, other):
    """With other old log-probs, or a moving reference, gradient norms differ by far more than the tolerance."""
    one, two = (scripted.compute_expected([*inputs, *changes, *more], 1, scripted.score_even) for more in ([], other))
    apart = [abs(a / b - 1) for a, b in zip(one.grad_norms, two.grad_norms, strict=True)]
    assert apart[0] < 1e-9 and max(apart) > 1e-3


# ---- resuming ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    flags = [*inputs, *UNALIGNED, *MOVING, "--save_steps", "1", "--save_total_limit", "none"]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(out)]) == [0, 0]
    return out, flags


@pytest.mark.parametrize("layout", [[], TP2, PP2], ids=["dp2", "tp2", "pp2"])
def test_resume_restores_moving_reference(whole, tmp_path, layout):
    out, flags = whole
    flags = [*flags, *layout, "--output_dir", str(tmp_path / "out"), "--resume", str(out / "checkpoints" / "iter_0000003")]
    assert run_ranks(scripted.train, 2, flags) == [0, 0]
    expected, found = read_jsonl(out / "metrics.jsonl")[3:], read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [step["step"] for step in found] == [4, 5]
    for line in [*read_jsonl(out / "metrics.jsonl"), *found]:
        parts = {name: seconds for name, seconds in line.items() if name.startswith("time/") and name != "time/step"}
        assert parts.keys() <= {f"time/{name}" for name in PARTS_OF_A_STEP} and {"time/ref_logprobs", "time/other"} <= parts.keys()
        assert min(parts.values()) >= 0 and line["time/step"] == pytest.approx(sum(parts.values()), rel=1e-12)
    tolerance = 1e-5 if layout else 0.0
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert other[name] == pytest.approx(one[name], rel=tolerance, abs=tolerance), name
    for name, wanted in get_weights(out).items():
        assert np.linalg.norm(get_weights(tmp_path / "out")[name] - wanted) <= tolerance * np.linalg.norm(wanted), name


def run_and_capture(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    """Return the exit code and the output of `scripted.train`."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return scripted.train(rank, world_size, flags), said.getvalue()


def test_resume_checkpoint_without_moving_reference_is_an_error(whole, inputs, tmp_path):
    fixed = [*inputs, *UNALIGNED, "--beta", "0.1"]
    assert run_ranks(scripted.train, 1, [*fixed, "--output_dir", str(tmp_path), "--max_steps", "1"]) == [0]
    [(code, said)] = run_ranks(run_and_capture, 1, [*inputs, *UNALIGNED, *MOVING, "--output_dir", str(tmp_path)])
    assert code == 2 and "sync_ref_model is true, but was false" in said and "1 problem" in said


def test_resume_without_sync_ref_model_after_moves_is_an_error(whole, inputs, tmp_path):
    """Without --sync_ref_model the run would resume with the reference of the first launch."""
    out, _ = whole
    fixed = [*inputs, *UNALIGNED, "--beta", "0.1", "--resume", str(out / "checkpoints" / "iter_0000003")]
    [(code, said)] = run_ranks(run_and_capture, 1, [*fixed, "--output_dir", str(tmp_path)])
    assert code == 2 and "sync_ref_model is false, but was true" in said and "1 problem" in said


@pytest.mark.parametrize("case", ["two steps per rollout, two passes", "rollouts that straddle steps", "epochs that end with a short step"])
def test_extended_finished_run_equals_longer_run(inputs, whole, tmp_path, case):
    """Its last rollout has rows left, which are in the checkpoint with their old log-probs. Or it ends inside an epoch, or with one."""
    world_size, changes = CASES[case]
    flags = [*with_rows(inputs, changes), "--lr_decay_style", "constant"]
    assert run_ranks(scripted.train, world_size, [*flags, "--output_dir", str(tmp_path / "long")]) == [0] * world_size
    for steps in (1, 2, STEPS):  # the first two leave rows behind, but for the end of an epoch
        short = [*flags, "--output_dir", str(tmp_path / "short"), "--max_steps", str(steps)]
        assert run_ranks(scripted.train, world_size, short) == [0] * world_size
    long, short = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("long", "short"))
    for name in ("loss", "grad_norm", "staleness/mean"):
        assert [step[name] for step in short] == [step[name] for step in long], name
    for name, wanted in get_weights(tmp_path / "long").items():
        assert np.array_equal(get_weights(tmp_path / "short")[name], wanted), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--global_batch_size", "16"], "global_batch_size was 8 and is 16"),
        (["--num_iterations", "1", "--global_batch_size", "4"], "num_iterations was 2 and is 1"),
        (["--old_logprobs", "rollout"], "old_logprobs was auto and is rollout"),
    ],
)
def test_resume_in_mid_rollout_with_other_sizes_is_an_error(whole, tmp_path, changes, says):
    out, flags = whole
    before = sorted(out.rglob("*"))
    [(code, said)] = run_ranks(run_and_capture, 1, [*flags, *changes, "--output_dir", str(out), "--max_steps", "9"])
    assert code == 2 and says in said and "8 of its samples are not trained yet" in said
    assert sorted(out.rglob("*")) == before


def test_resume_between_rollouts_accepts_other_sizes(inputs, tmp_path):
    flags = [*inputs, "--output_dir", str(tmp_path)]
    assert run_ranks(scripted.train, 1, [*flags, "--max_steps", "2"]) == [0]
    [(code, said)] = run_ranks(run_and_capture, 1, [*flags, "--max_steps", "3", "--steps_per_generation", "2"])
    assert code == 2 and "2 rollouts would not equal 2 optimizer steps" in said
    larger = ["--max_steps", "3", "--global_batch_size", "16", "--num_generations", "4"]
    assert run_ranks(scripted.train, 1, [*flags, *larger]) == [0]
    assert [(line["rollout"], len(line["rows"])) for line in map(find_rollout, read_jsonl(tmp_path / "schedule.jsonl"))][2:] == [(2, 16)]


def find_rollout(line: dict) -> dict:
    """Return the only rollout of an optimizer step, and its rows."""
    rows = [row for micro in line["rows"] for rank in micro for row in rank]
    [number] = {rollout for rollout, _ in rows}
    return {"rollout": number, "rows": rows}
