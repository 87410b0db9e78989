"""A sampler, a reference and a gradient check that are written outside the package."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from megatron_grpo import cli
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.types import Group

LOGPROB = -4.0  # of every token, by the reference


class Alphabet:
    """A sampler that answers prompt n, completion i with the tokens 10 + i, 11 + i, ... It reports the weights that it received."""

    dtype, has_base = "float32", True

    def __init__(self):
        self.version, self.held = 0, {}

    def generate(self, prompts, sampling, *, seed):
        def answer(prompt, place):
            ids = [10 + place + i for i in range(1 + prompt.number % sampling.max_completion_length)]
            return make_completion(prompt.token_ids, ids, [-1.0] * len(ids), text="", finish_reason="stop", version=self.version)

        mine = prompts[collectives.rank() :: collectives.num_ranks()]  # the groups that this rank is to judge
        return [Group(prompt=prompt, completions=tuple(answer(prompt, i) for i in range(sampling.n))) for prompt in mine]

    def wake_up(self):
        return nullcontext()

    def prepare(self):
        return False

    def load_weights(self, update):
        self.held[update.version] = {name: tensor.numpy().copy() for name, tensor in update.tensors}
        self.version = update.version

    def probes(self):
        return []

    def scores(self, token_ids):
        return {}

    def close(self):
        pass


def build_alphabet(cfg, inputs, parallel, *, bitwise_parity, lora=None, runner=None):
    return Alphabet()


class Uniform:
    """A reference in which all tokens are equally probable."""

    chunks = saved_chunks = ()

    def __init__(self, cfg, initial, tensors):
        self.parallel = initial.parallel

    def logprobs(self, micro_batches):
        return [np.full(len(micro.targets), LOGPROB, dtype=np.float32) for micro in micro_batches]

    def last_stage_logprobs(self, micro_batches):
        return self.logprobs(micro_batches) if self.parallel.is_last_stage else []

    def after_step(self, step, policy):
        pass


class NotTheSecond:
    """A gradient check that refuses the gradient of the second step."""

    def allows(self, gradient):
        return gradient.step + 1 != 2


def train(flags, sampler):
    return cli.main(["train", *flags], engine=lambda cfg, inputs, parallel: sampler, reference=Uniform, gradient_check=NotTheSecond())
