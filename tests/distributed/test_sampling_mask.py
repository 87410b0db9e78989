"""Sampling with top_k, top_p and min_p: the trainer's softmax is over the sampler's tokens, exactly, in each layout."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import EOS, load_tiny, write_tiny

GROUPS = ((3, (5, 1, 4, 8)), (1, (2, 12)), (7, (2, 9)))
# Entropies and the KL to the reference are of the kept words too, and their gradients.
LOSS = dict(loss_type="cispo", entropy_coef=0.01, beta=0.05, rollout_importance_sampling_mode="token_truncate")
CUT = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02)
NUCLEUS = dict(temperature=0.7, top_p=0.9)
BOUND = dict(temperature=0.7, top_k=20, vllm_structured_outputs_regex="1[0-9]{3,7}")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return (path, a batch whose tokens have a sampling mask or none, settings by loss, expected results)."""
    path = write_tiny(tmp_path_factory.mktemp("models") / "dense", **cases.MODELS["dense"])
    [samples] = cases.stored_rollout(path, vocab=125, groups=GROUPS)
    batches = [cases.with_kept(path, samples, vocab=125)]
    losses = {"cispo": LOSS, "slope": {}}
    return path, batches, losses, {name: cases.reference(path, cases.settings(**loss), batches) for name, loss in losses.items()}


@pytest.mark.parametrize("layout", ["1", "TP2 SP", "CP2", "PP2"])
def test_sampling_mask_steps_equal_float64(made, layout):
    """With the entropy's gradient and with gradients made in the forward, with and without shared prefixes."""
    path, batches, losses, right = made
    shared = dict(max_tokens_per_micro_batch=32, **cases.SHARED)
    runs = {"cispo": losses["cispo"] | dict(micro_batch_size=2), "slope": losses["slope"] | shared}
    found = cases.compare("dense", path, cases.LAYOUTS[layout], runs, batches, right)
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


def drop_mask(kept):
    return None


def shift_mask(kept):
    return kept.take(np.roll(np.arange(len(kept.counts)), 1))


@pytest.mark.parametrize("mistake", [drop_mask, shift_mask])
def test_sampling_mask_mutation_is_detected(made, mistake):
    path, batches, losses, right = made
    cfg = cases.settings(**losses["cispo"], micro_batch_size=4)

    def tamper(policy):
        real = policy.train_step

        def wrong(batch):
            micro_batches = tuple(dataclasses.replace(micro, sampling_mask=mistake(micro.sampling_mask)) for micro in batch.micro_batches)
            return real(dataclasses.replace(batch, micro_batches=micro_batches))

        policy.train_step = wrong

    [found] = run_ranks(lambda rank, world: cases.train(rank, world, path, cfg, batches, tamper), 1)
    assert cases.distance(found, right["cispo"]).gradient > 0.01


def test_sampling_mask_sampler_and_trainer_logprobs_agree(tmp_path):
    """As near as without a mask; the masks equal those of transformers' logits."""
    path = write_tiny(tmp_path / "model", vocab=700, layers=2, std=0.1)

    def body(rank, world):
        from megatron_grpo.core.rollout.colocated import ColocatedEngine
        from megatron_grpo.core.rollout.engine import SamplingSettings
        from megatron_grpo.core.settings import RolloutConfig
        from megatron_grpo.core.trainer.generation import check_sampling_mask
        from megatron_grpo.core.types import Prompt

        policy = cases.build(path, cases.settings(temperature=0.7), world)
        limits = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=32)
        engine = ColocatedEngine.build(limits, model_path=path, dtype="float32", max_model_len=64, seed=0, rank=rank, world_size=world)
        prompts = [Prompt(number=i, row=i, raw="", token_ids=tuple(range(4 + i, 12 + 2 * i)), columns={}) for i in range(3)]
        model, apart, counts, beyond = load_tiny(path), {}, [], 0
        for name, how in (("cut", CUT), ("nucleus", NUCLEUS), ("bound", BOUND), ("whole", dict(temperature=0.7))):
            rollout = RolloutConfig(**how)
            sampling = dataclasses.replace(SamplingSettings.from_config(rollout, num_generations=3), max_completion_length=16)
            drawn = [one for group in engine.generate(prompts, sampling, seed=1) for one in group.completions]
            scored = policy.scorer.score([one.sequence for one in drawn])
            gaps = [np.abs(ours - one.logprobs)[one.sequence.mask] for ours, one in zip(scored, drawn, strict=True)]
            apart[name] = float(np.concatenate(gaps).max())
            if name != "whole":
                over_all = policy.scorer.score([dataclasses.replace(one.sequence, mask_offsets=None, mask_ids=None) for one in drawn])
                gaps = [np.abs(ours - one.logprobs)[one.sequence.mask] for ours, one in zip(over_all, drawn, strict=True)]
                apart[f"{name}, mutant"] = float(np.concatenate(gaps).max())
                for one in drawn:
                    check_sampling_mask(one.sequence, sampling.top_k)
                    with torch.no_grad():
                        logits = model(torch.from_numpy(one.sequence.token_ids)[None]).logits[0].double() / 0.7
                    for number, at in enumerate(np.flatnonzero(one.sequence.mask)):
                        words = one.sequence.mask_ids[one.sequence.mask_offsets[number] : one.sequence.mask_offsets[number + 1]]
                        before = one.sequence.token_ids[at - number : at]
                        right = (
                            find_allowed_token(logits[at - 1], "".join(map(str, before)))
                            if name == "bound"
                            else find_kept_tokens(logits[at - 1], sampling)
                        )
                        assert sorted(words.tolist()) == right
                        counts.append(len(words))
                        beyond += name == "nucleus" and right != find_kept_tokens(logits[at - 1], dataclasses.replace(sampling, top_k=700))
                    assert name != "bound" or (one.finish_reason == "stop" and re.fullmatch("1[0-9]{3,7}", "".join(one.text.split())))
        return apart, counts, beyond

    [(apart, counts, beyond)] = run_ranks(body, 1)
    assert all(apart[name] < 1e-4 for name in ("whole", "cut", "nucleus", "bound")), apart
    assert all(apart[f"{name}, mutant"] > 0.1 for name in ("cut", "nucleus", "bound")) and {*counts} >= {1, 4, 5, 20}, (apart, counts)
    assert beyond and max(counts) <= 256, "the nucleus of all words is larger than what may travel, or other words"


def find_allowed_token(logits: torch.Tensor, said: str) -> list[int]:
    """Return the most probable of the tokens that the grammar allows next: word n is "n", and EOS is allowed after a complete text."""
    may = [n for n in range(4, len(logits)) if re.fullmatch("1[0-9]{0,7}", f"{said}{n}")]
    may += [EOS] if re.fullmatch("1[0-9]{3,7}", said) else []
    return sorted(sorted(may, key=lambda n: -float(logits[n]))[: BOUND["top_k"]])


def find_kept_tokens(logits: torch.Tensor, sampling) -> list[int]:
    """Return the tokens after min_p, top_k and top_p in vLLM's order."""
    p = logits.softmax(-1)
    p = torch.where(p >= sampling.min_p * p.max(), p, 0.0)
    values, ids = p.topk(sampling.top_k)
    before = (values / values.sum()).cumsum(0) - values / values.sum()
    return sorted(ids[(values > 0) & (before < sampling.top_p)].tolist())
