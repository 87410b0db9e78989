"""A teacher's servers, as rank 0 of a run asks them: who is there, and what they make of tokens that the policy drew. No torch.

They are frozen, so nobody claims them, several runs may share one, and any of them may answer for any other. One that fails is given up
until the next question.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_grpo.base import activity
from megatron_grpo.base.errors import ConfigError, GivenUp, NobodySamples, Problem, RunError
from megatron_grpo.config.config import Config
from megatron_grpo.config.servers import Address, read_token, teacher_addresses
from megatron_grpo.servers import wire
from megatron_grpo.servers.calls import Calls, Chunk, Loses
from megatron_grpo.servers.fleet import SECONDS_BETWEEN_SIGNS, SECONDS_BETWEEN_TRIES, Member, is_death, named, say_aloud
from megatron_grpo.servers.http import CONNECT, Call, Gone, Refused, Server, trust_of
from megatron_grpo.servers.wire_scores import ROUTE, PromptLogprobs, decode_scores
from megatron_grpo.types import TokensToScore

FLAG = "teacher_model_server"
LARGEST = 1e-3  # of a log-prob: what is left of 0 after rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a teacher's server must have for this run."""

    max_model_len: int  # tokens of prompt and completion, and the one that vLLM always draws
    vocabulary: str  # `data.chat.vocabulary_of` the policy's tokenizer
    vocab_size: int  # ids that the policy may draw

    def problem(self, state: wire.State) -> str | None:
        """Why a server that is as `state` says cannot teach this run, as the end of a sentence."""
        if not state.is_frozen:
            return "takes weights of runs, and a teacher keeps its own: start it with --frozen true"
        if state.vocabulary != self.vocabulary:
            return (
                f"holds {state.model}, whose tokenizer has other words than the policy's: the same token ids would be other text. A "
                "teacher is of the policy's family, with the same vocabulary"
            )
        if state.vocab_size < self.vocab_size:
            return (
                f"holds {state.model}, which knows {state.vocab_size} token ids, and the policy draws from {self.vocab_size}: it has no "
                "log-prob for the last ones"
            )
        if state.max_model_len < self.max_model_len:
            return (
                f"holds sequences of {state.max_model_len} tokens, and prompt, completion and one token more may have "
                f"{self.max_model_len}: start it with --vllm_max_model_len {self.max_model_len}"
            )
        return None


class Teacher:
    """The servers of one teacher. On rank 0 alone."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[Address]],
        server_at: Callable[[Address], Server],
        needs: Needs,
        *,
        timeout: float,
        gives_up: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = say_aloud,
    ):
        """addresses: of all that are known now. timeout: the longest wait for one of them, in seconds. gives_up: the run is to stop."""
        self._addresses, self._server_at, self._needs = addresses, server_at, needs
        self._timeout, self._gives_up, self._say = timeout, gives_up, say
        self._members: dict[Address, Member] = {}
        self._fingerprint: str | None = None  # of the teacher, as the first server told it
        self._has_begun = False

    @classmethod
    def build(cls, cfg: Config, needs: Needs, gives_up: Callable[[], bool] = lambda: False) -> Teacher:
        """Raises ConfigError where there is no token."""
        token, trust = read_token(cfg.rollout), trust_of(cfg.rollout.vllm_server_ca)
        server_at = partial(Server, token=token, incarnation="", trust=trust)
        return cls(partial(teacher_addresses, cfg.grpo), server_at, needs, timeout=cfg.rollout.vllm_server_timeout, gives_up=gives_up)

    def fingerprint(self) -> str:
        """Of the teacher, once it is there; waits for it as `gather` does."""
        self.gather()
        assert self._fingerprint is not None  # the first that answers tells it
        return self._fingerprint

    def problems(self) -> list[Problem]:
        """What is wrong with servers that answer already. Who is not there yet may still come."""
        answered = self._look()
        return [_problem(f"{member} {member.trouble}") for member in answered if member.trouble is not None]

    # ---- who is there

    def gather(self) -> list[Member]:
        """Those that can be asked; waits for one, and the first time for all.

        Raises NobodySamples after `timeout`, ConfigError where the first time one cannot teach this run, and GivenUp.
        """
        with activity.phase("waiting for the teacher", pause=self._timeout):
            start = next_word = time.monotonic()
            while True:
                if not self._has_begun and (wrong := self.problems()):
                    raise ConfigError(wrong)
                if self._has_begun:
                    self._look()
                used, missing = ([m for m in self._members.values() if (m.trouble is None) == is_used] for is_used in (True, False))
                waited = time.monotonic() - start
                if used and (self._has_begun or not missing or waited > self._timeout):
                    self._has_begun = True
                    return used
                if self._gives_up():
                    raise GivenUp("the wait for the teacher is given up")
                if waited > self._timeout:
                    raise NobodySamples(
                        f"no server of the teacher answered within {self._timeout:g} s (vllm_server_timeout): {named(missing)}"
                    )
                if time.monotonic() >= next_word + SECONDS_BETWEEN_SIGNS:
                    next_word = time.monotonic()
                    self._say(f"waiting for the teacher ({waited:.0f} of {self._timeout:g} s): {named(missing)}")
                time.sleep(SECONDS_BETWEEN_TRIES)

    def _look(self) -> list[Member]:
        """Asks all how they are, at the same time: one may have been started again, with another model. Returns those that answered."""
        try:
            for address in self._addresses():
                if address not in self._members:
                    self._members[address] = Member(self._server_at(address))
        except ValueError as error:
            raise ConfigError([Problem(flags=(FLAG,), message=f"{FLAG}: {error}.")]) from error
        answered = list(self._members.values())
        for member, call in [(one, Call(partial(one.server.state, as_owner=False))) for one in answered]:
            try:
                member.state = call.wait(2 * CONNECT)
                member.trouble = self._needs.problem(member.state) or self._other_model(member.state)
            except Refused as refusal:
                other_token = ". Its token is another one than this run's" * (refusal.status == http.client.UNAUTHORIZED)
                member.trouble = f"cannot be used: {refusal}{other_token}"
            except wire.Malformed as error:
                member.trouble = f"answers, and not as a rollout server does: {error}"
            except Gone as error:
                member.trouble = str(error)
                answered.remove(member)
        return answered

    def _other_model(self, state: wire.State) -> str | None:
        self._fingerprint = self._fingerprint or state.fingerprint
        if state.fingerprint == self._fingerprint:
            return None
        return f"holds {state.model} ({state.fingerprint}), and this run's teacher is another model ({self._fingerprint})"

    # ---- what it says

    def logprobs(self, asked: Sequence[TokensToScore]) -> list[np.ndarray]:
        """float32 [tokens from `first` on] of each, at temperature 1, by whichever server has room.

        Raises RunError where the teacher cannot score one of them, NobodySamples where all that live have scored nothing for `timeout`, and
        what `gather` raises.
        """
        question = _Question(asked, timeout=self._timeout)
        while not question.is_done:
            before = question.num_answered
            question.ask(self.gather(), self.lose, self._gives_up)
            if question.hangs and question.num_answered == before:
                raise NobodySamples(
                    f"no server of the teacher has scored anything for {self._timeout:g} s (vllm_server_timeout): "
                    f"{named(list(self._members.values()))}"
                )
        return question.answers()

    def lose(self, member: Member, why: Exception, *, since: int) -> bool:
        """See `calls.Loses`. Nobody claims a teacher's server, so every call says something of it."""
        if member.give_up(why):
            self._say(f"the teacher's server {member} is given up until the next question: {why}")
        return is_death(why)


