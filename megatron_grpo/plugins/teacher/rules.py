"""Rules about a teacher, and warnings. No torch, and no connection is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_grpo.plugins.servers.addresses import teacher_addresses
from megatron_grpo.plugins.servers.rules import read_addresses
from megatron_grpo.run.config.rules import Rule, changed

# Their loss of a token depends on the sign of its sequence's single advantage, or on later tokens of the sequence.
SINGLE_SIGN_LOSSES = ("vespo", "fipo", "real")


def _wrong_teacher(c: SimpleNamespace) -> dict[str, Any] | None:
    try:
        teacher_addresses(c.cfg.grpo)
    except ValueError as error:
        return {"error": error}
    return None


def _servers_that_are_teachers(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for a server that is named both as rollout server and as teacher."""
    teachers = teacher_addresses(c.cfg.grpo)
    common = [address for address in read_addresses(c)[0] if address in teachers]
    return {"address": common[0]} if common else None


def _dropped(c: SimpleNamespace) -> dict[str, Any] | None:
    names = c.dropping.split(" and ") if c.dropping else []
    values = {"names": names, "flags": " ".join(names), "both": c.dropping, "it": "them" if len(names) > 1 else "it"}
    return values if names and c.teacher and not c.reward_funcs else None


# fmt: off
RULES = (
    Rule("teacher_model teacher_model_server", lambda c: c.teacher_model and c.teacher_model_server,
         "teacher_model ({teacher_model}), a teacher in the training ranks, and teacher_model_server, a teacher on servers, cannot be "
         "combined. Use one of them."),
    Rule("offload_teacher_model", lambda c: c.offload_teacher_model and not c.teacher_model,
         "offload_teacher_model requires teacher_model, which is not set. Omit it.",
         {"offload_teacher_model": [False]}),
    (
        Rule("teacher_model_server", _wrong_teacher, "teacher_model_server: {error}."),
        Rule("teacher_model_server vllm_server_host", _servers_that_are_teachers,
             "{address} is both a rollout server, whose weights the run updates, and a teacher server, whose weights are fixed. Start the "
             "teacher on another port (megatron-grpo serve --frozen true)."),
    ),
)

GRPO_RULES = (
    Rule("teacher_kl_coef teacher_model", lambda c: not c.teacher and changed(c, "teacher_kl_coef"),
         "teacher_kl_coef ({teacher_kl_coef}) weighs the teacher's KL, but no teacher is set. Set teacher_model or "
         "teacher_model_server, or leave it out."),
    # vLLM returns log-probs of sampled tokens over the full softmax at temperature 1
    Rule("teacher_model_server {name}",
         lambda c: c.teacher == "teacher_model_server" and changed(c, "temperature", "top_p", "top_k", "min_p"),
         "teacher_model_server: a server returns log-probs of the full softmax at temperature 1, but with {name} ({value}) tokens "
         "are sampled from another distribution. Use {name} {off:g}, or teacher_model.", lambda c: {c.name: [c.off]}),
    Rule("teacher_model_server {bounding}", lambda c: c.teacher == "teacher_model_server" and c.bounding,
         "teacher_model_server: a server returns log-probs of the full softmax, but with {bounding} tokens are sampled from those "
         "that a grammar allows. Leave it out, or use teacher_model."),
    Rule("{teacher} loss_type", lambda c: c.teacher and c.loss_type in SINGLE_SIGN_LOSSES,
         "{teacher} gives each token a separate advantage, but loss_type {loss_type} weighs a sequence by a single advantage. Use "
         "grpo, dapo, or another token-level loss_type.", {"loss_type": ["grpo", "dapo"]}),
    Rule("{teacher} off_policy_sequence_mask_delta", lambda c: c.teacher and c.off_policy_sequence_mask_delta is not None,
         "{teacher} gives each token a separate advantage, but off_policy_sequence_mask_delta drops sequences by a single negative "
         "advantage. Leave one of them out."),
    Rule("{flags} {teacher}", _dropped,
         "{both} drops zero-std groups, and without reward_funcs all groups are zero-std. Leave {it} out; with a teacher, all groups "
         "are trained.", lambda c: dict.fromkeys(c.names, [False])),
    Rule("oversample_ratio {teacher}", lambda c: c.teacher and c.oversample_ratio > 1 and not c.reward_funcs,
         "oversample_ratio ({oversample_ratio:g}) samples more groups than are trained and drops zero-std groups, and without "
         "reward_funcs all groups are zero-std: the additional samples would be wasted. Use 1.", {"oversample_ratio": [1.0]}),
)

WARNINGS = (
    Rule("", lambda c: c.teacher and c.reward_funcs and (c.exclude_zero_std_groups or c.dynamic_sample),
         "{teacher}: the teacher's signal also trains zero-std groups, but exclude_zero_std_groups and dynamic_sample drop them."),
    Rule("", lambda c: c.teacher and c.importance_sampling_level == "sequence",
         "{teacher} with importance_sampling_level sequence: the ratio is per sequence, so the teacher's token advantages are "
         "averaged over the sequence. Use importance_sampling_level token or sequence_token to keep them separate."),
)
# fmt: on
