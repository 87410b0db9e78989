"""The rollout generator: finished answers are used, others requested, lost weights synced again, invalid log-probs rejected."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from megatron_grpo.core.rollout.engine import WeightsLostError, WeightSyncError, make_completion
from megatron_grpo.core.trainer.generation import (
    InvalidLogprobsError,
    exclude_invalid_logprobs,
    first_invalid_logprob,
    invalid_logprobs_warning,
)
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.core.weights.buckets import WeightUpdate
from tests.scripted_engine import ScriptedEngine
from tests.unit.trainer.test_rollouts import NumberedPrompts, answer, build_generator

NAN, INF = math.nan, math.inf


def sync_version(engine, version):
    engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=()))


def list_versions(groups):
    return {group.prompt.number: group.version for group in groups}


def test_generator_uses_finished_answers_and_requests_the_rest():
    engine, stream = ScriptedEngine(answer), NumberedPrompts()
    generator, prompts = build_generator(engine), stream.take(6)
    generator.begin(prompts[:2])
    generator.begin(prompts[2:4])
    with pytest.raises(WeightSyncError, match="Version 5 was sent to the scripted engine while it was sampling"):
        sync_version(engine, 5)
    assert generator.wait() and generator.wait()
    sync_version(engine, 5)
    assert list_versions(generator.groups(prompts[1:])) == {1: 0, 2: 0, 3: 0, 4: 5, 5: 5}
    assert list_versions(generator.groups(prompts[:2])) == {0: 0, 1: 0}, "asked again, as after prompts were given back"
    generator.forget()
    assert list_versions(generator.groups(prompts[:2])) == {0: 5, 1: 5}


def test_generator_drops_answers_that_do_not_arrive_in_time():
    gate = threading.Event()
    engine = ScriptedEngine(lambda *asked: gate.wait() and answer(*asked))
    generator, prompts = build_generator(engine), NumberedPrompts().take(2)
    generator.begin(prompts)
    assert not generator.wait(0.0)
    generator.forget()
    sync_version(engine, 1)  # nothing is under way
    gate.set()
    assert list_versions(generator.groups(prompts)) == {0: 1, 1: 1}


class WeightLosingEngine(ScriptedEngine):
    """An engine that loses its weights once in every rollout."""

    def begin(self, prompts, sampling, *, seed):
        outer, lost = self, []

        class Future:
            seconds = 1.0
            dropped = False

            def wait(self, seconds=None):
                return True

            def groups(self):
                if not lost:
                    lost.append(1)
                    raise WeightsLostError("all servers are gone")
                return outer.generate(prompts, sampling, seed=seed)

            def drop(self):
                lost.append(1)

        return Future()


def test_generator_after_lost_weights_syncs_current_weights_again():
    engine = WeightLosingEngine(answer)
    generator, prompts = build_generator(engine, sync_again=lambda: sync_version(engine, 4)), NumberedPrompts().take(2)
    generator.begin(prompts)
    assert generator.wait()
    assert list_versions(generator.groups(prompts)) == {0: 4, 1: 4}


def test_generator_wait_with_timeout_does_not_wait_for_lost_servers():
    engine = WeightLosingEngine(answer)
    generator, prompts = build_generator(engine), NumberedPrompts().take(2)
    generator.begin(prompts)
    assert not generator.wait(10.0)
    generator.forget()


# ---- log-probs that no distribution has


def make_group(number: int, *logprobs: tuple[float, ...]) -> Group:
    completions = tuple(make_completion((4,), range(4, 4 + len(one)), one, text="", finish_reason="stop", version=0) for one in logprobs)
    return Group(prompt=Prompt(number=number, row=10 + number, raw="", token_ids=(4,), columns={}), completions=completions)


@pytest.mark.parametrize(
    ("logprobs", "place"),
    [((-1.0, NAN), 1), ((-INF, -1.0), 0), ((-1.0, -2.0, 0.01), 2), ((INF,), 0), ((0.0, -0.0, -1e4, 1e-6), None), ((), None)],
)
def test_first_invalid_logprob_is_found(logprobs, place):
    assert first_invalid_logprob(np.float32(logprobs)) == place


def test_exclude_invalid_logprobs_drops_all_logprobs_of_the_completion():
    good = make_group(3, (-1.0, -2.0), (-0.5,))
    kept, found = exclude_invalid_logprobs([good, make_group(4, (-1.0,), (-0.5, -INF, -1.0), (0.5,))])
    assert kept[0].completions == good.completions and kept[1].completions[0].logprobs.tolist() == [0.0, -1.0]
    assert [one.is_refused for each in kept for one in each.completions] == [False, False, False, True, True]
    refused = kept[1].completions[1]
    assert refused.answer_ids == (4, 5, 6) and refused.logprobs.dtype == np.float32
    assert np.isnan(refused.logprobs).tolist() == [False, True, True, True]
    assert invalid_logprobs_warning(found, 5) == (
        "2 of 5 completions have an invalid log-prob (NaN, infinite or above 0; the first: completion 1 of prompt 4 (row 14 of the data), "
        "token 2 of 3: -inf); these completions are not trained"
    )


def test_exclude_invalid_logprobs_accepts_valid_groups():
    groups = [make_group(0, (-1.0,), ()), make_group(1, (0.0,))]
    kept, found = exclude_invalid_logprobs(groups)
    assert [one.completions for one in kept] == [one.completions for one in groups] and invalid_logprobs_warning(found, 3) is None


def test_generator_with_all_completions_invalid_raises():
    _, found = exclude_invalid_logprobs([make_group(0, (NAN,), (1.0,))])
    with pytest.raises(InvalidLogprobsError, match="2 of 2 completions .*prompt 0 .*token 1 of 1: nan.*weights or kernels are faulty"):
        invalid_logprobs_warning(found, 2)
