"""Router replay: exact in each layout, experts recorded as they were selected, and each silent mutation is detected."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import load_tiny, write_tiny

REPLAYED = dict(router_replay_mode="R3", beta=0.05)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
EXPERTS_RECOMPUTED = dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])
MOE_LAYERS = {"MoE": 4, "MLA": 3}
GROUPS = ((3, (5, 1, 4, 8)), (1, (2, 12)), (7, (2, 9)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return (path, a batch with random experts per token, expected results): with a KL, whose reference uses its own routing."""
    found = {}

    def get(model: str):
        if model not in found:
            path = write_tiny(tmp_path_factory.mktemp("models") / model, **cases.MODELS[model])
            [samples] = cases.stored_rollout(path, vocab=125, groups=GROUPS)
            batches = [cases.with_routes(samples, MOE_LAYERS[model])]
            settings = REPLAYED | cases.MODEL_SETTINGS.get(model, {})
            found[model] = path, batches, cases.reference(path, cases.settings(**settings), batches)
        return found[model]

    return get


@pytest.mark.parametrize(("model", "layout", "more"), [
    ("MoE", "TP2 EP2 ETP1", EXPERTS_RECOMPUTED),
    ("MoE", "PP2", RECOMPUTED),  # one layer of a stage's two, and the other is given no mask
    ("MLA", "CP2 EP2", {}),
], ids=str)  # fmt: skip
def test_steps_with_forced_experts_equal_float64(made, model, layout, more):
    """Losses with the z-loss, and all gradients including those of routers, through the weights of the forced experts."""
    path, batches, right = made(model)
    shared = dict(max_tokens_per_micro_batch=32, **cases.SHARED)
    runs = {"shared": REPLAYED | shared | more} | ({"apart": REPLAYED | dict(micro_batch_size=2) | more} if layout == "PP2" else {})
    found = cases.compare(model, path, cases.LAYOUTS[layout], runs, batches, dict.fromkeys(runs, right))
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


def read_transformers_routes(model, tokens: np.ndarray) -> np.ndarray:
    """Return the experts of transformers' routers: [T, MoE layers, k], sorted."""
    found = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda gate, inputs, output: found.append(output[2].numpy())) for gate in gates]
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(np.stack(found, axis=1), axis=-1)


