"""Models with random unusual sizes of each family, against transformers: for `tools/parity.py --odd`.

Sizes: one to twelve heads in one to all groups, head sizes of 6 to 40 at any width, windows of 1 token or longer than the sequence, any
pattern of layers, biases, each kind of rope, indivisible vocabularies, any number of experts. A model is either rejected before anything
loads, or its log-probs of packed sequences, all gradients and exports equal transformers'.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.core.base.errors import ConfigError
from tests import parity_cases as cases
from tests.checked import check
from tests.odd_draws import LONGEST, SPARSE, draw, forget, older_spelling
from tests.tiny_models import FAMILIES, hf_logprobs, load_tiny, write_tiny

LIMITS = {"log-prob": 2e-5, "gradient": 1e-4}  # absolute; of a tensor's norm (what float32 costs: 1e-5, in a few 3e-5)
# Of the norm of all gradients together: what a tensor counts at least, and beneath which it has none, as queries of tokens that see but
# themselves.
LEAST, NONE = 1e-3, 1e-9


@dataclass(frozen=True)
class OddModel:
    """A random model with transformers' results."""

    number: int
    family: str
    changes: Mapping[str, Any]
    path: Path
    sequences: list[list[int]]
    logprobs: list[np.ndarray]
    batches: list
    right: cases.Trained


@dataclass(frozen=True)
class Outcome:
    """Result of a model.

    kind: equal, refused, wrong, crashed, or undecided where float32 is not precise enough. said: the errors of a refusal, or what is wrong.
    """

    kind: str
    said: str = ""
    logprob: float = 0.0
    gradient: float = 0.0


def refusals(path: Path, layout: cases.Case) -> list[str]:
    """Return the errors of a run with this model before anything loads."""
    flags = {**layout.settings, "model": path, "max_prompt_length": LONGEST - 16, "max_completion_length": 16, "torch_dtype": "float32",
             "num_generations": 8, "steps_per_generation": 1, "global_batch_size": 8, "micro_batch_size": 1}  # fmt: skip
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value).lower() if isinstance(value, bool) else str(value))]
    try:
        check(argv, launcher_world_size=layout.world_size)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


def prepare(folder: Path, number: int, family: str, seed: int, layout: cases.Case) -> OddModel | Outcome | None:
    """Return the model and its reference; None if transformers rejects it; an Outcome if the package rejects it."""
    rng = random.Random(f"{seed} {number} {family}")
    changes, path = draw(rng, family, layout.settings), folder / f"{number} {family}"
    try:
        write_tiny(path, family, seed=number, **changes)
        if rng.random() < 0.3:
            older_spelling(path)
        if rng.random() < 0.3:
            forget(rng, path)
        model = load_tiny(path)
        sequences = [[rng.randrange(changes["vocab"]) for _ in range(length)] for length in (5, 9, 2, LONGEST, 9, 17)]
        logprobs = [hf_logprobs(model, tokens).numpy() for tokens in sequences]
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told of this model, and the others go on
        return None if _is_theirs(error) else Outcome("crashed", f"transformers: {error!r}")
    if said := refusals(path, layout):
        return Outcome("refused", " ".join(said))
    batches = cases.stored_rollout(path, vocab=changes["vocab"], seed=number)
    if family == "gpt_oss" and is_at_clamp(load_tiny(path, "float64"), batches[0]):
        return Outcome("undecided", "a gate lies at its clamp, where its gradient has a step")
    return OddModel(number, family, changes, path, sequences, logprobs, batches, cases.reference(path, cases.settings(), batches))


def is_at_clamp(model, samples) -> bool:
    """Return whether a gate is so near its clamp (gpt-oss) that float32 may be on the other side."""
    nearest = []

    def look(experts, args, output):
        hidden, chosen = args[0].reshape(-1, args[0].shape[-1]), args[1]
        for number in range(len(experts.gate_up_proj)):
            rows = hidden[(chosen.reshape(len(hidden), -1) == number).any(dim=-1)]
            both = rows @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
            nearest.extend((both.abs() - model.config.swiglu_limit).abs().flatten().tolist())

    for module in model.modules():
        if hasattr(module, "gate_up_proj_bias"):
            module.register_forward_hook(look)
    with torch.no_grad():
        for sample in samples:
            model(torch.from_numpy(sample.token_ids)[None])
    return min(nearest) < 1e-6


