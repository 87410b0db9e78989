"""Rows with several contexts, from episodes whose template rewrites history: loss and gradients against float64 of separate contexts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_grpo.core.types import Sample
from tests import parity_cases as cases
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

# By group: tokens of the prompt; of each row its contexts, as the lengths of what is drawn and what is heard in turn.
EPISODES = (
    (5, (((3, 4, 2),), ((3,), (2, 3, 1)))),
    (9, (((1,), (4,), (2, 2, 2)), ((6,),))),
    (2, (((2, 5, 3),), ((1, 1, 1), (7,)))),
    (7, (((4,), (1,)), ((3, 2, 5),))),
)
FAILED = 5  # the row whose environment is at fault
RUNS = {
    ("grpo", "1 each"): {},
    ("dapo", "packed"): dict(max_tokens_per_micro_batch=64, share_prefix="true"),
    ("GSPO", "2 each"): dict(micro_batch_size=2, share_prefix="false"),
    ("cispo", "a divergence, packed"): dict(max_tokens_per_micro_batch=64, share_prefix="false"),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=4, vocab=125, std=0.1, tied=True)


@pytest.fixture(scope="module")
def batches(model_path):
    return [make_episodes(model_path)]


def make_episodes(path) -> list[Sample]:
    model, rng = load_tiny(path), np.random.default_rng(3)
    samples: list[Sample] = []
    for number, (opening, rows) in enumerate(EPISODES):
        prompt, first = rng.integers(0, 125, opening), len(samples)
        for contexts in rows:
            tokens, mask, near, starts = [], [], [], []
            for lengths in contexts:
                starts.append(sum(map(len, tokens)))
                ids = np.concatenate([prompt, rng.integers(0, 125, sum(lengths))])
                drawn = np.concatenate(
                    [np.zeros(opening, bool), *(np.full(length, place % 2 == 0) for place, length in enumerate(lengths))]
                )
                tokens.append(ids)
                mask.append(drawn)
                near.append(np.concatenate([[0.0], hf_logprobs(model, ids.tolist(), 0.9).numpy()]))
            ids, drawn = np.concatenate(tokens), np.concatenate(mask) & (len(samples) != FAILED)
            logprobs = np.where(drawn, np.concatenate(near) + rng.normal(0, 0.1, len(ids)), 0).astype(np.float32)
            is_stale = len(samples) % 3 == 1
            sample = Sample(
                row=len(samples), rollout=0, prompt_number=number, version=-is_stale, on_policy_version=-is_stale,
                token_ids=ids, mask=drawn,
                starts=tuple(starts), sampler_logprobs=logprobs, is_zero_std=False, is_truncated=len(samples) == 3,
                advantage=0.0 if len(samples) == FAILED else float(rng.uniform(0.5, 1.5) * (-0.4 if len(samples) % 3 == 0 else 1.0)),
            )  # fmt: skip
            samples.append(sample.with_old_logprobs(logprobs, "recompute") if is_stale else sample)
        samples[first:] = cases.with_prefix(samples[first:])
    return samples


@pytest.fixture(scope="module")
def references(model_path, batches):
    return {key: cases.reference(model_path, cases.settings(**cases.LOSSES[key[0]]), batches) for key in RUNS}


@pytest.mark.parametrize("layout", ["1", "TP2 SP", "PP2 VPP2", "CP2", "DP2"])
def test_rows_with_several_contexts_equal_float64_of_separate_contexts(model_path, batches, references, layout):
    runs = {key: cases.LOSSES[key[0]] | run for key, run in RUNS.items()}
    found = cases.compare("dense", model_path, cases.LAYOUTS[layout], runs, batches, references)
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


def make_mutations(samples: list[Sample]) -> dict[str, list[Sample]]:
    """Yield rows under mutations of masks and contexts."""
    heard = [dataclasses.replace(one, mask=_mask_from_first_sampled(one)) if one.row != FAILED else one for one in samples]
    return {
        "the environment's words are trained": [_spread_logprobs(one, other) for one, other in zip(heard, samples)],
        "the mask is one place late": [_spread_logprobs(dataclasses.replace(one, mask=_shift_mask(one)), one) for one in samples],
        "the last token of a turn is not trained": [
            _spread_logprobs(dataclasses.replace(one, mask=one.mask & ~_mask_turn_ends(one)), one) for one in samples
        ],
        "only the last context is trained": [
            _spread_logprobs(dataclasses.replace(one, mask=one.mask & (np.arange(len(one.mask)) >= one.starts[-1])), one) for one in samples
        ],
        "contexts are taken for one": [_spread_logprobs(dataclasses.replace(one, starts=(0,)), one) for one in samples],
    }


def _mask_from_first_sampled(one: Sample) -> np.ndarray:
    mask = np.zeros(len(one.mask), dtype=bool)
    for begin, end in one.contexts:
        mask[begin + int(np.argmax(one.mask[begin:end])) : end] = True
    return mask


def _shift_mask(one: Sample) -> np.ndarray:
    mask = np.roll(one.mask, 1)
    mask[list(one.starts)] = False
    return mask


def _mask_turn_ends(one: Sample) -> np.ndarray:
    after = np.append(one.mask[1:], False)
    after[np.array(one.starts[1:], dtype=int) - 1] = False
    return one.mask & ~after


def _spread_logprobs(wrong: Sample, right: Sample) -> Sample:
    """Return log-probs with zeros where the other mask is false."""
    return dataclasses.replace(wrong, sampler_logprobs=np.where(wrong.mask, right.sampler_logprobs, 0).astype(np.float32))


def test_contexts_mutation_changes_the_gradient(model_path, batches, references):
    [right] = batches
    wrong = make_mutations(right)
    runs = {"right": right} | wrong
    key = ("grpo", "1 each")

    def all_runs(rank, world):
        cfg = cases.settings(**cases.LOSSES[key[0]])
        parallel = cases.join(cfg, world)
        return {name: cases.train(rank, world, model_path, cfg, [samples], parallel=parallel) for name, samples in runs.items()}

    from tests.ranks import run_ranks

    [found] = run_ranks(all_runs, 1, timeout=200)
    within = {name: cases.distance(one, references[key]).within() for name, one in found.items()}
    assert within == {"right": True} | dict.fromkeys(wrong, False)
