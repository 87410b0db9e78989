"""`megatron-grpo compare-losses RUN --variant "loss_type=vespo" --variant "epsilon_high=0.28"`: a step's loss under other settings.

A run with `--record_rows true` stores, beside each checkpoint, the rows that its next step trained. This command loads the policy from such
a checkpoint, in any layout, and computes the forward and backward of that step with the run's settings and then with each variant. It needs
no sampler and updates no weights.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_grpo.commands.analysis.args import CompareLossesArgs, Variant, read_compare_losses_args
from megatron_grpo.commands.analysis.printing import format_cell, print_report, table_lines
from megatron_grpo.commands.analysis.replay import fill_buffer, open_policy
from megatron_grpo.commands.analysis.report import draw_variants
from megatron_grpo.core.base.errors import EXIT_DONE, config_error
from megatron_grpo.core.base.files import plot_obstacle, read_object
from megatron_grpo.core.grpo.loss import GrpoLoss
from megatron_grpo.core.grpo.zero_gradient import RowKind, zero_gradient_kinds
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.policy.optimizer import gradient_norm
from megatron_grpo.core.policy.policy import Policy
from megatron_grpo.core.trainer.sample_buffer import score_rows
from megatron_grpo.core.types import GlobalBatch, RowKey, Sample, SampleWithOldLogprobs
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.assemble import PolicyParts
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.checkpoint.resume import OURS
from megatron_grpo.run.checkpoint.samples import read_samples
from megatron_grpo.run.checkpoint.saving import RECORDED
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.metrics.records import JsonlFile
from megatron_grpo.run.models import find_model
from megatron_grpo.run.open_checkpoint import load_weights

logger = logging.getLogger(__name__)


# Result of one variant, as in the object of `--json`:
#   name        text of the variant
#   rows        rows that trained
#   loss        loss
#   grad_norm   gradient norm
#   cosine      cosine of its gradient with that of the run's settings; None if either is 0
#   kl_sampler  KL(sampler || current policy) by the k3 estimator, in nats per token
#   ess         effective sample size of the weights policy / sampler, as a fraction of the tokens
#   clip_low    fraction of tokens clipped at the lower bound
#   clip_high   fraction of tokens clipped at the upper bound
#   kl          KL from the reference; None without a reference
VariantResult = dict[str, Any]

# Headings of the table, and formats of the values of a `VariantResult` in their order.
COLUMNS = {"": "", "rows": "", "loss": ".5g", "grad_norm": ".5g", "cosine": ".6f", "KL sampler": ".3g", "ESS": ".4f",
           "clip low": ".2%", "clip high": ".2%", "KL ref": ".3g"}  # fmt: skip


class AcceptAllCheck:
    """Gradient check that accepts every gradient, because `compare-losses` shows gradients as they are."""

    def allows(self, gradient: Any) -> bool:
        """Return True."""
        return True


def run_compare_losses(argv: Sequence[str], parse: Callable[[Sequence[str]], ParsedConfig]) -> int:
    """Run the `compare-losses` command and print its findings.

    Returns:
        The exit code.

    Raises:
        ConfigError: With all problems of the command line and the settings.
    """
    args = read_compare_losses_args(argv, parse)
    if args.cfg.plan.png and (obstacle := plot_obstacle(Path(args.cfg.plan.png))):
        raise config_error("png", f"png: {obstacle}")
    outcomes = compare_losses(args)
    if collectives.rank() == 0:
        recorded = _recorded(args)
        result = {"step": args.step, "recorded": recorded, "variants": outcomes}
        print_report(result, report_lines(args, outcomes, recorded), as_json=args.cfg.plan.json)
        line = draw_variants(outcomes, Path(args.cfg.plan.png or args.run / "plots" / "compare_losses.png"), args.step)
        print(line, file=sys.stderr if args.cfg.plan.json else sys.stdout, flush=True)  # with --json, stdout contains only the object
    state.stop()
    return EXIT_DONE


def compare_losses(args: CompareLossesArgs) -> list[VariantResult]:
    """Repeat the recorded step with the run's own settings, then with each variant. Collective.

    Starts the parallel job.

    Returns:
        An outcome per variant, in the order of `asked.variants`.

    Raises:
        ConfigError: If the model is a vision-language model, whose images are not recorded.
    """
    cfg, model = args.cfg, find_model(args.cfg.model.model)
    if ModelShape.from_pretrained(model).vision is not None:
        raise config_error("compare-losses", "compare-losses: rows are recorded without their images. Only text models are supported.")
    beta = max(variant.cfg.grpo.beta for variant in args.variants)  # above 0 if any variant needs the reference
    content = {"question": "; ".join(variant.name for variant in args.variants)}
    policy = open_policy(cfg.with_values({"beta": beta}), model, args.checkpoint, content, num_steps=args.step + 2,
                         parts=PolicyParts(gradient_check=AcceptAllCheck()))  # fmt: skip
    policy.optimizer.step = lambda: None  # keeps the weights unchanged
    samples = read_samples(args.checkpoint / RECORDED)
    left_out = _left_out(cfg, samples, args.step)
    adaptive = policy.entropy
    policy.restore_entropy(read_object(args.checkpoint / OURS / "guard.json"))
    entropy = policy.entropy  # the adaptive coefficient as the checkpoint stored it
    variants = sorted(args.variants, key=lambda variant: variant.staleness)  # the run's own settings stay the first
    with_old_logprobs = _with_old_logprobs(policy, samples) if variants[-1].staleness else []
    gradient, loaded, outcomes = None, 0, dict[str, VariantResult]()
    for variant in variants:
        if variant.staleness != loaded:
            loaded = variant.staleness
            load_weights(policy.chunks, args.later[loaded])
        is_own_entropy = adaptive is not None and variant.cfg.grpo.entropy_coef == adaptive.coef
        policy.entropy = entropy if is_own_entropy else None  # None: the variant's coefficient
        rows = with_old_logprobs if loaded else samples
        outcomes[variant.name], gradient = _take(policy, variant, rows, args.step + loaded, gradient, left_out)
    return [outcomes[variant.name] for variant in args.variants]


def _left_out(cfg: Config, samples: Sequence[Sample], step: int) -> frozenset[RowKind]:
    """Return the kinds of rows that no variant can train, because the run left them out in an earlier pass: they have no old log-probs.

    Otherwise all rows are computed: a variant may look at rows that have no gradient under the settings of the run.
    """
    missing = sum(sample.on_policy_version < step and not isinstance(sample, SampleWithOldLogprobs) for sample in samples)
    if not missing:
        return frozenset()
    if collectives.rank() == 0:
        logger.warning(
            "%d of %d rows have no old log-probs, because they had no gradient in the run. They are left out.", missing, len(samples)
        )
    return zero_gradient_kinds(list_settings(cfg))


def _with_old_logprobs(policy: Policy, samples: Sequence[Sample]) -> list[Sample]:
    """Return all samples with old log-probs by the current weights, on rank 0; an empty list on other ranks. Collective."""
    pending = fill_buffer(policy, samples)
    scored = score_rows(pending.placed(), score=policy.scorer.old_logprobs, cut=policy.cut, parallel=policy.parallel)
    local: dict[RowKey, Sample] = {}
    for key, sample in scored.sequences.items():
        routed = sample if scored.experts is None else replace(sample, experts=scored.experts[key])
        local[key] = sample if hasattr(sample, "old_logprobs") else routed.with_old_logprobs(scored.logprobs[key], "recompute")
    parts = collectives.exchange({0: local if policy.parallel.is_model_parallel_src else {}})
    merged = {key: row for part in parts for key, row in part.items()}
    return [merged[sample.key] for sample in samples] if merged else []


def _batch(policy: Policy, samples: Sequence[Sample], index: int, left_out: frozenset[RowKind]) -> GlobalBatch:
    """Return this rank's share of a step that trains these rows in their order."""
    pending = fill_buffer(policy, samples, left_out)
    order = collectives.broadcast_object([(*sample.key, sample.on_policy_version) for sample in samples])
    micro_steps = [SimpleNamespace(rollout=r, rows=(row, row + 1), on_policy_version=version) for r, row, version in order]
    step: Any = SimpleNamespace(index=index, micro_steps=micro_steps)
    return pending.batch(step, token_weight_fn=policy.loss.token_weights)[1]


