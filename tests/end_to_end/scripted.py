"""Complete runs with scripted completions, in seconds and without vLLM; and the same runs with transformers in float64.

The float64 side shares with the package only the order of prompts and the rows of each step (`TrainingSchedule`, which has its own tests).
It computes old log-probs itself, when a rollout is sampled, for each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.types import Completion, Prompt, Sample

LONGEST = 8  # tokens of a completion


def make_answers(model_path: str | Path, temperature: float, *, by_version: bool = False) -> Callable[[Prompt, int, int], Completion]:
    """Return completions that depend on prompt, completion index and weight version, with log-probs near the initial model's."""
    from tests.tiny_models import hf_logprobs, load_tiny

    model = load_tiny(model_path)

    def answer(prompt: Prompt, place: int, version: int) -> Completion:
        rng = np.random.default_rng([prompt.number, place, *([version] if by_version else [])])
        length = int(rng.integers(1, LONGEST + 1))
        tokens = rng.integers(4, 120, length).tolist()
        logprobs = hf_logprobs(model, [*prompt.token_ids, *tokens], temperature)[-length:].numpy() + rng.normal(0, 0.05, length)
        logprobs = np.minimum(logprobs, 0.0)  # a likely token's is a little off on one side only
        finish_reason = "length" if length == LONGEST else "stop"
        return make_completion(
            prompt.token_ids, tokens, logprobs, text=" ".join(map(str, tokens)), finish_reason=finish_reason, version=version
        )

    return answer


def read_answers(cfg: Any, model_path: str | Path) -> Callable[[Prompt, int, int], Completion]:
    return make_answers(model_path, cfg.rollout.temperature, by_version=cfg.rollout.async_rollout_depth > 0)


def train(rank: int, world_size: int, flags: list[str], *, draws: bool = False) -> int:
    """Run `megatron-grpo train` with a scripted engine. For `run_ranks`. draws: also draw plots."""
    from megatron_grpo.cli import main
    from tests.end_to_end.runs import without_plots
    from tests.scripted_engine import ScriptedEngine

    if not draws:
        without_plots()

    def engine(cfg, inputs, parallel):
        return ScriptedEngine(read_answers(cfg, inputs.model_path))

    return main(["train", "--verify_weight_sync", "false", *flags], engine=engine)


# ---- the same by transformers ----------------------------------------------------------------------------------------------------------


def compute_expected(flags: list[str], world_size: int, score: Callable[[Completion, Prompt], float]) -> Any:
    """Return `tests.parity_cases.Trained` of the run that these flags describe, with one reward function: `score`."""
    from megatron_grpo.core.batching.schedule import TrainingSchedule
    from megatron_grpo.run.config.parse import resolve
    from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
    from megatron_grpo.run.data.chat import load_tokenizer
    from megatron_grpo.run.data.prompts import open_stream
    from tests import parity_cases as cases

    cfg = resolve(flags, launcher_world_size=world_size)
    stream = open_stream(cfg.data, load_tokenizer(cfg.model.model), seed=cfg.run.seed)
    sizes = checked_sizes(cfg)
    table = TrainingSchedule(sizes, cfg.run.max_steps, len(stream), cfg.data.dataset_drop_last)
    stream.epoch_multiple = sizes.num_rollout_prompts if cfg.data.dataset_drop_last else 1
    answer = read_answers(cfg, cfg.model.model)

    def batches(model, frozen) -> Iterator[list[Sample]]:
        rollouts: dict[int, list[Sample]] = {}
        sampling_steps = [0]
        for step in table.from_step(0):
            new = sorted({micro.rollout for micro in step.micro_steps} - rollouts.keys())
            version = sampling_steps[-1] if cfg.rollout.async_rollout_depth else step.index
            for number in new:
                groups = []
                for prompt in stream.take(sizes.num_rollout_prompts):
                    groups.append((prompt, [answer(prompt, place, version) for place in range(sizes.num_generations)]))
                rollouts[number] = add_old_logprobs(cfg, groups, model, frozen, number, version, score)
            sampling_steps += [step.index] * bool(new)
            yield [rollouts[micro.rollout][row] for micro in step.micro_steps for row in range(*micro.rows)]

    return cases.reference(cfg.model.model, cfg, batches)


def add_old_logprobs(cfg, groups, model, frozen, number: int, version: int, score) -> list[Sample]:
    """Return all samples with old log-probs of the model at the time of the rollout, however the schedule obtains them."""
    from megatron_grpo_referee import reference as grpo_reference

    samples = []
    for prompt, completions in groups:
        for completion in completions:
            sequence, sampler = completion.sequence, completion.logprobs
            sample = Sample(
                row=len(samples), rollout=number, prompt_number=prompt.number, version=version, on_policy_version=version,
                token_ids=sequence.token_ids, mask=sequence.mask, sampler_logprobs=sampler, advantage=0.0, is_zero_std=False,
                is_truncated=completion.finish_reason == "length",
            )  # fmt: skip
            old = sampler.astype(np.float64) if cfg.batch.old_logprobs == "rollout" else logprobs(model, sample, cfg.rollout.temperature)
            samples.append(sample.with_old_logprobs(old, "recompute"))
    rewards = [[[score(completion, prompt)] for completion in completions] for prompt, completions in groups]
    penalty = None
    if cfg.grpo.kl_in_reward:
        temperature = cfg.rollout.temperature
        sums = [float((logprobs(model, s, temperature) - logprobs(frozen, s, temperature)).sum()) for s in samples]
        penalty = cfg.grpo.beta * np.array(sums).reshape(len(groups), -1)
    advantages = grpo_reference.advantages(rewards, [1.0], cfg.grpo, penalty)
    flat = [advantage for group in advantages for advantage in group]
    return [dataclasses.replace(sample, advantage=advantage) for sample, advantage in zip(samples, flat, strict=True)]


def logprobs(model, sample: Sample, temperature: float) -> np.ndarray:
    """Return float64 [T], 0 where a token is not trained."""
    from megatron_grpo_referee.reference import token_logprobs
    from tests.parity_cases import float32_means_float64

    with torch.no_grad(), float32_means_float64():
        logits = model(torch.from_numpy(sample.token_ids)[None], use_cache=False).logits[0, :-1]
        found, _ = token_logprobs(logits, torch.from_numpy(sample.token_ids[1:]), temperature)
    return np.where(sample.mask, np.concatenate([[0.0], found.numpy()]), 0.0)


def score_even(completion: Completion, prompt: Prompt) -> float:
    """Return the value of `runs.REWARD`."""
    return sum(token % 2 == 0 for token in completion.answer_ids) / completion.num_sampled
