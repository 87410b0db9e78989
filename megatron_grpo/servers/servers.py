"""Rollout servers as one engine of the trainer. Every rank has this object; rank 0 alone speaks to the servers.

While it does, the other ranks wait in a collective that has no limit: a server may take minutes to start. What rank 0 learns, or fails
with, is told to all, so that they raise or go on alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from megatron_grpo.base import activity
from megatron_grpo.base.cleanup import CleanUp
from megatron_grpo.base.errors import ConfigError, GivenUp, NobodySamples, RunError
from megatron_grpo.config.config import RolloutConfig
from megatron_grpo.config.servers import addresses_of, read_token
from megatron_grpo.data.chat import load_tokenizer
from megatron_grpo.data.eyes import Eyes
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.rollout.ahead import SECONDS_BETWEEN_LOOKS, wait_together
from megatron_grpo.rollout.engine import HolderChanged, SamplingSettings, WeightsLost, WeightSyncError, prompt_seed
from megatron_grpo.rollout.experts import WrongExperts, of_group
from megatron_grpo.rollout.probes import probe_sequences
from megatron_grpo.rollout.turns import Player
from megatron_grpo.servers import wire
from megatron_grpo.servers.asking import Question, ToSend, on_the_wire
from megatron_grpo.servers.fleet import Fleet, Needs
from megatron_grpo.servers.http import Server, named_run, new_incarnation, run_name, trust_of
from megatron_grpo.servers.pushing import Pusher
from megatron_grpo.servers.server_turns import NoServer, ServerTurns
from megatron_grpo.types import Completion, Group, Prompt, answered
from megatron_grpo.types import Sequence as Scored
from megatron_grpo.weights.buckets import DEFAULT_BUCKET_MB, MIB, NO_VERSION, WeightUpdate
from megatron_grpo.weights.shape import ModelShape

TOLD = (ConfigError, RunError, NobodySamples, GivenUp, WeightSyncError, HolderChanged)  # what rank 0 may end with, on behalf of all

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all ranks know of the servers that are used."""

    dtype: str
    max_model_len: int  # the smallest
    has_base: bool  # all of them
    has_new: bool