@pytest.mark.parametrize(("model", "layout"), [("MLA", "TP2 SP"), ("MoE", "PP2 VPP2"), ("MLA", "CP2")])
def test_router_replay_r2_records_experts_and_replay_changes_nothing(made, model, layout):
    path, _, _ = made(model)
    layout = cases.LAYOUTS[layout]

    def body(rank, world):
        from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

        cfg = cases.settings(**layout.settings, micro_batch_size=2, router_replay_mode="R2")
        policy = cases.build(path, cfg, world)
        [samples] = cases.stored_rollout(path, vocab=125, groups=GROUPS, stale=0)
        stale = [dataclasses.replace(sample, version=-1, on_policy_version=-1) for sample in samples]
        pending = SampleBuffer(parallel=policy.parallel, cut=policy.cut).restored(stale if rank == 0 else [])
        slices = tuple((0, number) for number in range(len(stale) // policy.cut.rows_per_slice))
        pending = pending.with_old_logprobs(policy.scorer, SimpleNamespace(old_logprob_slices=slices))
        step = cases.find_step(stale, 0, policy.cut.rows_per_slice)
        _, batch = pending.batch(step, token_weight_fn=policy.loss.token_weights)
        model = load_tiny(path)
        for sample in pending.samples.values():
            assert (sample.experts[-1] == -1).all() and sample.old_logprobs_from == "recompute"
            assert np.array_equal(np.sort(sample.experts[:-1], axis=-1), read_transformers_routes(model, sample.token_ids)[:-1])
        freely = dataclasses.replace(batch, micro_batches=tuple(dataclasses.replace(micro, experts=None) for micro in batch.micro_batches))
        policy.gradient_check = SimpleNamespace(allows=lambda gradient: False)
        metrics, gradients = [], []
        for one in (batch, freely):
            metrics.append(policy.train_step(one).metrics)
            gradients.append(cases.full_gradients(policy))
        off = max(np.abs(gradients[0][name] - gradients[1][name]).max() for name in gradients[0])
        return off, *metrics, len(pending.samples)

    found = run_ranks(body, layout.world_size, timeout=120)
    for off, replayed, free, held in found:
        assert held and off == 0
        assert replayed["loss"] == free["loss"] and replayed["grad_norm"] == free["grad_norm"]
        assert (replayed["routing/replayed"], replayed["routing/agreement"]) == (1, 1)
        assert free["routing/replayed"] == 0 and "routing/agreement" not in free


def test_router_replay_applies_to_policy_and_old_logprobs_but_not_reference(made):
    path, [samples], _ = made("MoE")

    def body(rank, world):
        policy = cases.build(path, cases.settings(**REPLAYED, **cases.MODEL_SETTINGS["MoE"]), world)
        batch = cases.make_batch(policy, samples, 0)
        free = [dataclasses.replace(micro, experts=None) for micro in batch.micro_batches]

        def logprobs(scorer, micro_batches):
            return np.concatenate(scorer.logprobs(micro_batches))

        forced, freely = (logprobs(policy.scorer, micro_batches) for micro_batches in (batch.micro_batches, free))
        assert np.array_equal(np.concatenate(policy.scorer.old_logprobs(batch.micro_batches)[0]), forced)
        assert np.abs(freely - forced).mean() > 0.01
        assert np.array_equal(logprobs(policy.reference, batch.micro_batches), freely)  # it is the same model
        metrics = policy.train_step(batch).metrics
        weight = [(micro.num_references, (micro.experts[:, 0, 0] >= 0)) for micro in batch.micro_batches]
        share = sum((copies * is_forced).sum() for copies, is_forced in weight) / sum(copies.sum() for copies, _ in weight)
        assert metrics["routing/replayed"] == pytest.approx(share) and 0.8 < share < 1
        assert 0.4 < metrics["routing/agreement"] < 0.6  # two random experts of four

    run_ranks(body, 1)


def sample_twice(rank, world, path, *, dtype, tp=1):
    """Return vLLM's answers to three prompts, one of them longer than a block of its prefix cache, each asked twice."""
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.rollout.experts import ExpertLayers
    from megatron_grpo.core.settings import RolloutConfig
    from megatron_grpo.core.types import Prompt
    from megatron_grpo.core.weights.shape import ModelShape

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=32, vllm_tensor_parallel_size=tp)
    layers = ExpertLayers.from_shape(ModelShape.from_pretrained(path))
    engine = ColocatedEngine.build(
        cfg, model_path=path, dtype=dtype, max_model_len=128, seed=0, rank=rank, world_size=world, experts=layers
    )
    prompts = [Prompt(number=i, row=i, raw="", token_ids=tuple(range(4 + i, 12 + 30 * i)), columns={}) for i in range(3)]
    once, again = (engine.generate(prompts, SamplingSettings(n=3, max_completion_length=24), seed=1) for _ in range(2))
    for group in once:
        first = group.completions[0].sequence.experts[: len(group.prompt.token_ids)]
        for completion in group.completions:
            layers.check(completion.sequence)
            assert np.array_equal(completion.sequence.experts[: len(first)], first)
    return once, again


def test_vllm_returns_experts_on_cpu_on_each_rank_of_an_engine(tmp_path):
    """In float32 they equal transformers'; the second layer of the model has none."""
    path = write_tiny(tmp_path / "model", "qwen3_moe", layers=3, experts=8, mlp_only_layers=[1])

    def body(rank, world):
        once, again = sample_twice(rank, world, path, dtype="float32", tp=world)
        model = load_tiny(path)
        for group, cached in zip(once, again, strict=True):
            for completion, other in zip(group.completions, cached.completions, strict=True):
                sequence = completion.sequence
                assert np.array_equal(sequence.token_ids, other.sequence.token_ids)
                right = read_transformers_routes(model, sequence.token_ids)[:-1]
                for experts in (sequence.experts, other.sequence.experts):
                    assert np.array_equal(np.sort(experts[:-1], axis=-1), right) and (experts[-1] == -1).all()
        return [group.prompt.number for group in once]

    assert sorted(number for numbers in run_ranks(body, 2, timeout=120) for number in numbers) == [0, 1, 2]


def test_router_replay_reduces_bfloat16_mismatch(tmp_path):
    path = write_tiny(tmp_path / "model", "qwen3_moe", layers=4, experts=32, ffn=32, std=0.1)

    def body(rank, world):
        policy = cases.build(path, cases.settings(torch_dtype="bfloat16", router_replay_mode="R3"), world)
        completions = [one for group in sample_twice(rank, world, path, dtype="bfloat16")[0] for one in group.completions]
        found = []
        for sequences in ([one.sequence for one in completions], [dataclasses.replace(one.sequence, experts=None) for one in completions]):
            scored = policy.scorer.score(sequences, temperature=1.0)
            off = [np.abs(ours - one.logprobs)[one.sequence.mask] for ours, one in zip(scored, completions, strict=True)]
            found.append(float(np.concatenate(off).mean()))
        return found

    [(replayed, free)] = run_ranks(body, 1, timeout=120)
    assert replayed < 0.01 and free > 2 * replayed


# ---- each of these mistakes must be seen -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def change_experts(change):
    """Mutation: experts of micro-batches are `change(experts, batch)`."""
    from megatron_grpo.core.trainer import sample_buffer as pending

    right = pending.collate_samples

    def wrong(*args, **how):
        batch = right(*args, **how)
        return dataclasses.replace(batch, experts=change(batch.experts, batch))

    with mock.patch.object(pending, "collate_samples", wrong):
        yield


def drop_alignment(experts, batch):
    """Mutation: rows end to end, without the padding between them."""
    kept = experts[~batch.is_padding]
    return np.concatenate([kept, np.full_like(experts[: len(experts) - len(kept)], -1)])


@contextlib.contextmanager
def router(**methods):
    from megatron_grpo.core.policy.router import PolicyRouter

    with contextlib.ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(PolicyRouter, name, method))
        yield


