"""Rollout servers as one `Engine` of the trainer.

Every rank constructs `ServerEngine`; rank 0 alone communicates with the servers. Meanwhile the other ranks wait in a collective without a
timeout, because a server may take minutes to start. Rank 0 broadcasts its result or its exception, so all ranks continue or raise alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import CancelledError, ConfigError, NoRolloutServerError, RunError
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.rollout.engine import (
    PartialCompletion,
    ReceiverChangedError,
    SamplingSettings,
    WeightsLostError,
    WeightSyncError,
    make_completion,
    prompt_seed,
)
from megatron_grpo.core.rollout.experts import InvalidRoutingError, collect_group_experts
from megatron_grpo.core.rollout.probes import probe_sequences
from megatron_grpo.core.rollout.turns import SECONDS_BETWEEN_LOOKS, EpisodeLoop, Key, wait_together
from megatron_grpo.core.types import Completion, Group, Prompt, TokenSequence
from megatron_grpo.core.weights.buckets import DEFAULT_BUCKET_MB, MIB, NO_VERSION, WeightUpdate
from megatron_grpo.core.weights.lora import LoraSync
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import list_addresses, read_token
from megatron_grpo.plugins.servers.http import Server, make_tls_context, new_incarnation, read_run_name, run_name
from megatron_grpo.plugins.servers.requests import GenerationRequest, ImagesToSend, placed_images
from megatron_grpo.plugins.servers.server_group import TrainingServerGroup, derive_requirements
from megatron_grpo.plugins.servers.server_parts import ServerGeneration, ServerPartialRollouts, round_robin
from megatron_grpo.plugins.servers.server_turns import ServerTurns, TurnServerLostError
from megatron_grpo.plugins.servers.weight_broadcast import WeightBroadcaster
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import load_tokenizer
from megatron_grpo.run.inputs import ValidatedInputs

# Exceptions of rank 0 that are raised on all ranks.
REPORTED = (ConfigError, RunError, NoRolloutServerError, CancelledError, WeightSyncError, ReceiverChangedError)

Value = TypeVar("Value")


def build_servers(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, bitwise_parity: Callable[[], None], lora: LoraSync | None = None,
    runner: str | None = None,
) -> ServerEngine:  # fmt: skip
    """Claim the rollout servers for the run that writes to `output_dir`, waiting until they answer. Collective.

    Args:
        inputs: Validated inputs: model path, shape, prompts and image processor.
        bitwise_parity: Unused: servers refuse the setting `bitwise_parity`.
        lora: How adapters are synced; None if merged or full weights are synced.
        runner: Unused: a server chooses its model runner.

    Raises:
        ConfigError: The token is missing, or as for `ServerEngine`.
    """
    rollout = cfg.rollout
    requirements = derive_requirements(
        cfg, inputs.shape, inputs.longest_prompt, lora, image_spec=inputs.image_spec, max_images=inputs.max_images
    )

    def broadcaster() -> WeightBroadcaster:
        output_dir, incarnation, token = Path(cfg.run.output_dir), new_incarnation(), read_token(rollout)
        is_new = run_name(output_dir) is None
        server_group = TrainingServerGroup(
            partial(list_addresses, rollout),
            partial(Server, token=token, incarnation=incarnation, trust=make_tls_context(rollout.vllm_server_ca)),
            run=read_run_name(output_dir), incarnation=incarnation, requirements=requirements, timeout=rollout.vllm_server_timeout,
            waits_for_all=is_new,
        )  # fmt: skip
        bucket_bytes = (rollout.weight_sync_bucket_mb or DEFAULT_BUCKET_MB[parallel.device.type]) * MIB
        modules = lora.modules if lora is not None else frozenset()
        return WeightBroadcaster(server_group, device=parallel.device, bucket_bytes=bucket_bytes, modules=modules)

    return ServerEngine(
        broadcaster, tokenizer=load_tokenizer(str(inputs.model_path), trust_remote_code=cfg.model.trust_remote_code),
        vocab_size=inputs.shape.vocab_size, returns_experts=requirements.returns_experts, image_spec=inputs.image_spec,
    )  # fmt: skip


class ServerEngine:
    """`Engine` that samples on rollout servers. `megatron_grpo.core.rollout.engine` documents its methods.

    The constructor is collective, and waits for servers.

    Args:
        broadcaster: Makes the `WeightBroadcaster` with its server group; called on rank 0 alone.
        vocab_size: Number of token IDs of the model.
        returns_experts: Whether completions include the experts that their tokens were routed to.
        image_spec: Image processor of a vision-language model; None: text only.

    Raises:
        ConfigError: The token is missing, or a server is invalid for this run.
        NoRolloutServerError: No server answered within `vllm_server_timeout`.
        CancelledError: The run is to stop.
        RunError: Another process of this run has taken over the servers.
    """

    takes_slices = True

    def __init__(
        self,
        broadcaster: Callable[[], WeightBroadcaster],
        *,
        tokenizer: Any,
        vocab_size: int,
        returns_experts: bool = False,
        image_spec: ImageProcessorSpec | None = None,
    ):
        self._tokenizer, self._vocab_size, self.returns_experts, self._image_spec = tokenizer, vocab_size, returns_experts, image_spec
        self._broadcaster: WeightBroadcaster | None = None  # on rank 0
        # The weights that a server was started with are never version 0: it is unknown which files it has read.
        self.version, self.has_base = NO_VERSION, False
        self._questions = WeakSet[GenerationRequest | ServerPartialRollouts]()  # requests that may still be awaited; on rank 0 alone
        self._answering: tuple[object, ServerGenerationFuture] | None = None  # arguments of `generate`, and the answers so far
        self._deaths: dict[Key, list[str]] = {}  # turn -> servers that died while it was in flight, during one `play`
        self.should_cancel: Callable[[], bool] = lambda: False

        def begin() -> None:
            self._broadcaster = broadcaster()

        collectives.run_on_rank_zero(begin, REPORTED)
        self.prepare()

    def run_on_rank_zero(self, work: Callable[[WeightBroadcaster], Value]) -> Value:
        """Execute `work` on rank 0, and return its result or raise its exception on every rank. Collective."""
        return collectives.run_on_rank_zero(lambda: work(cast(WeightBroadcaster, self._broadcaster)), REPORTED)

    # ---- weights

    def prepare(self) -> bool:
        def gathered(broadcaster: WeightBroadcaster) -> tuple[str, int, bool, bool]:
            broadcaster.server_group.should_cancel = self.should_cancel
            members = broadcaster.server_group.gather()
            states = [member.state for member in members if member.state is not None]
            dtype = next((state.dtype for state in states if state.dtype != "float32"), "float32")
            has_new = not all(member.is_proven for member in members)
            return dtype, min(state.max_model_len for state in states), all(state.has_base for state in states), has_new

        self.dtype, self._max_model_len, self.has_base, has_new = self.run_on_rank_zero(gathered)
        return has_new

    def load_weights(self, update: WeightUpdate) -> None:
        self.version = NO_VERSION  # until all of it has arrived, everywhere
        self.has_base = self.has_base and update.kind == "adapter"

        def use_up() -> None:
            deque(update.tensors, maxlen=0)

        if self._broadcaster is None:
            use_up()  # yields no tensors here, but the stream is collective: this rank may have to send its shards

        def sync(broadcaster: WeightBroadcaster) -> None:
            # The stream is consumed to its end before an error is raised: other ranks send it, and would wait for this rank.
            with CleanUp(use_up):
                broadcaster.send_update(update)

        self.run_on_rank_zero(sync)
        self.version = update.version
        self.has_base = self.has_base or update.kind == "weights"

    def probes(self) -> list[TokenSequence]:
        return probe_sequences(self._tokenizer, vocab_size=self._vocab_size, max_model_len=self._max_model_len, image_spec=self._image_spec)

    def scores(self, sequences: Sequence[TokenSequence]) -> Mapping[str, list[list[float]]]:
        scores: dict[str, list[list[float]]] = {}  # of all servers on rank 0, empty on other ranks
        self.run_on_rank_zero(lambda broadcaster: scores.update(broadcaster.scores(sequences, self.version, self._image_spec)))
        return scores

    # ---- sampling

    @contextmanager
    def wake_up(self) -> Iterator[None]:
        """Do nothing, since servers never sleep."""
        yield

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        request = ([prompt.number for prompt in prompts], sampling, seed)
        if self._answering is None or self._answering[0] != request:  # else resume, with the answers from before the servers were lost
            self._answering = request, self.begin(prompts, sampling, seed=seed)
        groups = self._answering[1].groups()
        self._answering = None
        return groups

    def play(self, prompts: Sequence[Prompt], sampling: SamplingSettings, begin: Callable[[Sequence[Prompt]], EpisodeLoop]) -> list[Group]:
        """Play episodes as `rollout.turns.TurnEngine` documents. Rank 0 plays all of them. Collective.

        Args:
            prompts: The prompts, the same on every rank.
            begin: Returns the player of some prompts; called on rank 0 alone, with all prompts.

        Returns:
            The groups that this rank scores.

        Raises:
            WeightsLostError: No server with the weights is left. Sync the weights, and call it again with the same player from `begin`.
            CancelledError: The run is to stop.
        """
        self.require_weights()
        parts: dict[int, Sequence[Group]] = {}

        def play(broadcaster: WeightBroadcaster) -> int:
            """Fill `parts` with the groups of each rank. Returns the number of open turns if no server is left, else 0."""
            player, rows = begin(prompts), {prompt.number: prompt.row for prompt in prompts}
            turns = ServerTurns(
                broadcaster.server_group, _on_the_wire(sampling), version=self.version, deaths=self._deaths,
                format_name=lambda key: f"episode {key[1]} of prompt {key[0]} (data-set row {rows[key[0]]})",
            )  # fmt: skip
            try:
                with activity.phase("running episodes"):
                    while not player.advance(turns, SECONDS_BETWEEN_LOOKS, version=self.version):
                        if self.should_cancel():
                            raise CancelledError
            except TurnServerLostError:
                return turns.num_running
            except BaseException:
                turns.abort()
                raise
            self._deaths.clear()
            parts.update(round_robin(player.groups()))
            return 0

        self.require_all(play, "{} turns are not sampled")
        return [group for part in collectives.exchange(parts) for group in part]

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> ServerGenerationFuture:
        self.require_weights()
        question = None
        if self._broadcaster is not None:
            names = {prompt.number: f"prompt {prompt.number} (data-set row {prompt.row})" for prompt in prompts}
            requests = {prompt.number: _request(prompt, sampling, seed) for prompt in prompts}
            to_send = ImagesToSend.from_images((prompt.images for prompt in prompts), self._image_spec)
            question = GenerationRequest(
                requests, _on_the_wire(sampling), version=self.version, format_name=names.__getitem__, to_send=to_send
            )
            self._questions.add(question)
            question.ask(self._broadcaster.server_group)
        return ServerGenerationFuture(self, prompts, question)

    def resume(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, partial: Sequence[PartialCompletion]
    ) -> ServerGeneration:
        self.require_weights()

        def make_parts() -> ServerPartialRollouts:
            server_group = cast(WeightBroadcaster, self._broadcaster).server_group
            parts = ServerPartialRollouts(
                server_group, _on_the_wire(sampling), version=self.version, deaths=self._deaths,
                format_name=lambda key: f"completion {key[1]} of prompt {key[0]}",
            )  # fmt: skip
            self._questions.add(parts)
            return parts

        return ServerGeneration(self, make_parts, sampling, seed=seed).begin(prompts, partial)

    def require_weights(self) -> None:
        """Check that the servers have weights of a version.

        Raises:
            WeightSyncError: A weight sync failed, or there was none.
        """
        if self.version == NO_VERSION:
            raise WeightSyncError("The rollout servers have no weights: a weight update failed. Sync the weights first.")

    def resume_request(self, question: GenerationRequest | None, *, is_anew: bool) -> None:
        """Wait on every rank until all prompts are answered. Collective.

        Args:
            question: The request; on rank 0 alone.
            is_anew: True after weights were lost: send the unanswered prompts again, for the current version.

        Raises:
            WeightsLostError: No server with the weights is left.
        """

        def wait(broadcaster: WeightBroadcaster) -> int:
            assert question is not None
            if is_anew:
                question.version = self.version
                question.ask(broadcaster.server_group)
            return question.wait(self.should_cancel)

        self.require_all(wait, "{} prompts are not completed")

    def require_all(self, work: Callable[[WeightBroadcaster], int], unfinished: str) -> None:
        """Execute `work` on rank 0. Collective.

        Args:
            work: Returns the number of items that are unfinished because no server is left, else 0.

        Raises:
            WeightsLostError: Some items are unfinished.
        """

        def counted(broadcaster: WeightBroadcaster) -> int:
            if count := work(broadcaster):
                broadcaster.server_group.print_line(
                    f"{unfinished.format(count)}, and no rollout server is available: weights are synced again as soon as one responds"
                )
            return count

        if count := self.run_on_rank_zero(counted):
            version, self.version, self.has_base = self.version, NO_VERSION, False
            raise WeightsLostError(f"No rollout server has the weights of version {version} any more, and {unfinished.format(count)}")

    def close(self) -> None:
        if self._broadcaster is not None:
            for question in list(self._questions):
                question.abort()
            with CleanUp(self._broadcaster.server_group.close):
                self._broadcaster.close()
            self._broadcaster = None


class ServerGenerationFuture:
    """`GenerationFuture` of one request. Rank 0 holds the request and distributes its answers.

    Args:
        question: The request on rank 0; None elsewhere.
    """

    def __init__(self, engine: ServerEngine, prompts: Sequence[Prompt], question: GenerationRequest | None):
        self._engine, self._prompts, self._question = engine, prompts, question
        self._was_heard = False

    def wait(self, seconds: float | None = None) -> bool:
        should_cancel = self._engine.should_cancel if seconds is None else None
        return wait_together(lambda part: self._question is None or self._question.rests(part), seconds, should_cancel=should_cancel)

    def groups(self) -> list[Group]:
        """Wait for all answers and return the groups that this rank scores. Collective.

        Raises:
            WeightsLostError: No server with the weights is left. Sync the weights and call it again.
        """
        if self._was_heard:  # an earlier call ended with WeightsLostError
            self._engine.require_weights()
        is_anew, self._was_heard = self._was_heard, True
        self._engine.resume_request(self._question, is_anew=is_anew)
        answers = [] if self._question is None else [self._question.answers[prompt.number] for prompt in self._prompts]
        local = [sampled for part in collectives.exchange(round_robin(answers)) for sampled in part]
        prompts = self._prompts[collectives.rank() :: collectives.num_ranks()]
        return [
            _group(prompt, sampled, returns_experts=self._engine.returns_experts) for prompt, sampled in zip(prompts, local, strict=True)
        ]

    def drop(self) -> None:
        if self._question is not None:
            self._question.abort()

    @property
    def seconds(self) -> float:
        return 0.0 if self._question is None else self._question.seconds


def _request(prompt: Prompt, sampling: SamplingSettings, seed: int) -> wire.Request:
    return wire.Request(
        key=str(prompt.number), ids=tuple(prompt.token_ids), seed=prompt_seed(seed, prompt.number, sampling.n), n=sampling.n,
        max_tokens=sampling.max_completion_length, images=placed_images(prompt.images),
    )  # fmt: skip


def _on_the_wire(sampling: SamplingSettings) -> wire.Sampling:
    """Convert sampling settings; the fields of both classes have the same names."""
    return wire.Sampling(**{name: getattr(sampling, name) for name in wire.Sampling.__struct_fields__})


def _group(prompt: Prompt, answers: Sequence[wire.SampledCompletion], *, returns_experts: bool) -> Group:
    experts: Sequence[np.ndarray | None] = [None] * len(answers)
    if returns_experts:
        if not all(answer.experts is not None for answer in answers):
            raise InvalidRoutingError("A rollout server returned no routed experts.")
        experts = collect_group_experts([cast(np.ndarray, answer.experts) for answer in answers], len(prompt.token_ids))
    return Group(
        prompt=prompt, completions=tuple(_completion(prompt, answer, routes) for answer, routes in zip(answers, experts, strict=True))
    )


def _completion(prompt: Prompt, sampled: wire.SampledCompletion, experts: np.ndarray | None) -> Completion:
    [version] = {span[0] for span in sampled.versions}  # `requests` refuses completions of several versions
    return make_completion(
        prompt.token_ids, sampled.tokens.tolist(), sampled.logprobs.tolist(),
        text=sampled.text, finish_reason=sampled.reason, version=version, experts=experts, images=prompt.images,
        sampling_mask=sampled.sampling_mask,
    )  # fmt: skip
