"""Requests of a run to its teacher servers: real HTTP and connections, servers without an engine."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_grpo.core.base.errors import CancelledError, ConfigError, NoRolloutServerError, RunError
from megatron_grpo.core.metadata import TrainingRows
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.trainer.sample_buffer import DistributedRows
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.http import Server
from megatron_grpo.plugins.teacher.servers import TeacherRequirements, TeacherServerGroup, TokensToScore
from megatron_grpo.plugins.teacher.trainer import ServedTeacher
from megatron_grpo.run.config.settings import Config, EvalConfig, TurnsConfig
from tests.small_server import TOKEN, BrokenConnectionError, SmallServer
from tests.unit.trainer.test_rollouts import SingleRankState

NEEDS = TeacherRequirements(max_model_len=64, vocabulary="words", vocab_size=100)
FROZEN = dict(is_frozen=True, vocabulary="words", vocab_size=100, fingerprint="large", max_num_seqs=3)


def encode_logprobs(place, logprobs):
    return wire.encode_line(wire.LogprobsLine(place=place, logprobs=np.array(logprobs, np.float32)))


def answer_logprobs(server, body):
    """The log-prob of a token tells it and its place: -(id / 100 + place)."""
    for place, (ids, first) in reversed([*enumerate(zip(body.sequences, body.first, strict=True))]):
        yield b"\n"
        yield encode_logprobs(place, [-(ids[at] / 100 + at) for at in range(first, len(ids))])


@pytest.fixture
def opened():
    servers: list[SmallServer] = []

    def open_one(lines=answer_logprobs, **state) -> SmallServer:
        servers.append(SmallServer(lines, **(FROZEN | state)))
        return servers[-1]

    yield open_one
    for server in servers:
        server.close()


def make_teacher(*servers, timeout=5.0, **more) -> TeacherServerGroup:
    at = partial(Server, token=more.pop("token", TOKEN), incarnation="")
    return TeacherServerGroup(
        lambda: [server.address for server in servers], at, requirements=NEEDS, timeout=timeout, print_line=lambda line: None, **more
    )


DRAWN = [TokensToScore(ids=tuple(range(10 + i, 15 + 2 * i)), first=1 + i % 3) for i in range(20)]
RIGHT = [[-(one.ids[at] / 100 + at) for at in range(one.first, len(one.ids))] for one in DRAWN]


def is_right(found) -> bool:
    return len(found) == len(RIGHT) and all(np.allclose(one, right, atol=1e-6) for one, right in zip(found, RIGHT, strict=True))


def test_teacher_logprobs_match_their_sequences_for_any_server_and_order(opened):
    asked = {}

    def counting(server, body):
        asked[server.address] = asked.get(server.address, 0) + len(body.sequences)
        yield from answer_logprobs(server, body)

    servers = [opened(counting), opened(counting)]
    teacher = make_teacher(*servers)
    assert is_right(teacher.logprobs(DRAWN)) and len(asked) == 2 and sum(asked.values()) == len(DRAWN)
    assert teacher.logprobs([]) == []


def test_teacher_resends_sequences_of_lost_server_and_readds_it(opened):
    calls = []

    def dying(server, body):
        calls.append(len(body.sequences))
        if len(calls) < 3:
            yield encode_logprobs(0, [-(body.sequences[0][at] / 100 + at) for at in range(body.first[0], len(body.sequences[0]))])
            raise BrokenConnectionError
        yield from answer_logprobs(server, body)

    teacher = make_teacher(opened(dying), opened(), timeout=20.0)
    assert is_right(teacher.logprobs(DRAWN)) and is_right(teacher.logprobs(DRAWN))
    assert len(calls) > 2


def test_teacher_scores_each_context_at_sampled_tokens_only(opened):
    """Two contexts of 6 tokens: places are counted inside each."""
    mask = np.array([0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1], dtype=bool)
    row = TokenSequence(token_ids=np.arange(20, 32), mask=mask, starts=(0, 6))
    empty = TokenSequence(token_ids=np.arange(4), mask=np.zeros(4, dtype=bool))
    rows = {(0, 3): row, (0, 4): empty}
    servers = make_teacher(opened())
    found = ServedTeacher(SingleRankState(), servers.fingerprint, servers.logprobs)(
        DistributedRows(rows=TrainingRows(rollout=np.zeros(2, int), row=np.array([3, 4]), dp_rank=np.zeros(2, int)), sequences=rows)
    )
    wanted = np.where(mask, [-(id_ / 100 + at % 6) for at, id_ in enumerate(range(20, 32))], 0.0)
    assert np.allclose(found[0, 3], wanted, atol=1e-6) and not found[0, 4].any() and found[0, 3].dtype == np.float32


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (dict(is_frozen=False), "accepts weight updates, but the weights of a teacher must not change: start it with --frozen true"),
        (dict(vocabulary="others"), "whose vocabulary differs from the policy's"),
        (dict(vocab_size=99), "with 99 token IDs, but the policy samples from 100"),
        (dict(max_model_len=63), "start it with --vllm_max_model_len 64"),
    ],
)
def test_teacher_server_that_is_incompatible_is_rejected_before_the_run(opened, state, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_teacher(opened(**state)).gather()
    [problem] = make_teacher(opened(**state)).problems()
    assert sentence in problem.message and problem.flags == ("teacher_model_server",)


def test_teacher_servers_of_different_models_or_tokens_are_rejected(opened):
    with pytest.raises(ConfigError, match="this run's teacher is another model"):
        make_teacher(opened(), opened(fingerprint="small")).gather()
    with pytest.raises(ConfigError, match="Its token differs from this run's"):
        make_teacher(opened(), token="not the one of these tests").gather()


def test_teacher_server_restarted_with_other_model_is_not_used(opened):
    first, second = opened(), opened()
    teacher = make_teacher(first, second)
    assert is_right(teacher.logprobs(DRAWN))
    second.state = replace(second.state, fingerprint="small")
    assert [str(one) for one in teacher.gather()] == [str(first.address)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_teacher_logprob_above_zero_raises(opened, value):
    def wrong(server, body):
        for place, (ids, first) in enumerate(zip(body.sequences, body.first, strict=True)):
            yield encode_logprobs(place, [value] * (len(ids) - first))

    with pytest.raises(RunError, match="a log-prob that is positive or not finite"):
        make_teacher(opened(wrong)).logprobs(DRAWN)


@pytest.mark.parametrize("place", ["1e999", "0"])
def test_teacher_invalid_answer_is_requested_three_times(opened, place):
    """Of the right form but for a number that is none; and with a log-prob too few."""
    calls = []

    def senseless(server, body):
        calls.append(body)
        right = encode_logprobs(0, [-1.0] * (len(body.sequences[0]) - body.first[0] - 1))
        yield right.replace(b'"place":0', f'"place":{place}'.encode())

    with pytest.raises(RunError, match="in flight on three teacher servers when they died"):
        make_teacher(opened(senseless)).logprobs(DRAWN[:1])
    assert len(calls) == 3


def test_teacher_internal_error_raises(opened):
    """Not for ever: who asks again and again would hear of it in threads alone. Such an id has no JSON."""
    with pytest.raises(TypeError, match="int64 is not JSON"):
        make_teacher(opened()).logprobs([TokensToScore(ids=(5, np.int64(6)), first=1)])


ENVIRONMENT, OWN, LONG = dict(turns=TurnsConfig(environment="e.py:E")), dict(rollout_func="mine.py:f"), dict(vllm_max_model_len=200)


@pytest.mark.parametrize(
    ("parts", "rollout", "wanted"),
    [
        ({}, {}, 31),
        (ENVIRONMENT, {}, 51),
        ({}, OWN, 51),
        ({}, OWN | dict(vllm_max_model_len=200), 201),
        ({}, dict(vllm_max_model_len=200), 31),
    ],
)
def test_teacher_requirements_max_model_len_covers_long_contexts(parts, rollout, wanted):
    """Prompts of 10 tokens, completions of 20, of 40 in evaluations: environments and rollout functions may open with what they like."""
    held_out = EvalConfig(eval_dataset="rows.jsonl", eval_max_completion_length=40)
    cfg = Config(rollout=RolloutConfig(max_completion_length=20, **rollout), eval=held_out, **parts)
    shape, tokenizer = SimpleNamespace(vocab_size=7), SimpleNamespace(get_vocab=dict)
    assert TeacherRequirements.from_config(cfg, shape, tokenizer, 10).max_model_len == wanted


def test_teacher_without_servers_waits_then_raises_and_stops_on_cancel(opened):
    gone = opened()
    gone.close()
    with pytest.raises(NoRolloutServerError, match=r"No teacher server responded within 0\.3 s"):
        make_teacher(gone, timeout=0.3).gather()
    with pytest.raises(CancelledError):
        make_teacher(gone, should_cancel=lambda: True).gather()
    late = make_teacher(gone, timeout=30.0)
    port = gone.address.port
    servers = []
    threading.Timer(0.4, lambda: servers.append(SmallServer(answer_logprobs, port=port, **FROZEN))).start()
    began = time.monotonic()
    assert is_right(late.logprobs(DRAWN)) and time.monotonic() - began > 0.3
    servers[0].close()


def send_keepalives(server, body):
    """It says that it lives, and scores nothing."""
    for _ in range(200):
        yield b"\n"
        time.sleep(0.05)  # a sign of life now and then


def test_teacher_server_that_never_scores_times_out(opened):
    with pytest.raises(
        NoRolloutServerError, match=r"has scored a sequence for 0\.3 s \(vllm_server_timeout\): .*it responds, but has not scored"
    ):
        make_teacher(opened(send_keepalives), timeout=0.3).logprobs(DRAWN)
    assert is_right(make_teacher(opened(send_keepalives), opened(), timeout=0.3).logprobs(DRAWN))
