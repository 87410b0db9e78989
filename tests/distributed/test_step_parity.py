"""The first optimizer step from a stored rollout is equal for each layout and micro-batch size, and mutations are detected."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import PAD, write_tiny


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=2, vocab=125, std=0.1)


@pytest.fixture(scope="module")
def batches(dense):
    return cases.stored_rollout(dense, vocab=125)


def take_step(dense, batches, name: str = "1", micro_batch_size: int = 2, tamper=None, **settings) -> cases.Trained:
    layout = cases.LAYOUTS[name]
    cfg = cases.settings(micro_batch_size=micro_batch_size, **settings, **layout.settings)
    return run_ranks(lambda rank, world: cases.train(rank, world, dense, cfg, batches, tamper), layout.world_size)[0]


@pytest.fixture(scope="module")
def one_rank(dense, batches):
    return take_step(dense, batches)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["1", "TP2", "PP2", "DP2"])
def test_step_loss_and_gradient_norm_are_equal_in_each_layout_and_micro_batch_size(dense, batches, one_rank, name, micro_batch_size):
    found = take_step(dense, batches, name, micro_batch_size)
    assert found.losses[0] == pytest.approx(one_rank.losses[0], rel=1e-5)
    assert found.grad_norms[0] == pytest.approx(one_rank.grad_norms[0], rel=1e-5)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def padded(request, tmp_path_factory):
    """Return (checkpoint whose padding token has an embedding of zeros, a rollout that contains it, transformers' step)."""
    path = write_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=2, vocab=125, std=0.1, tied=request.param)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][PAD] = 0.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    batches = cases.stored_rollout(path, vocab=125)
    for sample in batches[0]:
        sample.token_ids[::3] = PAD
    return path, batches, cases.reference(path, cases.settings(), batches)


@pytest.mark.parametrize("name", ["1", "TP2", "TP2 SP", "PP2", "CP2"])
def test_step_padding_embedding_has_no_gradient(padded, name):
    """The norm of zeros has a very large derivative, which would clip the step to nearly 0. A tied output layer still trains the row."""
    path, batches, right = padded
    found = take_step(path, batches, name)
    assert cases.distance(found, right).within(), cases.distance(found, right)
    assert found.grad_norms[0] < 1000
    assert found.gradients["model.embed_tokens.weight"][PAD].any() == ("lm_head.weight" not in found.gradients)


# ---- what a comparison is worth: each of these mistakes must be seen ------------------------------------------------------------------


def lose_a_micro_batch(policy):
    import dataclasses

    real = policy.train_step
    policy.train_step = lambda batch: real(dataclasses.replace(batch, micro_batches=batch.micro_batches[:-1]))


def lose_the_softmax_of_tokens_that_another_shard_owns(policy):
    from megatron_grpo.core.parallel import vocab

    real = vocab._LinearLogprobs.backward

    def backward(ctx, grad_logprobs, grad_entropy):
        _, owned = vocab._own_columns(ctx.saved_tensors[2], ctx.vocab_start, ctx.num_rows)
        return real(ctx, grad_logprobs * owned, grad_entropy)

    vocab._LinearLogprobs.backward = staticmethod(backward)


def divide_by_the_number_of_micro_batches(policy):
    from megatron_grpo.core.policy.passes import StepLoss

    real = StepLoss.__call__

    def loss(self, *args):
        value, kept = real(self, *args)
        return value / len(self.batch.micro_batches), kept

    StepLoss.__call__ = loss


def average_over_context_parallel_ranks(policy):
    from megatron_grpo.core.policy.passes import StepLoss

    real = StepLoss.__call__

    def loss(*args):
        value, kept = real(*args)
        return value / policy.parallel.cp_size, kept

    StepLoss.__call__ = loss


def forget_context_parallel_ranks_in_a_sequence_ratio(policy):
    from megatron_grpo.core.parallel import autograd

    autograd._CopyToRanks.backward = staticmethod(lambda ctx, grad: (grad, None))


def skip_the_sum_of_norms_over_sequence_parallel_ranks(policy):
    import sys

    # The package exports a function of the module's own name.
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize._allreduce_non_tensor_model_parallel_grads = lambda *args: None


def count_only_the_first_tensor_parallel_shard_in_the_norm(policy):
    for group in policy.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.tensor_model_parallel = False


def add_nothing_over_data_parallel_ranks(policy):
    for chunk in policy.wrapped:
        chunk.finish_grad_sync = lambda *args, **kwargs: None


MISTAKES = [
    ("1", lose_a_micro_batch, {}),
    ("TP2", lose_the_softmax_of_tokens_that_another_shard_owns, {}),
    ("1", divide_by_the_number_of_micro_batches, {}),
    ("CP2", average_over_context_parallel_ranks, {}),
    ("CP2", forget_context_parallel_ranks_in_a_sequence_ratio, {"importance_sampling_level": "sequence"}),
    ("TP2 SP", skip_the_sum_of_norms_over_sequence_parallel_ranks, {}),
    ("TP2", count_only_the_first_tensor_parallel_shard_in_the_norm, {}),
    ("DP2", add_nothing_over_data_parallel_ranks, {}),
]


@pytest.mark.parametrize(("name", "mistake", "settings"), MISTAKES, ids=[mistake.__name__ for _, mistake, _ in MISTAKES])
def test_step_gradient_mutation_is_detected(dense, batches, one_rank, name, mistake, settings):
    right = take_step(dense, batches, **settings) if settings else one_rank
    wrong = cases.distance(take_step(dense, batches, name, tamper=mistake, **settings), right)
    assert not wrong.within(loss=1e-3, gradient=1e-3, weight=1e-3)
