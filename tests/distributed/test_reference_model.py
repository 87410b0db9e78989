"""The reference model: absent at beta 0, else a frozen copy, which moves toward the policy with sync_ref_model."""

from __future__ import annotations

import pytest

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), "deepseek_v3", layers=2, vocab=60, hidden=32, ffn=32)


@pytest.mark.parametrize(("settings", "models"), [({}, 1), ({"beta": 0.1}, 2), ({"beta": 0.1, "kl_in_reward": True}, 2)])
def test_reference_model_is_loaded_only_for_a_kl(model, settings, models):
    def body(rank, world_size):
        from megatron_grpo.run.assemble import policy as build

        made, read, real, reader = [], [], build.build_chunks, build.HfReader

        class Counting(reader):
            def __call__(self, name):
                read.append(name)
                return super().__call__(name)

        def counted(*args, **kwargs):
            made.append(1)
            return real(*args, **kwargs)

        build.build_chunks, build.HfReader = counted, Counting
        policy = cases.build(model, cases.settings(**settings), world_size)
        assert len(made) == models
        assert set(read.count(name) for name in set(read)) == {models}, "times that a tensor of the checkpoint is read"
        assert (policy.reference is None) == (models == 1)
        chunks = policy.reference.scorer.model if policy.reference else ()
        assert not any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
        assert not any(chunk.training for chunk in chunks)

    run_ranks(body, 1)


@pytest.mark.parametrize(("layout", "overlap"), [("TP2 SP", False), ("PP2", False), ("DP2", True)])
def test_reference_model_sync_moves_each_weight_by_alpha(model, layout, overlap):
    case = cases.LAYOUTS[layout]
    more = {"overlap_grad_reduce": True, "overlap_param_gather": True} if overlap else {}
    (samples,) = cases.stored_rollout(model, vocab=60)

    def body(rank, world_size):
        import torch

        from tests.combinations import compute_kl_in_reward

        policy = cases.build(model, cases.settings(beta=0.1, sync_ref_model=True, lr=0.1, ref_model_sync_steps=2,
                                                  ref_model_mixup_alpha=0.25, **more, **case.settings), world_size)  # fmt: skip
        batch = cases.make_batch(policy, samples, 0)
        policy.train_step(batch)
        before = {name: tensor.clone() for name, tensor in policy.exchange.tensors(policy.reference.scorer.model).items()}
        assert policy.reference.saved_chunks
        policy.reference.after_step(3, policy.tensors)
        assert all(torch.equal(found, before[name]) for name, found in policy.exchange.tensors(policy.reference.scorer.model).items())
        policy.reference.after_step(2, policy.tensors)
        ours, theirs = policy.tensors(), policy.exchange.tensors(policy.reference.scorer.model)
        assert any("expert_bias" in name for name in theirs) == any(".router." in name for name in theirs)
        trained = 0
        for name, found in theirs.items():
            torch.testing.assert_close(found, 0.25 * ours[name] + 0.75 * before[name], rtol=1e-5, atol=1e-6)
            trained += not torch.equal(ours[name], before[name])
        assert trained > 0.7 * len(theirs), "the policy has moved"
        policy.reference._alpha = 1.0
        policy.reference.after_step(4, policy.tensors)
        for name, found in theirs.items():
            assert torch.equal(found, ours[name]) and found.data_ptr() != ours[name].data_ptr(), name
        # With one weight for both, the KL is nothing.
        return float(abs(compute_kl_in_reward(policy, samples, beta=0.1)).max())

    assert max(run_ranks(body, case.world_size)) == 0.0


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_reference_model_from_another_checkpoint_keeps_both_models_exact(model, tmp_path, tuner):
    other = write_tiny(tmp_path, "deepseek_v3", layers=2, vocab=60, hidden=32, ffn=32, seed=5)
    (samples,) = cases.stored_rollout(model, vocab=60)

    def body(rank, world_size):
        import torch

        from megatron_grpo.run.assemble.policy import build_policy
        from tests.combinations import compute_kl_in_reward

        parallel = cases.join(cases.settings(), world_size)
        begins = {path: cases.build(path, cases.settings(), world_size, parallel).tensors() for path in (model, other)}
        cfg = cases.settings(beta=0.1, ref_model=str(other), tuner_type=tuner)
        policy = build_policy(cfg, parallel, model_path=model, num_steps=4, ref_model_path=other)
        held = policy.exchange.tensors(policy.reference.scorer.model)
        assert held.keys() == begins[other].keys() and all(torch.equal(held[name], begins[other][name]) for name in held)
        if tuner == "full":
            assert all(torch.equal(tensor, begins[model][name]) for name, tensor in policy.tensors().items())
        assert abs(compute_kl_in_reward(policy, samples, beta=0.1)).mean() > 0.05

    run_ranks(body, 1)