def _take(
    policy: Policy,
    variant: Variant,
    samples: Sequence[Sample],
    index: int,
    reference: list[torch.Tensor] | None,
    left_out: frozenset[RowKind],
) -> tuple[VariantResult, list[torch.Tensor]]:
    """Compute forward and backward of one variant. Collective.

    Returns:
        (outcome, gradient buffers of the run's own settings, which are the first variant).
    """
    rollout = variant.cfg.rollout
    policy.loss = GrpoLoss.from_config(
        variant.cfg.grpo, max_completion_length=rollout.max_completion_length, temperature=rollout.temperature
    )
    variant_samples = samples[: variant.num_rows]
    batch = _batch(policy, variant_samples, index, left_out)
    trained = policy.train_step(batch)
    norm = trained.metrics.get("grad_norm", 0.0)
    buffers = [buffer.grad_data for chunk in policy.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = [buffer.clone() for buffer in buffers]
    if reference is None:
        reference, cosine = gradients, 1.0 if norm else None
    else:
        cosine = _cosine(policy, buffers, reference, gradients)
    kl, ess = _off_policy(policy, batch, trained.logprobs)
    get = trained.metrics.get
    return {
        "name": variant.name, "rows": batch.num_sequences, "loss": get("loss", 0.0), "grad_norm": norm, "cosine": cosine, "kl_sampler": kl,
        "ess": ess, "clip_low": get("clip_ratio/low_mean", 0.0), "clip_high": get("clip_ratio/high_mean", 0.0), "kl": get("kl"),
    }, reference  # fmt: skip


def _cosine(policy: Policy, buffers: list[torch.Tensor], a: list[torch.Tensor], b: list[torch.Tensor]) -> float | None:
    """Return the cosine of two gradients from the norms of a, b and b - a; exactly 1 if the two are equal.

    Megatron-Core computes these norms over all ranks and counts each element once.
    """
    norms = []
    for values in (a, b, [y - x for x, y in zip(a, b, strict=True)]):
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        norms.append(gradient_norm(policy.optimizer))
    norm_a, norm_b, norm_difference = norms
    if not (norm_a and norm_b and all(map(math.isfinite, norms))):
        return None
    return (norm_a**2 + norm_b**2 - norm_difference**2) / (2 * norm_a * norm_b)


def _off_policy(policy: Policy, batch: GlobalBatch, logprobs: Any) -> tuple[float, float]:
    """Return (KL(sampler || current policy), effective sample size) over trained tokens that have a sampler log-prob."""
    sums = np.zeros(4)
    for micro in batch.micro_batches if policy.parallel.reports_its_rows else ():
        for index, row in enumerate(micro.rows):
            tokens = micro.sequence == index
            is_trained = micro.token_weights[tokens] > 0
            log_rho = (np.asarray(logprobs[row], dtype=np.float64) - micro.sampler_logprobs[tokens])[is_trained]
            log_rho = log_rho[~np.isnan(log_rho)].clip(-20, 20)
            rho = np.exp(log_rho)
            sums += [len(rho), (rho - log_rho - 1).sum(), rho.sum(), (rho * rho).sum()]
    count, kl, first, second = np.sum(collectives.all_gather_object(sums), axis=0)
    return (float(kl / count), float(first**2 / (count * second))) if count else (0.0, 1.0)


def _recorded(args: CompareLossesArgs) -> dict[str, float] | None:
    """Return the run's own loss and gradient norm of the step, from metrics.jsonl; None if they were not logged."""
    logged = next((record for record in reversed(JsonlFile(args.run / "metrics.jsonl").all()) if record["step"] == args.step + 1), None)
    return {name: logged[name] for name in ("loss", "grad_norm") if name in logged} if logged else None


def report_lines(args: CompareLossesArgs, outcomes: Sequence[VariantResult], recorded: dict[str, float] | None) -> list[str]:
    """Format the outcomes as a table.

    Args:
        recorded: Loss and gradient norm that the run logged; None if unknown.
    """
    lines = [f"Optimizer step {args.step + 1} of {args.run}, rows as recorded, weights of {args.checkpoint.name}."]
    if recorded:
        lines.append("The run logged: " + ", ".join(f"{name} {value:.6g}" for name, value in recorded.items()) + ".")
    values = [[format_cell(value, spec) for value, spec in zip(outcome.values(), COLUMNS.values(), strict=True)] for outcome in outcomes]
    return [*lines, "", *table_lines([list(COLUMNS), *values])]
