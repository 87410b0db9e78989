"""A teacher on the training ranks, of another size, depth and family than the student, scored in the student's layout."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from tests import parity_cases as cases
from tests.parity_cases import CP, EP, PP, SP, TP, VPP, Case
from tests.ranks import run_ranks
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

VOCAB, TEMPERATURE = 60, 0.7
# Deeper and wider than its student; another family; with experts.
TEACHERS = {
    "dense": dict(family="qwen3", layers=8, hidden=48, heads=6, kv_heads=2, head_dim=8, ffn=72),
    "biases": dict(family="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, tied=True),
    "MoE": dict(family="qwen3_moe", layers=4, hidden=48, heads=4, kv_heads=2, head_dim=8, ffn=40),
}
UNEVEN = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
LAYOUTS = {
    "TP2 SP": (Case(2, {TP: 2, SP: True}), ("dense", "MoE")),
    "PP2, dealt out by hand": (Case(2, {PP: 2} | UNEVEN), ("dense", "biases")),
    "PP2 VPP2": (Case(2, {PP: 2, VPP: 2}), ("dense", "MoE")),
    "CP2": (Case(2, {CP: 2}), ("dense", "biases")),
    "EP2": (Case(2, {EP: 2}), ("MoE", "dense")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    student = write_tiny(folder / "student", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=VOCAB, std=0.12)
    made = {name: write_tiny(folder / name, vocab=VOCAB, std=0.12, seed=7, **shape) for name, shape in TEACHERS.items()}
    return {"student": student} | made


@pytest.fixture(scope="module")
def samples(models):
    """Return eight rows in two groups; one row has a sampling mask, and one has recorded experts of another model."""
    [found] = cases.stored_rollout(models["student"], vocab=VOCAB, groups=((5, (5, 1, 2, 9)), (3, (12, 2, 3, 1))))
    drawn = found[3]
    ids = drawn.token_ids[drawn.mask]
    kept = np.stack([ids, (ids + 1) % VOCAB, (ids + 7) % VOCAB], axis=1)
    found[3] = dataclasses.replace(drawn, mask_offsets=np.arange(len(ids) + 1) * 3, mask_ids=np.sort(kept, axis=1).ravel().astype(np.int32))
    found[1] = dataclasses.replace(found[1], experts=np.zeros((len(found[1].token_ids), 3, 2), dtype=np.int16))
    return found


def expected(path, samples) -> list[np.ndarray]:
    """Return transformers' log-probs in float32 at the temperature, over the sampling mask where there is one."""
    model, found = load_tiny(path), []
    for sample in samples:
        ids = sample.token_ids.tolist()
        values = np.zeros(len(ids))
        values[1:] = hf_logprobs(model, ids, TEMPERATURE).numpy()
        if sample.mask_ids is not None:
            import torch

            places = np.flatnonzero(sample.mask)
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0].double() / TEMPERATURE
            for place, words in zip(places, sample.mask_ids.reshape(-1, 3), strict=True):
                few = logits[place - 1, words.tolist()].log_softmax(0)
                values[place] = few[words.tolist().index(ids[place])]
        found.append(np.where(sample.mask, values, 0.0))
    return found


def score_rows(rank: int, world: int, models, samples, settings: dict, teachers: tuple[str, ...], more: list[dict]) -> dict:
    """Return {(teacher, index in `more`): {row: log-probs}} of the rows of this rank. For `run_ranks`."""
    from dataclasses import replace

    from megatron_grpo.commands.planning.memory import teacher_stages
    from megatron_grpo.core.base.activity import Timers
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer
    from megatron_grpo.core.weights.shape import ModelShape
    from megatron_grpo.plugins.teacher.trainer import build_held_teacher
    from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
    from megatron_grpo.run.models import make_model_divisors

    parallel, found = cases.join(cases.settings(**settings), world), {}
    for name in teachers:
        student = "MoE" if EP in settings and name == "dense" else "student"  # one of the two has experts
        shape = ModelShape.from_pretrained(models[student])
        for number, others in enumerate(more):
            cfg = cases.settings(temperature=TEMPERATURE, teacher_model=str(models[name]), **settings | others)
            inputs = SimpleNamespace(shape=shape, teacher_path=models[name])
            teacher = build_held_teacher(cfg, inputs, parallel, stop=None, checkpoints=None, timers=Timers())
            pending = SampleBuffer(parallel=parallel, cut=teacher._scorer.cut).restored(samples if parallel.is_rank_zero else [])
            for _ in range(2):  # the second time it comes back from the host, where it goes there
                found[name, number] = teacher(pending.placed())
            weights = [parameter for chunk in teacher._scorer.model for parameter in chunk.parameters()]
            own = ModelShape.from_pretrained(models[name])
            sizes = checked_sizes(
                cfg.with_values({"world_size": world}), model=replace(make_model_divisors(shape), teacher=make_model_divisors(own))
            )
            planned = teacher_stages(own, shape, sizes, cfg, 16)[parallel.pp_rank].weights_bytes
            assert planned == sum(4 * parameter.numel() for parameter in weights)
            away = others.get("offload_teacher_model", False)
            assert all(bool(parameter.untyped_storage().nbytes()) != away for parameter in weights)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_teacher_logprobs_equal_transformers_in_each_layout(models, samples, layout):
    case, teachers = LAYOUTS[layout]
    ways = [{}, {"offload_teacher_model": True, "share_prefix": "true", "max_tokens_per_micro_batch": 64}]
    by_rank = run_ranks(score_rows, case.world_size, models, samples, case.settings, teachers, ways)
    for name in teachers:
        right = dict(zip([sample.key for sample in samples], expected(models[name], samples), strict=True))
        for way in range(len(ways)):
            found = {key: values for one in by_rank for key, values in one[name, way].items()}
            assert found.keys() == right.keys()
            worst = max(float(np.abs(found[key] - right[key]).max()) for key in right)
            assert worst < 2e-5, (name, way, worst)