class ServerEngine:
    """An `Engine`. See `megatron_grpo.rollout.engine` for what its methods promise."""

    def __init__(
        self, pusher: Callable[[], Pusher], *, tokenizer: Any, vocab_size: int, tells_experts: bool = False, eyes: Eyes | None = None
    ):
        """pusher: makes the one who speaks to the servers, with their fleet; called on rank 0. Collective, and waits for servers: raises
        what `prepare` does. tells_experts: completions have the experts that their tokens were routed to. eyes: of a model that sees."""
        self._eyes = eyes
        self.tells_experts = tells_experts
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pusher: Pusher | None = None
        # What a server was started with is never version 0: nobody knows which files it read.
        self._version, self._has_base = NO_VERSION, False
        self._questions: set[Question] = set()  # that are not answered yet; on rank 0 alone
        self._answering: ServerFlight | None = None
        self._asked: object = None
        self._playing: tuple[Player, ServerTurns] | None = None  # on rank 0
        self.gives_up: Callable[[], bool] = lambda: False
        self._told(partial(self._begin, pusher))
        self.prepare()

    def _begin(self, pusher: Callable[[], Pusher]) -> None:
        self._pusher = pusher()

    @classmethod
    def build(cls, cfg: RolloutConfig, *, model_path: Path, shape: ModelShape, output_dir: Path, needs: Needs, device: torch.device,
              lora: LoraPush | None = None, eyes: Eyes | None = None, trust_remote_code: bool = False) -> ServerEngine:  # fmt: skip
        """Claims the servers that the settings name, in the name of the run that writes to `output_dir`. Collective.

        lora: how adapters are pushed, where they train. eyes: of a model that sees. Raises what `prepare` does, and ConfigError where
        there is no token.
        """

        def pusher() -> Pusher:
            incarnation, token, trust = new_incarnation(), read_token(cfg), trust_of(cfg.vllm_server_ca)
            is_new = run_name(output_dir) is None
            fleet = Fleet(
                partial(addresses_of, cfg), partial(Server, token=token, incarnation=incarnation, trust=trust), run=named_run(output_dir),
                incarnation=incarnation, needs=needs, timeout=cfg.vllm_server_timeout, waits_for_all=is_new,
            )  # fmt: skip
            bucket_bytes = (cfg.weight_sync_bucket_mb or DEFAULT_BUCKET_MB[device.type]) * MIB
            return Pusher(fleet, device=device, bucket_bytes=bucket_bytes, modules=lora.modules if lora is not None else frozenset())

        tokenizer = load_tokenizer(str(model_path), trust_remote_code=trust_remote_code)
        return cls(pusher, tokenizer=tokenizer, vocab_size=shape.vocab_size, tells_experts=needs.tells_experts, eyes=eyes)

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_base(self) -> bool:
        return self._has_base

    @property
    def dtype(self) -> str:
        return self._facts.dtype

    # ---- weights

    def prepare(self) -> bool:
        self._facts = self._told(self._gathered)
        self._has_base = self._facts.has_base
        return self._facts.has_new

    def take(self, update: WeightUpdate) -> None:
        self._version = NO_VERSION  # until all of it has arrived, everywhere
        self._has_base = self._has_base and update.kind == "adapter"
        if self._pusher is None:
            for _ in update.tensors:  # nothing comes; but this rank may have to send
                pass
        self._told(partial(self._push, update))
        self._version = update.version
        self._has_base = self._has_base or update.kind == "weights"

    def _push(self, update: WeightUpdate) -> None:
        assert self._pusher is not None  # asked on rank 0 alone
        # What is left of the stream is taken before anybody hears of an error: others send it, and would wait for this rank.
        with CleanUp(lambda: deque(update.tensors, maxlen=0)):
            self._pusher.push(update)

    def probes(self) -> list[Scored]:
        return probe_sequences(self._tokenizer, vocab_size=self._vocab_size, max_model_len=self._facts.max_model_len, eyes=self._eyes)

    def scores(self, sequences: Sequence[Scored]) -> Mapping[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}

        def ask() -> None:
            assert self._pusher is not None
            found.update(self._pusher.scores(sequences, self._version, self._eyes))

        self._told(ask)
        return found

    def _gathered(self) -> Facts:
        assert self._pusher is not None
        self._pusher.fleet.gives_up = self.gives_up
        members = self._pusher.fleet.gather()
        states = [member.state for member in members if member.state is not None]
        return Facts(
            dtype=next((state.dtype for state in states if state.dtype != "float32"), "float32"),
            max_model_len=min(state.max_model_len for state in states),
            has_base=all(state.has_base for state in states),
            has_new=not all(member.is_proven for member in members),
        )

    # ---- sampling

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Servers never sleep."""
        yield

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        asked = ([prompt.number for prompt in prompts], sampling, seed)
        if self._asked != asked:  # else the same question goes on, with what was answered before the servers were lost
            self._asked, self._answering = asked, self.begin(prompts, sampling, seed=seed)
        assert self._answering is not None
        groups = self._answering.groups()
        self._asked = self._answering = None
        return groups

    def play(self, prompts: Sequence[Prompt], sampling: SamplingSettings, begin: Callable[[Sequence[Prompt]], Player]) -> list[Group]:
        """See `rollout.turns.TurnEngine`. Rank 0 plays all episodes."""
        self.require_weights()

        parts: dict[int, list[Group]] = {}
        if left := self._told(partial(self._played, prompts, sampling, begin, parts)):
            self._lost(f"{left} turns are not drawn")
        return [group for part in collectives.exchange(parts) for group in part]

    def _played(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        begin: Callable[[Sequence[Prompt]], Player],
        parts: dict[int, list[Group]],
    ) -> int:
        """Fills `parts` with the groups of each rank; or returns how many turns are open, and no server is left."""
        assert self._pusher is not None
        player = begin(prompts)
        turns = self._turns_of(player, prompts, sampling)
        try:
            with activity.phase("playing episodes"):
                while not player.advance(turns, SECONDS_BETWEEN_LOOKS, version=self._version):
                    if self.gives_up():
                        raise GivenUp
        except NoServer:
            say = self._pusher.fleet.say
            say(f"{turns.num_running} turns are open, and no rollout server: the weights are pushed again as soon as one is there")
            return turns.num_running
        except BaseException:
            turns.abandon()
            raise
        self._playing = None
        groups, num_ranks = player.groups(), collectives.num_ranks()
        parts.update((rank, groups[rank::num_ranks]) for rank in range(num_ranks))
        return 0

    def _turns_of(self, player: Player, prompts: Sequence[Prompt], sampling: SamplingSettings) -> ServerTurns:
        """The same for the same player, which goes on after servers were lost."""
        assert self._pusher is not None
        if self._playing is None or self._playing[0] is not player:
            rows = {prompt.number: prompt.row for prompt in prompts}
            turns = ServerTurns(
                self._pusher.fleet, _on_the_wire(sampling), version=self._version,
                name_of=lambda key: f"episode {key[1]} of prompt {key[0]} (data-set row {rows[key[0]]})",
            )  # fmt: skip
            self._playing = player, turns
        self._playing[1].version = self._version
        return self._playing[1]

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> ServerFlight:
        self.require_weights()
        question = self._question_of(prompts, sampling, seed)
        if question is not None:
            assert self._pusher is not None
            self._questions.add(question)
            question.ask(self._pusher.fleet)
        return ServerFlight(self, prompts, question)

    def require_weights(self) -> None:
        if self._version == NO_VERSION:
            raise WeightSyncError("the rollout servers hold no weights of a version: a weight push failed. Push them first.")

    def _question_of(self, prompts: Sequence[Prompt], sampling: SamplingSettings, seed: int) -> Question | None:
        if self._pusher is None:
            return None
        names = {prompt.number: f"prompt {prompt.number} (data-set row {prompt.row})" for prompt in prompts}
        requests = {prompt.number: _request(prompt, sampling, seed) for prompt in prompts}
        album = ToSend.of((prompt.pictures for prompt in prompts), self._eyes)
        return Question(requests, _on_the_wire(sampling), version=self._version, name_of=names.__getitem__, album=album)

    def hear(self, question: Question | None, *, is_anew: bool) -> None:
        """Waits until all is answered, on every rank. Raises WeightsLost. is_anew: after that, what is left is asked again."""

        def wait() -> int:
            assert self._pusher is not None and question is not None
            if is_anew:
                question.go_on(self._pusher.fleet, version=self._version)
            left = question.wait(self.gives_up)
            if left:
                say = self._pusher.fleet.say
                say(f"{left} prompts are left, and no rollout server: the weights are pushed again as soon as one is there")
            return left

        if left := self._told(wait):
            self._lost(f"{left} prompts are not answered")

    def _lost(self, what: str) -> NoReturn:
        version, self._version, self._has_base = self._version, NO_VERSION, False
        raise WeightsLost(f"no rollout server is left that has the weights of version {version}, and {what}")

    def gave_up(self, question: Question | None) -> None:
        if question is not None:
            question.abandon()
            self._questions.discard(question)

    def close(self) -> None:
        if self._playing is not None:
            self._playing[1].abandon()
        if self._pusher is not None:
            for question in list(self._questions):
                self.gave_up(question)
            with CleanUp(self._pusher.fleet.close):
                self._pusher.close()
            self._pusher = None

    # ----

    def _told(self, work: Callable[[], Value]) -> Value:
        return collectives.told(work, TOLD)


class ServerFlight:
    """A `Flight`: one question. Rank 0 has it, and hands out its answers."""

    def __init__(self, engine: ServerEngine, prompts: Sequence[Prompt], question: Question | None):
        self._engine, self._prompts, self._question = engine, prompts, question
        self._was_heard = False

    def wait(self, seconds: float | None = None) -> bool:
        gives_up = self._engine.gives_up if seconds is None else None
        return wait_together(lambda part: self._question is None or self._question.rests(part), seconds, gives_up=gives_up)

    def groups(self) -> list[Group]:
        """Each group goes to the one rank that judges it."""
        if self._was_heard:  # and weights were lost
            self._engine.require_weights()
        is_anew, self._was_heard = self._was_heard, True
        self._engine.hear(self._question, is_anew=is_anew)
        parts: dict[int, dict[int, tuple[wire.Drawn, ...]]] = {}
        if self._question is not None:
            for place, prompt in enumerate(self._prompts):
                parts.setdefault(place % collectives.num_ranks(), {})[place] = self._question.answers[prompt.number]
        mine = {place: drawn for part in collectives.exchange(parts) for place, drawn in part.items()}
        self.drop()
        return [_group(self._prompts[i], mine[i], tells_experts=self._engine.tells_experts) for i in sorted(mine)]

    def drop(self) -> None:
        self._engine.gave_up(self._question)

    @property
    def seconds(self) -> float:
        return 0.0 if self._question is None else self._question.seconds


def _request(prompt: Prompt, sampling: SamplingSettings, seed: int) -> wire.Request:
    return wire.Request(
        key=str(prompt.number), ids=tuple(prompt.token_ids), seed=prompt_seed(seed, prompt.number, sampling.n), n=sampling.n,
        max_tokens=sampling.max_completion_length, shown=on_the_wire(prompt.pictures),
    )  # fmt: skip


def _on_the_wire(sampling: SamplingSettings) -> wire.Sampling:
    return wire.Sampling(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, stop=sampling.stop,
        tells_kept=sampling.tells_kept, stop_token_ids=sampling.stop_token_ids, more=dict(sampling.more),
    )  # fmt: skip


def _group(prompt: Prompt, answers: Sequence[wire.Drawn], *, tells_experts: bool) -> Group:
    experts: Sequence[np.ndarray | None] = [None] * len(answers)
    if tells_experts:
        experts = of_group([_experts(one) for one in answers], len(prompt.token_ids))
    return Group(prompt=prompt, completions=tuple(_completion(prompt, one, routes) for one, routes in zip(answers, experts, strict=True)))


def _experts(drawn: wire.Drawn) -> np.ndarray:
    if drawn.experts is None:
        raise WrongExperts("a rollout server answered without the experts that it took.")
    return drawn.experts


def _completion(prompt: Prompt, drawn: wire.Drawn, experts: np.ndarray | None) -> Completion:
    [version] = {span[0] for span in drawn.versions}  # more are refused
    return answered(
        prompt.token_ids, drawn.tokens.tolist(), drawn.logprobs.tolist(),
        text=drawn.text, ended=drawn.reason, version=version, experts=experts, shown=prompt.pictures, kept=drawn.kept,
    )  # fmt: skip
