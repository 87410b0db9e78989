"""Every combination of loss type, importance level, KL mode and estimator, against float64.

Compared are the loss and every gradient tensor of one step of a real policy. One policy per layout runs all combinations; only its loss,
the advantages and the split into micro-batches change. The reference runs transformers' model once and differentiates the formula of each
loss. `tests/distributed/test_combinations.py` runs every pair of settings, `tools/combinations.py` all combinations or random runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.types import Sample
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.settings import Config
from megatron_grpo_referee import reference
from tests import parity_cases as cases

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "cispo", "sapo", "luspo", "vespo", "fipo", "real")
LEVELS = ("token", "sequence", "sequence_token")
KL_MODES = {
    "no KL": {},
    "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2"},
    "k3": {"beta": 0.3, "kl_estimator": "k3"},
    "k2 plain": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k3 plain": {"beta": 0.3, "kl_estimator": "k3", "use_bias_correction_kl": False},
    "in reward": {"beta": 0.3, "kl_in_reward": True},
}
ESTIMATORS = {
    "grpo": {},
    "grpo, batch": {"scale_rewards": "batch"},
    "Dr. GRPO": {"scale_rewards": "none"},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"advantage_estimator": "gdpo"},
}
# What else may be set; drawn at random for each combination.
OTHERS = {
    "epsilon": (0.2, 0.05),
    "epsilon_high": (None, 0.28, 3.0),
    "delta": (None, 1.5),
    "entropy_coef": (0.0, 0.02),
    "top_entropy_quantile": (1.0, 0.5),
    "overlong_filter": (False, True),
    "rollout_importance_sampling_mode": ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "rollout_is_geometric": (False, True),
    "off_policy_sequence_mask_delta": (None, 0.05),
}
CUTS = tuple(cases.CUTS.values())
REWARD_WEIGHTS = (1.0, 0.5)
NAMES = ("loss type", "level", "KL", "estimator")
MODEL = dict(family="qwen3", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=60, std=0.12)
LONGEST = 16  # max_completion_length
GROUPS: cases.Groups = ((5, (5, 1, 2, 9)), (1, (12, 2, 3, 1)))

Combination = tuple[str, str, str, str]
# By any key, in order: what to train, or None where the settings do not go together, and how to cut it.
Runs = Mapping[Hashable, tuple[GrpoConfig | None, Mapping[str, int]]]


def list_all() -> list[Combination]:
    return list(itertools.product(LOSS_TYPES, LEVELS, KL_MODES, ESTIMATORS))


def list_pairs() -> list[Combination]:
    """Return 77 of the 1617 combinations in which each pair of settings of different kinds occurs (Latin squares)."""
    kl, estimators = list(KL_MODES), list(ESTIMATORS)
    return [(LOSS_TYPES[i], LEVELS[(i + 2 * k) % 3], kl[k], estimators[(i + k) % 7]) for i in range(len(LOSS_TYPES)) for k in range(7)]


def make_config(combination: Combination) -> GrpoConfig | None:
    """Return the combination with the other settings drawn at random until they are valid; None if the four are not valid."""
    loss_type, level, kl, estimator = combination
    base = {"loss_type": loss_type, "importance_sampling_level": level, **KL_MODES[kl], **ESTIMATORS[estimator]}
    if validate(base) is None:
        return None
    return draw_other_settings(np.random.default_rng(list_all().index(combination)), base, OTHERS)


def iterate_runs(combinations: Sequence[Combination]) -> Runs:
    """Yield the runs of each combination; combination i uses split i modulo four."""
    return {combination: (make_config(combination), CUTS[i % len(CUTS)]) for i, combination in enumerate(combinations)}


def validate(settings: Mapping) -> GrpoConfig | None:
    """Return the configuration of these settings, or None if they are invalid."""
    cfg = GrpoConfig(**settings)
    return None if validation.problems(Config(grpo=cfg)) else cfg


def draw_other_settings(rng: np.random.Generator, base: Mapping, others: Mapping[str, Sequence]) -> GrpoConfig:
    """Return `base` with each setting of `others` drawn at random until they are valid."""
    while True:
        drawn = {name: values[rng.integers(len(values))] for name, values in others.items()}
        if (cfg := validate({**base, **drawn})) is not None:
            return cfg


# ---- what is trained -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CombinationInputs:
    """Inputs of all combinations.

    model, reference: checkpoints. samples: eight samples in order of groups, without advantages. rewards: [groups][G][2]; some are None.
    """

    model: Path
    reference: Path
    samples: list[Sample]
    rewards: list[list[list[float | None]]]


def make_inputs(folder: Path, seed: int = 0, groups: cases.Groups = GROUPS, **shape) -> CombinationInputs:
    """Write the models and draw the samples; `shape` replaces MODEL's sizes."""
    from safetensors.torch import load_file, save_file

    from tests.tiny_models import write_tiny

    model = write_tiny(folder / "model", **MODEL | shape, seed=seed)
    shutil.copytree(model, folder / "reference")
    weights = load_file(model / "model.safetensors")
    # Log-probs carry float32's rounding of the logits: smaller ones leave the loss, where advantages let terms cancel, more of its digits.
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] *= 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(seed)
    moved = {name: w + 0.01 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(moved, folder / "reference" / "model.safetensors", metadata={"format": "pt"})
    (samples,) = cases.stored_rollout(model, vocab=MODEL["vocab"], seed=seed, groups=groups)
    samples = [with_teacher(sample) for sample in samples]
    rng = np.random.default_rng(seed)
    rewards = [[[float(rng.normal()), float(rng.normal(1.0))] for _ in completions] for _, completions in groups]
    rewards[-1][-2][1] = None
    return CombinationInputs(model, folder / "reference", samples, rewards)


def with_teacher(sample: Sample) -> Sample:
    """Return the samples with random teacher log-probs; one row has none."""
    noise = np.random.default_rng(sample.row).normal(0.0, 0.4, len(sample.token_ids))
    values = np.where(sample.mask, sample.sampler_logprobs + noise, 0.0).astype(np.float32)
    return dataclasses.replace(sample, teacher_logprobs=None if sample.row == 1 else values)


# ---- transformers, in float64 ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ExpectedResults:
    """Expected results.

    losses: [runs]. gradients: file with [runs, numbers of all tensors]. penalty: [8], of the KL in the reward at a beta of 0.3.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    losses: np.ndarray
    gradients: Path
    penalty: np.ndarray


def expect(made: CombinationInputs, runs: Runs, folder: Path) -> ExpectedResults:
    """Return the expected results of each run, NaN where its settings are invalid. Gradients go to a file that ranks map."""
    from tests.tiny_models import load_tiny

    model, frozen = load_tiny(made.model, "float64"), load_tiny(made.reference, "float64")
    named = dict(model.named_parameters())
    completions = [_completion(model, frozen, sample) for sample in made.samples]
    kl = np.array([float(((c.logp.detach() - c.ref_logp) * c.mask).sum()) for c in completions])
    losses, rows = [], []
    for cfg, _ in runs.values():
        if cfg is None:
            losses.append(np.nan)
            rows.append(np.full(sum(p.numel() for p in named.values()), np.nan))
            continue
        penalty = (cfg.beta * kl).reshape(len(made.rewards), -1) if cfg.kl_in_reward else None
        flat = [a for group in reference.advantages(made.rewards, REWARD_WEIGHTS, cfg, penalty) for a in group]
        batch = [dataclasses.replace(c, advantage=a) for c, a in zip(completions, flat, strict=True)]
        loss = reference.grpo_loss(batch, cfg, LONGEST)
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        losses.append(loss.item())
        rows.append(np.concatenate([grad.numpy().ravel() for grad in grads]))
    np.save(folder / "gradients.npy", np.array(rows))
    shapes = [tuple(p.shape) for p in named.values()]
    return ExpectedResults(list(named), shapes, np.array(losses), folder / "gradients.npy", 0.3 * kl)


def _completion(model, frozen, sample: Sample) -> reference.ReferenceCompletion:
    at = np.flatnonzero(np.arange(len(sample.token_ids)) >= np.argmax(sample.mask))
    ids, targets = torch.from_numpy(sample.token_ids)[None], torch.from_numpy(sample.token_ids[at])
    with cases.float32_means_float64():
        logp, entropy = reference.token_logprobs(model(ids, use_cache=False).logits[0, at - 1], targets, 0.9)
        with torch.no_grad():
            ref, _ = reference.token_logprobs(frozen(ids, use_cache=False).logits[0, at - 1], targets, 0.9)

    def double(array):
        return torch.from_numpy(array[at].astype(np.float64))

    return reference.ReferenceCompletion(
        mask=double(sample.mask), logp=logp, entropy=entropy, sampler_logp=double(sample.sampler_logprobs), ref_logp=ref,
        old_logp=None if sample.version == 0 else double(sample.old_logprobs), advantage=0.0, is_truncated=sample.is_truncated,
        group=sample.prompt_number, teacher_logp=None if sample.teacher_logprobs is None else double(sample.teacher_logprobs),
    )  # fmt: skip


# ---- the package -----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of one rank by run.

    Of the loss: relative if it is larger than 1, else absolute, because terms cancel with centered advantages and leave no small relative
    error in float32. Of the worst gradient tensor and of the KL in the reward: relative.
    """

    loss: dict[Hashable, float]
    gradient: dict[Hashable, tuple[float, str]]
    kl_in_reward: float

    def beyond(self, *, loss: float = 1e-6, gradient: float = 1e-5) -> list[tuple]:
        wrong = [(key, error) for key, error in self.loss.items() if not error <= loss]
        return wrong + [(key, *error) for key, error in self.gradient.items() if not error[0] <= gradient]


def measure(rank: int, world: int, made: CombinationInputs, layout: Mapping, runs: Runs, right: ExpectedResults, tamper=None) -> Errors:
    """Return this rank's errors of each valid run. For `run_ranks`. `tamper(policy)` applies a mutation first."""
    from megatron_grpo.core.grpo.advantages import advantages
    from megatron_grpo.core.grpo.loss import GrpoLoss
    from megatron_grpo.core.weights.hf_files import HfReader

    policy = cases.build(made.model, cases.settings(beta=0.3, **layout), world)
    policy.exchange.load(policy.reference.scorer.model, HfReader(made.reference))
    policy.optimizer.step = lambda: (True, 0.0, 0)  # the weights stay
    if tamper is not None:
        tamper(policy)
    kl = compute_kl_in_reward(policy, made.samples, beta=0.3)
    wanted = np.load(right.gradients, mmap_mode="r")
    uncut, losses, gradients = policy.cut, {}, {}
    for i, (key, (cfg, sizes)) in enumerate(runs.items()):
        if cfg is None:
            continue
        groups = len(made.rewards)
        found = advantages(made.rewards, cfg, REWARD_WEIGHTS, kl_penalty=kl.reshape(groups, -1) if cfg.kl_in_reward else None)
        values, dead = found.advantages.ravel(), np.repeat(found.is_zero_std, found.advantages.shape[1])
        samples = [
            dataclasses.replace(sample, advantage=float(value), is_zero_std=bool(is_zero_std))
            for sample, value, is_zero_std in zip(made.samples, values, dead, strict=True)
        ]
        policy.loss = GrpoLoss.from_config(cfg, max_completion_length=LONGEST, temperature=0.9)
        max_tokens = sizes.get("max_tokens_per_micro_batch")
        policy.cut = dataclasses.replace(uncut, micro_batch_size=sizes.get("micro_batch_size", 1), max_tokens=max_tokens)
        batch = cases.make_batch(policy, samples, 0)
        loss = policy.train_step(batch).metrics["loss"]
        losses[key] = float(abs(loss - right.losses[i]) / max(1.0, abs(right.losses[i])))
        gradients[key] = _worst(cases.full_gradients(policy), right, wanted[i])
    return Errors(losses, gradients, float(np.linalg.norm(kl - right.penalty) / np.linalg.norm(right.penalty)))


def compute_kl_in_reward(policy, samples: Sequence[Sample], *, beta: float) -> np.ndarray:
    """Return what `--kl_in_reward` subtracts from each row, as a run computes it. Collective."""
    from megatron_grpo.core.trainer.rollouts import KlPenalty
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

    pending = SampleBuffer(parallel=policy.parallel, cut=policy.cut).restored(samples if policy.parallel.is_rank_zero else [])
    found, _ = KlPenalty(policy=policy, reference=policy.reference, beta=beta)(pending.placed())
    return found[pending.rows.find_indices([sample.rollout for sample in samples], [sample.row for sample in samples])]


def _worst(found: Mapping[str, np.ndarray], right: ExpectedResults, wanted: np.ndarray) -> tuple[float, str]:
    assert set(found) == set(right.names)
    ends = np.cumsum([int(np.prod(shape)) for shape in right.shapes])
    parts = {name: part.reshape(shape) for name, shape, part in zip(right.names, right.shapes, np.split(wanted, ends[:-1]), strict=True)}
    return max((cases.relative_error(found[name], part), name) for name, part in parts.items())


# ---- runs drawn at random --------------------------------------------------------------------------------------------------------------

TEACHERS = {"teacher_model_server": ((), ("http://teacher:8000",)), "teacher_kl_coef": (1.0, 0.3)}
RANDOM_OTHERS = OTHERS | TEACHERS | {"top_entropy_quantile": (1.0, 1.0, 1.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)}
RANDOM_SHAPES = ({}, {"tied": True}, {"kv_heads": 4}, {"family": "qwen2", "heads": 4})


def random_groups(rng: np.random.Generator) -> cases.Groups:
    """Return eight completions in groups of two, four or eight, some of them empty."""
    size = int(rng.choice([2, 4, 8]))
    return [(int(rng.integers(1, 12)), rng.integers(0, 13, size).tolist()) for _ in range(cases.NUM_ROWS // size)]


def random_runs(rng: np.random.Generator, layout: cases.Case, count: int) -> Runs:
    """Return valid random runs by number."""
    runs: dict[Hashable, tuple[GrpoConfig, Mapping[str, int]]] = {}
    product, cuts = list_all(), [cut for cut in CUTS if cases.is_legal(layout, cut)]
    while len(runs) < count:
        loss_type, level, kl, estimator = product[rng.integers(len(product))]
        base = {"loss_type": loss_type, "importance_sampling_level": level, **KL_MODES[kl], **ESTIMATORS[estimator]}
        if validate(base) is not None:
            runs[len(runs)] = draw_other_settings(rng, base, RANDOM_OTHERS), cuts[rng.integers(len(cuts))]
    return runs