@contextlib.contextmanager
def change_choice(wrong):
    """Mutation: wrong(scores, own, forced) -> (scores, experts)."""
    from megatron_grpo.core.policy.router import RouterReplayPass

    def choose(self, scores, own, router, number):
        forced = self.batches[number].experts.get(router.place) if self.replays else None
        return (scores.gather(1, own), own) if forced is None else wrong(scores, own, router.own_share(forced).long())

    with mock.patch.object(RouterReplayPass, "choose", choose):
        yield


def use_minus_one_as_expert(scores, own, forced):
    first = torch.arange(forced.shape[1]).expand_as(forced)
    taken = torch.where(forced < 0, first, forced)
    return scores.gather(1, taken), taken


def weigh_by_own_choice(scores, own, forced):
    taken = torch.where(forced < 0, own, forced)
    return scores.gather(1, own), taken


def without_gradient(scores, own, forced):
    taken = torch.where(forced < 0, own, forced)
    return scores.gather(1, taken).detach(), taken


@contextlib.contextmanager
def recompute_latest_micro_batch():
    """Mutation: the router uses its latest micro-batch, which under 1F1B is not the one that is recomputed."""
    from megatron_grpo.core.policy.router import RouterReplayPass

    latest = 0

    def choose(self, scores, own, router, number):
        nonlocal latest
        latest = latest if torch.is_grad_enabled() else number
        forced = self.batches[latest].experts.get(router.place) if self.replays else None
        if forced is None:
            return scores.gather(1, own), own
        forced = forced[torch.arange(len(own)) % len(forced)].long()
        taken = torch.where(forced < 0, own, forced)
        return scores.gather(1, taken), taken

    with mock.patch.object(RouterReplayPass, "choose", choose):
        yield


@contextlib.contextmanager
def replay_reference():
    from megatron_grpo.core.policy.router import RouterReplayPass

    right = RouterReplayPass.__init__
    with mock.patch.object(RouterReplayPass, "__init__", lambda self, **how: right(self, replays=True)):
        yield


def use_local_layer_indices(self):
    """Mutation: layer indices of this rank. Two chunks per stage: layers 0 and 2, 1 and 3."""
    return [0, 2, 1, 3][self.layer_number - 1]


MISTAKES = {
    "nothing": contextlib.nullcontext,
    "a token late": lambda: change_experts(lambda experts, batch: np.roll(experts, 1, axis=0)),
    "layers turned round": lambda: change_experts(lambda experts, batch: experts[:, ::-1]),
    "-1 is an expert": lambda: change_choice(use_minus_one_as_expert),
    "weights of its own choice": lambda: change_choice(weigh_by_own_choice),
    "routers get no gradient": lambda: change_choice(without_gradient),
    "the reference replays too": replay_reference,
}


@pytest.mark.parametrize(("layout", "more", "mistakes"), [
    ("1", {}, MISTAKES),
    ("PP2 VPP2", RECOMPUTED, {"nothing": contextlib.nullcontext,
                              "layers by stage": lambda: router(place=property(use_local_layer_indices)),
                              "the latest micro-batch": recompute_latest_micro_batch}),
    ("CP2", {}, {"without alignment": lambda: change_experts(drop_alignment)}),
], ids=["1", "PP2 VPP2", "CP2"])  # fmt: skip
def test_router_replay_mutation_is_detected(made, layout, more, mistakes):
    path, batches, right = made("MoE")
    case = cases.LAYOUTS[layout]
    cfg = cases.settings(**cases.MODEL_SETTINGS["MoE"], **(dict(micro_batch_size=4) | REPLAYED | case.settings | more))

    def body(rank, world):
        parallel, found = cases.join(cfg, world), {}
        for name, mistake in mistakes.items():
            with mistake():
                found[name] = cases.train(rank, world, path, cfg, batches, parallel=parallel)
        return found

    by_rank = run_ranks(body, case.world_size, timeout=120)
    found = {name: cases.merge_worst([cases.distance(rank_outcome[name], right) for rank_outcome in by_rank]) for name in mistakes}
    if "nothing" in found:
        assert found.pop("nothing").within()
    assert {name: distance for name, distance in found.items() if distance.gradient < 0.01} == {}
