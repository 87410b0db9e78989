"""One run from checkpoint to export: reward, metrics, files, completions, export and failures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.core.base.files import MARK
from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.ranks import run_ranks
from tests.small_hub import LocalHub, use

STEPS = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(output_dir, flags) of a run of two data-parallel ranks with an engine each, pushed to a local Hub."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*write_inputs(folder), *("--output_dir", str(folder / "out")), *("--max_steps", str(STEPS))]
    flags += ["--eval_dataset", str(folder / "data.jsonl"), "--log_entropy", "true"]
    hub = LocalHub()
    assert run_ranks(train_and_push, 2, [*flags, *PUSHES], hub.address, timeout=180) == [0, 0]
    hub.close()
    PUSHED.update(hub.repositories)
    return folder / "out", flags


PUSHES = ["--push_to_hub", "true", "--hub_model_id", "me/even"]
PUSHED: dict[str, dict] = {}


def train_and_push(rank: int, world_size: int, flags: list[str], address: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, address)
        return train(rank, world_size, flags, draws=True)


def test_run_reward_rises(run):
    before, after = read_jsonl(run[0] / "evaluations.jsonl")
    assert (before["step"], after["step"]) == (0, STEPS)
    assert after["even"] > before["even"] + 0.15


def test_sampler_and_trainer_agree_at_every_step(run):
    steps = read_jsonl(run[0] / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    # Two engines: exactly 0 would mean that one copied the other.
    assert 0 < max(step["sampling/sampling_logp_difference/max"] for step in steps) <= 1e-4


def test_run_metrics_have_documented_names(run):
    promised = """loss reward reward_std rewards/even/mean rewards/even/std frac_reward_zero_std entropy grad_norm learning_rate
        clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean completions/mean_length completions/max_length
        completions/clipped_ratio sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
        sampling/importance_sampling_ratio/mean staleness/mean staleness/max num_tokens time/rollout time/reward
        time/old_logprobs time/train time/weight_sync time/step tokens_per_second packing/efficiency"""
    first = read_jsonl(run[0] / "metrics.jsonl")[0]
    assert not [name for name in promised.split() if name not in first]


def test_run_writes_documented_files(run):
    out = run[0]
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "hf/model.safetensors", "hf/config.json", "plots/reward.png"} <= names
    assert len([name for name in names if name.startswith("completions/step_")]) == STEPS


def test_run_pushes_export_with_model_card_without_local_paths(run):
    folder, there = run[0] / "hf", PUSHED["me/even"]["files"]
    assert {path.name for path in folder.iterdir()} - {MARK} == set(there) >= {"README.md", "model.safetensors", "training.png"}
    assert all(content == (folder / name).read_bytes() for name, content in there.items())
    card = there["README.md"].decode()
    assert "reward.py:even" in card and f"| optimizer steps | {STEPS} |" in card and str(run[0].parent) not in card


def test_run_files_have_the_permissions_of_the_umask(run):
    mask = os.umask(0)
    os.umask(mask)
    modes = {str(path.relative_to(run[0])): path.stat().st_mode & 0o777 for path in run[0].rglob("*") if path.is_file()}
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~mask} == {}


def test_completions_hold_every_row_with_its_reward(run):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(sorted((run[0] / "completions").iterdir())[0]).to_pydict()
    assert len(table["completion"]) == 16
    by_prompt = {}
    for number, reward, advantage in zip(table["prompt_number"], table["reward"], table["advantage"], strict=True):
        by_prompt.setdefault(number, []).append((reward, advantage))
    for pairs in by_prompt.values():
        rewards, advantages = np.array(pairs).T
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(advantages, expected if len(set(rewards)) > 1 else 0.0, atol=1e-9)


def score_greedily(rank, world_size, path: str, data: str) -> tuple[float, float]:
    """Return the held-out score of a checkpoint by transformers and by vLLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.settings import RolloutConfig
    from megatron_grpo.core.types import Prompt

    def even(ids):
        return sum(token % 2 == 0 for token in ids) / len(ids)

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in Path(data).read_text().splitlines()]
    by_transformers = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, do_sample=False)
        by_transformers.append(even(out[0, len(ids) :].tolist()))
    engine = ColocatedEngine.build(
        RolloutConfig(vllm_kv_cache_memory_mb=64), model_path=path, dtype="float32", max_model_len=64, seed=0, rank=0, world_size=1
    )
    asked = [Prompt(number=i, row=i, raw="", token_ids=tuple(ids), columns={}) for i, ids in enumerate(prompts)]
    groups = engine.generate(asked, SamplingSettings(n=1, max_completion_length=8).greedy(), seed=0)
    return float(np.mean(by_transformers)), float(np.mean([even(group.completions[0].answer_ids) for group in groups]))


def test_run_export_has_the_reported_score(run):
    out, flags = run
    data = flags[flags.index("--dataset") + 1]
    ((by_transformers, by_vllm),) = run_ranks(score_greedily, 1, str(out / "hf"), data, timeout=120)
    said = read_jsonl(out / "evaluations.jsonl")[-1]["even"]
    assert by_vllm == pytest.approx(said, abs=1e-9)
    assert by_transformers == pytest.approx(said, abs=1e-9)


def test_run_resolved_configuration_is_reusable(run):
    from megatron_grpo.run.config.parse import resolve

    again = resolve(["--config", str(run[0] / "config.yaml")], launcher_world_size=2)
    first = resolve([*run[1], *PUSHES], launcher_world_size=2)
    assert again.groups() == first.groups()


def train_with_negated_advantages(rank, world_size, flags):
    from megatron_grpo.core.grpo.advantages import ESTIMATORS

    real = ESTIMATORS["grpo"]
    ESTIMATORS["grpo"] = lambda rewards, scale: -real(rewards, scale)
    return train(rank, world_size, flags)


def test_run_with_negated_advantages_lowers_the_reward(run, tmp_path):
    flags = [*run[1], "--output_dir", str(tmp_path / "out")]
    assert run_ranks(train_with_negated_advantages, 2, flags, timeout=180) == [0, 0]
    before, after = read_jsonl(tmp_path / "out" / "evaluations.jsonl")
    assert after["even"] < before["even"]


def train_without_sync(rank, world_size, flags):
    from megatron_grpo.core.rollout.colocated import ColocatedEngine

    def only_says_so(self, update):
        list(update.tensors)
        self.version = update.version

    ColocatedEngine.load_weights = only_says_so
    return train(rank, world_size, flags)


def test_run_missing_sync_is_an_error(run, tmp_path):
    flags = [*run[1], "--output_dir", str(tmp_path / "out")]
    assert run_ranks(train_without_sync, 2, flags, timeout=180) == [1, 1]
    assert [step["step"] for step in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1], "no second rollout is sampled"


def test_run_missing_sync_without_verification_shows_in_metrics(run, tmp_path):
    flags = [*run[1], "--output_dir", str(tmp_path / "out"), "--verify_weight_sync", "false"]
    run_ranks(train_without_sync, 2, flags, timeout=180)
    steps = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) > 1e-2


def test_run_names_all_wrong_settings_before_start(run, tmp_path):
    flags = [*run[1], "--output_dir", str(tmp_path / "out"), "--global_batch_size", "18", "--dataset", str(tmp_path / "no.jsonl")]
    assert run_ranks(train, 2, flags, timeout=60) == [2, 2]
    assert not (tmp_path / "out").exists()