def _is_theirs(error: Exception) -> bool:
    """Return whether an error is raised by transformers' own checks."""
    return (
        isinstance(error, (ValueError, RuntimeError, UnboundLocalError, ZeroDivisionError, TypeError, KeyError))
        or "Validation" in type(error).__name__
    )


def measure(rank: int, world: int, models: Sequence[OddModel], settings: Mapping[str, Any], tamper=None) -> list[Outcome]:
    """Return the results of the package on real ranks, one model after another. `tamper(policy)` applies a mutation first."""
    parallel, found = cases.join(cases.settings(**settings), world), []
    for odd in models:
        try:
            found.append(_measure_one(rank, world, odd, cases.settings(**settings), parallel, tamper))
        except ConfigError as error:  # by what lies in the files
            found.append(Outcome("refused", str(error)))
        except Exception as error:  # noqa: BLE001  # as above
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(Outcome("crashed", f"{error!r} at {Path(last.filename).name}:{last.lineno}"))
    return found


def _measure_one(rank: int, world: int, odd: OddModel, cfg, parallel, tamper) -> Outcome:
    from megatron_grpo.core.weights.hf_files import HfReader
    from megatron_grpo.core.weights.safetensors_files import stored_names

    seen: dict[str, Any] = {}

    def look(policy):
        if tamper is not None:
            tamper(policy)
        read, exported = HfReader(odd.path), {name: tensor.clone() for name, tensor in policy.named_weights()}
        names = set(stored_names(odd.path)) if cases._family(odd.path).fused_experts else read.names
        seen["export"] = exported.keys() == names and all(
            bytes(exported[name].numpy().tobytes()) == bytes(read(name).numpy().tobytes()) for name in exported
        )
        seen["logprobs"] = cases.score_tokens(policy, odd.sequences)

    trained = cases.train(rank, world, odd.path, cfg, odd.batches, look, parallel=parallel)
    logprob = max(float(np.abs(a - b).max()) for a, b in zip(seen["logprobs"], odd.logprobs, strict=True))
    gradient, name = gradient_error(trained.gradients, odd.right.gradients)
    wrong = [] if seen["export"] else ["what it exports is not the checkpoint"]
    if not logprob <= LIMITS["log-prob"]:
        wrong.append(f"log-probs by {logprob:.1e}")
    if not gradient <= LIMITS["gradient"]:
        wrong.append(f"the gradient of {name} by {gradient:.1e}")
    return Outcome("wrong" if wrong else "equal", ", ".join(wrong), logprob, gradient)


def gradient_error(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """Return the error of the worst tensor: norm of the difference over its norm, or over LEAST of the norm of all if that is larger."""
    assert found.keys() == right.keys(), sorted(found.keys() ^ right.keys())[:4]
    whole = float(np.sqrt(sum(float((tensor.astype(np.float64) ** 2).sum()) for tensor in right.values())))

    def size(tensor: np.ndarray) -> float:
        norm = float(np.linalg.norm(tensor))
        return max(norm, LEAST * whole) if norm > NONE * whole else 0.1 * whole

    return max((float(np.linalg.norm(found[name] - tensor)) / size(tensor), name) for name, tensor in right.items())


def outcomes(
    folder: Path, numbers: Sequence[int], seed: int, layout: cases.Case, tamper=None
) -> dict[tuple[int, str], tuple[Outcome, Mapping[str, Any]]]:
    """Yield results by (number, family), with the settings; number i is of the i-th family, cyclically.

    None for models that transformers rejects.
    """
    from tests.ranks import run_ranks

    families, models = SPARSE if layout.needs_experts else FAMILIES, list[OddModel]()
    found: dict[tuple[int, str], tuple[Outcome, Mapping[str, Any]]] = {}
    for number in numbers:
        family = families[number % len(families)]
        made = prepare(folder, number, family, seed, layout)
        if isinstance(made, Outcome):
            found[number, family] = made, draw(random.Random(f"{seed} {number} {family}"), family, layout.settings)
        elif made is not None:
            models.append(made)
    settings = layout.settings | dict(max_tokens_per_micro_batch=48)
    ranks = run_ranks(lambda *place: measure(*place, models, settings, tamper), layout.world_size, timeout=120 + 10 * len(models))
    for odd, by_rank in zip(models, zip(*ranks, strict=True), strict=True):
        worst = max(by_rank, key=lambda one: (one.kind in ("wrong", "crashed"), one.gradient))
        found[odd.number, odd.family] = worst, odd.changes
    return found
