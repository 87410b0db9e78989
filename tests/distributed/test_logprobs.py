"""Log-probs of the sharded model against transformers, token by token, in each layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

LENGTHS = (5, 9, 2, 17, 9, 8, 3)  # two of one length: they share a batched attention
VOCAB = 125  # does not divide by anything
FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        family: write_tiny(folder / family, family, layers=4, vocab=VOCAB, tied=family in ("llama", "mixtral"), std=0.1)
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def score(rank, world, path, cfg, sequences):
    """Return log-probs with the micro-batches of a run, after a check that many smaller ones give the same."""
    policy = cases.build(path, cfg, world)
    few, in_few = iterate_passes(policy, sequences)
    policy.scorer.cut = dataclasses.replace(policy.cut, scored_tokens=1)
    many, in_many = iterate_passes(policy, sequences)
    assert few <= many and (cfg.batch.max_tokens_per_micro_batch or few == policy.cut.multiple < many)
    assert max(np.abs(a - b).max() for a, b in zip(in_few, in_many, strict=True)) < 2e-6
    return in_few


def iterate_passes(policy, sequences):
    """Yield (micro-batches, log-probs) of a scoring."""
    seen = []
    hook = policy.chunks[0].register_forward_pre_hook(lambda *arguments: seen.append(1))
    found = cases.score_tokens(policy, sequences)
    hook.remove()
    return len(seen), found


def assert_transformers_agrees(path, sequences, layout):
    model = load_tiny(path)
    wanted = [hf_logprobs(model, tokens).numpy() for tokens in sequences]
    cfg = cases.settings(micro_batch_size=2, **layout.settings)
    for found in run_ranks(score, layout.world_size, path, cfg, sequences):
        assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["1", "TP2", "PP2", "TP2 SP", "PP2 VPP2", "CP2", "DP2"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_dense_logprobs_equal_transformers(models, sequences, family, name):
    assert_transformers_agrees(models[family], sequences, cases.LAYOUTS[name])


@pytest.mark.parametrize("name", ["1", "TP2 SP", "PP2 VPP2", "CP2", "EP2", "TP2 EP2 ETP1", "TP2 ETP2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_expert_logprobs_equal_transformers(models, sequences, family, name):
    assert_transformers_agrees(models[family], sequences, cases.LAYOUTS[name])


@pytest.mark.parametrize("name", ["DP2", "PP2 VPP2", "CP2"])
def test_packed_logprobs_equal_transformers(models, sequences, name):
    """Seven sequences over two ranks, or in pairs of micro-batches: the numbers are uneven."""
    layout = cases.LAYOUTS[name]
    packed = cases.Case(layout.world_size, layout.settings | {"max_tokens_per_micro_batch": 20})
    assert_transformers_agrees(models["qwen3"], sequences, packed)


def test_logprobs_with_a_vocabulary_shard_of_padding_equal_transformers(models, sequences):
    """A vocabulary of 125 is padded to 256 rows: the second rank holds padding only."""
    layout = cases.Case(2, {cases.TP: 2, "padded_vocab_multiple": 128})
    assert_transformers_agrees(models["qwen3"], sequences, layout)


def test_output_layer_multiplies_in_float32_if_set(models, sequences):
    def body(rank, world_size):
        import torch

        parallel = cases.join(cases.settings(torch_dtype="bfloat16"), world_size)
        far, seen = {}, []
        for is_cast in (False, True):
            cfg = cases.settings(torch_dtype="bfloat16", cast_lm_head_to_fp32=is_cast)
            policy = cases.build(models["qwen3"], cfg, world_size, parallel)
            head = policy.chunks[0].output_layer
            head.register_forward_pre_hook(lambda module, given: seen.append((given[0].detach().clone(), given[2])))
            (found,) = cases.score_tokens(policy, sequences[3:4])
            hidden, batch = seen[-1]
            logits = hidden.squeeze(1)[batch.logit_positions].double() @ head.weight.detach().double().T[:, :VOCAB]
            right = logits.log_softmax(-1).gather(-1, batch.targets[:, None]).squeeze(-1)
            far[is_cast] = float(abs(torch.as_tensor(found) - right).max())
        return far

    [far] = run_ranks(body, 1)
    assert far[True] < 1e-5 < 1e-3 < far[False], far
