"""`--router_replay_mode` in complete runs: pending rows keep their experts in a checkpoint, also in another layout."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

MODEL = dict(layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, std=0.1)
SAME = ("loss", "grad_norm", "kl", "num_tokens", "routing/replayed", "routing/agreement", "sampling/sampling_logp_difference/mean")


def train(rank, world_size, flags, mode):
    """Run with scripted completions, and with experts per token where the sampler returns them."""
    import dataclasses

    from megatron_grpo.cli import main
    from tests.end_to_end import scripted
    from tests.scripted_engine import ScriptedEngine

    def engine(cfg, inputs, parallel):
        answer = scripted.make_answers(inputs.model_path, cfg.rollout.temperature)

        def routed(prompt, place, version):
            completion = answer(prompt, place, version)
            opening, length = len(prompt.token_ids), len(completion.sequence.token_ids)
            parts = [np.random.default_rng([prompt.number, part]).random((length, 2, 4)) for part in (99, place)]
            experts = np.concatenate([parts[0][:opening], parts[1][opening:]]).argsort(axis=-1)[..., :2].astype(np.int16)
            experts[-1] = -1
            return dataclasses.replace(completion, sequence=dataclasses.replace(completion.sequence, experts=experts))

        return ScriptedEngine(routed if mode == "R3" else answer)

    return main(["train", "--verify_weight_sync", "false", "--router_replay_mode", mode, *flags], engine=engine)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_router_replay_pending_rows_keep_experts_over_a_checkpoint(tmp_path, mode):
    flags = [*write_inputs(tmp_path, rows=12, layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, ffn=8), *("--global_batch_size", "8")]
    shutil.rmtree(tmp_path / "model")
    write_tiny(tmp_path / "model", "qwen3_moe", **MODEL)
    flags += [*("--steps_per_generation", "2"), *("--num_iterations", "2"), *("--max_tokens_per_micro_batch", "64"), *("--beta", "0.02")]
    flags += [*("--save_steps", "3"), *("--max_steps", "4"), *("--save_total_limit", "3"), *("--export_hf", "false")]
    whole, other = tmp_path / "whole", tmp_path / "other"
    here = ["--share_prefix", "true", "--expert_model_parallel_size", "2", "--output_dir", str(whole)]
    assert run_ranks(train, 2, [*flags, *here], mode, timeout=120) == [0, 0]
    shutil.copytree(whole, other)
    first = str(other / "checkpoints" / "iter_0000003")
    changed = ["--resume", first, "--share_prefix", "false", "--output_dir", str(other)]
    assert run_ranks(train, 1, [*flags, *changed], mode, timeout=120) == [0]
    one, two = read_jsonl(whole / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    assert [step["step"] for step in two] == [1, 2, 3, 4]
    wanted, found = ({name: step[-1][name] for name in SAME} for step in (one, two))
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert [step["routing/replayed"] for step in one] == [1] * 4
    assert (one[-1]["routing/agreement"] < 0.8) if mode == "R3" else (0.9 < one[-1]["routing/agreement"] <= 1)