class _Question(Calls[np.ndarray]):
    def __init__(self, asked: Sequence[TokensToScore], *, timeout: float):
        """timeout: seconds for which a server that lives may score nothing."""
        super().__init__(range(len(asked)))
        self._asked, self._timeout = asked, timeout
        self.hangs = False  # some server has let that pass

    @property
    def is_done(self) -> bool:
        return self._dealing.is_done

    @property
    def num_answered(self) -> int:
        return len(self._dealing.answers)

    def answers(self) -> list[np.ndarray]:
        return [self._dealing.answers[place] for place in range(len(self._asked))]

    def ask(self, members: Sequence[Member], lose: Loses, gives_up: Callable[[], bool]) -> None:
        """Until all is answered, or all of these are lost."""
        self._begin(members, lose)
        with activity.phase("asking the teacher", total=len(self._asked), unit="completions") as phase:
            self._wait(phase, lambda: self.num_answered, gives_up)

    def _refused_by(self, member: Member, error: Refused) -> str:
        return f"the teacher's server {member} cannot score what was drawn: {error}."

    def _of_deadly(self, numbers: Sequence[int]) -> str:
        return "a completion was with three of the teacher's servers as they died: their logs say of what."

    def _hear(self, member: Member, chunk: Chunk) -> None:
        asked = [self._asked[place] for place in chunk]
        body = PromptLogprobs(sequences=tuple(one.ids for one in asked), first=tuple(one.first for one in asked))
        left, heard = set(chunk), time.monotonic()
        for line in member.server.lines(ROUTE, body):
            activity.advance(0)
            if time.monotonic() - heard > self._timeout:
                self.hangs = True
                raise Gone(f"it lives, and has scored nothing for {self._timeout:g} s (vllm_server_timeout)", is_silent=True)
            if found := decode_scores(line):
                place, logprobs = found
                if not 0 <= place < len(chunk) or len(logprobs) != len(asked[place].ids) - asked[place].first:
                    raise wire.Malformed(f"it gave {len(logprobs)} log-probs for sequence {place} of {len(chunk)}")
                if not (np.isfinite(logprobs) & (logprobs <= LARGEST)).all():
                    return self._refuse(RunError(f"the teacher ({member}) gives a drawn token a log-prob that no distribution has."))
                left.discard(chunk[place])
                heard = time.monotonic()
                with self._changed:
                    self._dealing.take(chunk[place], logprobs)
                    self._changed.notify_all()
        if left:
            raise Gone(f"its answer ended with {len(left)} of {len(chunk)} sequences left")


def _problem(sentence: str) -> Problem:
    return Problem(flags=(FLAG,), message=f"the teacher's server {sentence}.")
