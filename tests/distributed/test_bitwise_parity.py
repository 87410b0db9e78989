"""`--bitwise_parity`: log-probs of trainer and sampler are equal bit for bit on a CPU.

`tools/bitwise_parity.py` has all models and layouts.
"""

from __future__ import annotations

import pytest
import torch

from tests import bitwise_parity_cases as cases
from tests import parity_cases as parity
from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

CASES = {  # model, layout, settings
    "TP2 SP": ("qwen3", "TP2 SP", {}),
    "PP2 VPP2": ("qwen3 tied", "PP2 VPP2", {}),
    "MoE, CP2 EP2": ("qwen3_moe", "CP2 EP2", dict(steps=2)),
    "MoE, TP2 ETP1": ("mixtral", "TP2 ETP1", {}),
    "bfloat16": ("qwen3", "1", dict(torch_dtype="bfloat16")),
}


@pytest.mark.parametrize("case", CASES)
def test_bitwise_parity_sampled_scored_and_trained_logprobs_are_equal(case, tmp_path):
    model, layout, chosen = CASES[case]
    path = cases.write(tmp_path, model, chosen.get("torch_dtype", "float32"))
    layout = cases.LAYOUTS[layout]
    found = run_ranks(lambda rank, world: cases.compare(rank, world, path, **layout.settings | chosen), layout.world_size)
    assert_exact(found)


def assert_exact(by_rank):
    for name, total in cases.sum_counts_over_ranks(by_rank).items():
        assert total.is_exact, f"{name}: {total} log-probs are equal"


DENSE = {"qwen3": 2, "qwen2": 1, "llama": 1, "mistral": 1}  # family -> optimizer steps


def test_bitwise_parity_each_dense_family_on_one_rank_is_exact(tmp_path):
    paths = [cases.write(tmp_path / name, name) for name in DENSE]

    def body(rank, world):
        parallel = parity.join(parity.settings(), world)
        return [cases.compare(rank, world, path, parallel=parallel, steps=DENSE[path.name]) for path in paths]

    for found in run_ranks(body, 1, timeout=180)[0]:
        assert_exact([found])


def change_one_ulp(policy):
    weight = policy.chunks[0].decoder.layers[1].self_attention.linear_proj.weight.data.view(-1)
    weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))


def change_epsilon(policy):
    for module in policy.chunks[0].modules():
        if type(module).__name__ == "Norm":
            module.eps *= 1.01


def change_angle(policy):
    policy.chunks[0].inverse_frequencies[0].mul_(1 + 1e-7)


def test_bitwise_comparison_detects_smallest_differences_and_many_without_the_setting(tmp_path):
    path = cases.write(tmp_path, "qwen3")

    def body(rank, world):
        from megatron_grpo.commands.analysis.bitwise_parity import switch_off

        parallel = parity.join(parity.settings(), world)
        pair = cases.PolicyAndEngine.build(rank, world, path, parallel=parallel)
        completions, found = pair.sample(cases.prompts()), {}
        for change in (None, change_one_ulp, change_epsilon, change_angle):
            pair.policy = parity.build(path, parity.settings(temperature=0.8, bitwise_parity=True), world, parallel)
            if change is not None:
                change(pair.policy)
            found[change and change.__name__] = pair.agreement(completions)
        switch_off()
        pair.policy = parity.build(path, parity.settings(temperature=0.8), world, parallel)
        return found | {"off": pair.agreement(completions)}

    (found,) = run_ranks(body, 1)
    assert found.pop(None).is_exact and len(found) == 4
    for name, count in found.items():
        assert not count.is_exact and count.worst < 1e-4, f"{name}: {count}"


def test_bitwise_parity_gradients_are_as_near_float64_as_without_it(tmp_path):
    model, layout = "MoE", "TP2 ETP2"
    path = write_tiny(tmp_path, **parity.MODELS[model])
    batches = parity.stored_rollout(path, vocab=parity.MODELS[model]["vocab"])
    own = parity.MODEL_SETTINGS.get(model, {})
    losses = {name: parity.LOSSES[name] | dict(bitwise_parity=True) for name in ("grpo",)}
    right = {name: parity.reference(path, parity.settings(**own | loss), batches) for name, loss in losses.items()}
    for name, found in parity.compare(model, path, parity.LAYOUTS[layout], losses, batches, right).items():
        assert found.within(), f"{name}: {found}"


def test_bitwise_parity_run_reports_no_difference(tmp_path):
    flags = [*write_inputs(tmp_path), *("--output_dir", str(tmp_path / "out"), "--max_steps", "3", "--bitwise_parity", "true")]
    assert run_ranks(train, 1, [*flags, "--export_hf", "false"], timeout=180) == [0]
    differences = [step["sampling/sampling_logp_difference/max"] for step in read_jsonl(tmp_path / "out" / "metrics.jsonl")]
    assert differences == [0.0] * 3
