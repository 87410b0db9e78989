"""vLLM inside the trainer's ranks: one engine per rank, or one shared by `vllm_tensor_parallel_size` consecutive ranks.

Engines share the prompts of a rollout between them; afterwards each rank holds the groups whose rewards it computes. Every rank must build
its engine at the same point of the program, after the trainer's process group exists: vLLM takes that group as its own and creates
sub-groups of it, which is collective.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.cleanup import CleanUp, without_gc
from megatron_grpo.core.base.errors import CancelledError, ConfigError, Problem, RunError
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout import vllm_patches, vllm_requests
from megatron_grpo.core.rollout.engine import PartialCompletion, SamplingSettings, WeightSyncError, make_completion, prompt_seed
from megatron_grpo.core.rollout.experts import ExpertLayers, collect_group_experts, completion_routes
from megatron_grpo.core.rollout.probes import probe_sequences
from megatron_grpo.core.rollout.turns import (
    DONE,
    GIVES_UP,
    EngineAssignment,
    EngineTurnSampler,
    EpisodeLoop,
    LeaderTurnSampler,
    follow_engine,
    lead_engine,
)
from megatron_grpo.core.rollout.vllm_scheduling import patch_scheduling
from megatron_grpo.core.rollout.vllm_weights import AdapterSlot, WeightLoader, copy_buffers, missing_sentence, refuse_changed
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.types import Completion, Group, Prompt, TokenSequence
from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate
from megatron_grpo.core.weights.lora import LoraSync

STEPS_BETWEEN_AGREEMENTS = 16  # tokens that the ranks of one engine sample before they agree whether to go on


class ColocatedEngine:
    """A vLLM engine inside the trainer's process. `rollout.engine.Engine` documents its methods.

    Args:
        rank: Rank of this process among all ranks.
        max_model_len: Maximum length of prompt and completion together, in tokens.
        sleep_level: vLLM's sleep level between rollouts; 0 never sleeps.
        adapter: Slot for the policy's adapter, if adapters are synced separately.
        experts: Expert layers of the model, if routing is returned with the completions.
    """

    takes_slices = True

    def __init__(self, llm: Any, *, rank: int, world_size: int, tensor_parallel_size: int, max_model_len: int, sleep_level: int,
                 adapter: AdapterSlot | None = None, experts: ExpertLayers | None = None):  # fmt: skip
        self._llm, self._adapter, self._experts = llm, adapter, experts
        self._rank = rank
        self._replica, self._rank_in_engine = divmod(rank, tensor_parallel_size)
        self._num_replicas = world_size // tensor_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        self._max_model_len = max_model_len
        self._sleep_level = sleep_level
        self._weights = WeightLoader()
        self.version, self.has_base = 0, True
        self._image_spec: ImageProcessorSpec | None = None  # of a vision-language model
        self._has_tower = True  # its vision-tower weights are those of the trainer, also where they are not synced
        self._asleep: set[str] = set()  # of "weights" and "kv_cache": vLLM's names for what sleep takes away
        self._buffers: list[Any] = []  # one entry per worker, as before the engine slept
        self.should_cancel: Callable[[], bool] = lambda: False
        # `plugins.partial_rollouts.engine.PartialGeneration`, if completions may be interrupted; set by the caller
        self.partial_generation: Callable[..., Any] | None = None

    @classmethod
    def build(cls, cfg: RolloutConfig, *, model_path: str | Path, dtype: str, max_model_len: int, seed: int, rank: int, world_size: int,
              lora: LoraSync | None = None, experts: ExpertLayers | None = None, image_spec: ImageProcessorSpec | None = None,
              max_images: int = 0, trust_remote_code: bool = False,
              patch: Callable[[], None] = lambda: None) -> ColocatedEngine:  # fmt: skip
        """Load the model and start the engine at version 0, so the first rollout needs no weight update. Collective over all ranks.

        Args:
            dtype: "float32" or "bfloat16"; `vllm_dtype` of the settings takes precedence.
            max_model_len: Prompt and completion together, in tokens; `vllm_max_model_len` takes precedence.
            rank: Rank of this process among all ranks.
            lora: How adapters are synced, if the run trains adapters.
            experts: Expert layers of the model, if the trainer replays the routing.
            trust_remote_code: Whether vLLM may run code of the checkpoint.
            patch: Further patches of vLLM, called before the engine starts.

        Raises:
            ConfigError: The KV cache cannot hold one sequence, or vLLM refuses other settings.
        """
        on_gpu = torch.cuda.is_available()
        vllm_patches.prepare_environment(on_gpu=on_gpu)
        with without_gc():
            from vllm import LLM

            vllm_patches.apply_patches(on_gpu=on_gpu)
        vllm_patches.forget_ended_groups()
        vllm_requests.take_logprobs_as_they_come()
        patch()
        tp = cfg.vllm_tensor_parallel_size
        max_model_len = cfg.vllm_max_model_len or max_model_len
        adapter_lora = lora if lora is not None and lora.kind == "adapter" else None
        options = vllm_requests.engine_options(
            cfg, dtype=dtype, trust_remote_code=trust_remote_code, image_spec=image_spec, max_images=max_images, lora=adapter_lora,
            returns_experts=experts is not None, on_gpu=on_gpu,
        )  # fmt: skip
        if collectives.has_job():
            options["distributed_executor_backend"] = "external_launcher"  # one worker in each of the launcher's ranks
        device = torch.cuda.current_device() if on_gpu else None
        with (
            vllm_patches.restore_process(), launcher.on_device(device), activity.phase("starting vLLM"),
            vllm_patches.report_start(model_path), vllm_requests.startup_errors(cfg, max_model_len, on_gpu=on_gpu),
        ):  # fmt: skip
            llm = LLM(
                str(model_path), max_model_len=max_model_len,
                seed=(seed + rank // tp) % 2**32,  # equal on the ranks of one engine; requests carry their own
                disable_log_stats=True, **options,
            )  # fmt: skip
        collectives.barrier_with_timeout()  # a rank that compiles for the first time takes minutes more than the others
        vllm_patches.report_steps(llm)
        if not on_gpu and experts is None:  # routing is returned by each request for all tokens of its prompt
            patch_scheduling(llm)
        engine = cls(llm, rank=rank, world_size=world_size, tensor_parallel_size=tp, max_model_len=max_model_len,
                     sleep_level=cfg.sleep_level if on_gpu else 0, adapter=AdapterSlot(llm, adapter_lora.modules) if adapter_lora else None,
                     experts=experts)  # fmt: skip
        engine._image_spec = image_spec
        return engine

    @property
    def _vocab_size(self) -> int:
        return self._llm.llm_engine.model_config.get_vocab_size()

    @property
    def dtype(self) -> str:
        return str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")

    @property
    def model_runner(self) -> str:
        """The engine's model runner, vLLM's "V1" or "V2". They sample other tokens from the same seeds."""
        return "V2" if self._llm.llm_engine.vllm_config.use_v2_model_runner else "V1"

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        self._require_weights()
        self._check_lengths(prompts, sampling)
        local = prompts[self._replica :: self._num_replicas]
        params = partial(vllm_requests.sampling_params, sampling, vocab_size=self._vocab_size)
        requests = [(prompt.token_ids, prompt.images, params(self._request_seed(seed, prompt, sampling))) for prompt in local]
        answers: list[list[Completion]] | None
        fault = None
        try:
            phase = activity.phase("sampling", total=len(local) * sampling.n, unit="completions")
            with phase, vllm_patches.cancellable_steps(self._llm.llm_engine, self._all_cancelled()):
                outputs = self._run(requests)
            fault = _fault(local, outputs)
            answers = [self._completions(prompt, answer.outputs, sampling) for prompt, answer in zip(local, outputs, strict=True)]
        except CancelledError:
            answers = None
        except ConfigError as error:  # a changed image, or a grammar that allows no further token: all ranks must raise
            answers, fault = [], str(error)
        collectives.barrier_with_timeout()  # one engine may have much longer completions than another
        answers = self._agreed((prompts, sampling, seed), answers, fault)
        # The ranks of one engine hold the same groups; each computes the rewards of every tp-th group.
        share = slice(self._rank_in_engine, None, self._tensor_parallel_size)
        return [Group(prompt=prompt, completions=tuple(row)) for prompt, row in list(zip(local, answers, strict=True))[share]]

    def play(self, prompts: Sequence[Prompt], sampling: SamplingSettings, begin: Callable[[Sequence[Prompt]], EpisodeLoop]) -> list[Group]:
        """Run the episodes of the prompts; see `rollout.turns.TurnEngine`. The first rank of each engine runs them.

        Args:
            begin: Returns the player of the given prompts.
        """
        self._require_weights()
        self._check_lengths(prompts, sampling)
        _refuse_different(collectives.all_gather_object(_question(prompts, sampling)), "play")
        local = prompts[self._replica :: self._num_replicas]
        adapter = self._adapter.request if self._adapter is not None else None
        player = begin(local) if self._rank_in_engine == 0 else None
        turns, digest = self._turns(sampling, adapter), b""
        with CleanUp(turns.abort), activity.phase("running episodes"), vllm_patches.restore_process():
            while True:
                if player is not None:
                    state = lead_engine(player, turns, self.should_cancel, version=self.version)
                    turns.rest(state)
                else:
                    state, digest = follow_engine(turns, lambda: self._broadcast(None), digest)
                collectives.barrier_with_timeout()
                if (worst := collectives.all_reduce_max(state)) == GIVES_UP:
                    raise CancelledError
                if worst == DONE:
                    break
        # The first rank of an engine has its groups; all of its ranks compute the rewards of some of them.
        tp, parts = self._tensor_parallel_size, dict[int, list[Group]]()
        if player is not None:
            groups = player.groups()
            parts = {self._rank + index: groups[index::tp] for index in range(tp)}
        return [group for part in collectives.exchange(parts) for group in part]

    def resume(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, partial: Sequence[PartialCompletion]) -> Any:
        self._require_weights()
        self._check_lengths(prompts, sampling)
        _refuse_different(collectives.all_gather_object(_question(prompts, sampling, seed)), "resume")
        adapter = self._adapter.request if self._adapter is not None else None
        # The ranks of one engine make the same requests in the same order, and so need no leader, as episodes do.
        assert self.partial_generation is not None
        generation = self.partial_generation(
            EngineTurnSampler(self._llm.llm_engine, sampling, version=self.version, adapter=adapter),
            sampling, seed=seed, version=self.version,
            share=EngineAssignment(rank=self._rank, num_engines=self._num_replicas, ranks_per_engine=self._tensor_parallel_size),
            decode_text=lambda prompt, completion: vllm_requests.decode_completion(
                self._llm.get_tokenizer(), prompt.token_ids, completion.token_ids.tolist(), sampling, is_stopped=completion.finish_reason
                == "stop"
            ),
            should_cancel=lambda: self.should_cancel(), context=vllm_patches.restore_process,
        )  # fmt: skip
        return generation.begin(prompts, partial)

    def _turns(self, sampling: SamplingSettings, adapter: Any) -> EngineTurnSampler:
        engine = self._llm.llm_engine
        if self._rank_in_engine or self._tensor_parallel_size == 1:
            return EngineTurnSampler(engine, sampling, version=self.version, adapter=adapter)
        return LeaderTurnSampler(engine, sampling, self._broadcast, version=self.version, adapter=adapter)

    def _broadcast(self, value: Any) -> Any:
        """Broadcast the value of the first rank of this engine to all of its ranks."""
        from vllm.distributed.parallel_state import get_tp_group

        return collectives.from_rank(value, self._rank - self._rank_in_engine, get_tp_group().cpu_group)

    def _require_weights(self) -> None:
        if self.version == NO_VERSION:
            raise WeightSyncError(
                "The rollout engine has no weights: it slept at sleep_level 2, or a weight sync failed. Sync the weights first."
            )

    def load_weights(self, update: WeightUpdate) -> None:
        self.version = NO_VERSION  # until all of it has arrived
        self._finish_steps()
        self._wake("weights")
        if update.kind == "adapter":
            self._load_adapter(update)
        else:
            self._take_weights(update)
        self.version = update.version

    def _load_adapter(self, update: WeightUpdate) -> None:
        if self._adapter is None:
            raise WeightSyncError(f"Version {update.version} is an adapter, but the rollout engine was started without LoRA support.")
        if not self.has_base:
            raise WeightSyncError(f"The rollout engine received the adapter of version {update.version}, but has no base weights for it.")
        self._adapter.load(update)

    def _take_weights(self, update: WeightUpdate) -> None:
        has_tower, self.has_base = self._has_tower, False
        self._has_tower = self._has_tower and not update.moves_tower
        with vllm_patches.restore_process():
            kwargs = {"has_tower": update.moves_tower, "is_tower_there": has_tower}
            (missing,) = self._llm.collective_rpc(self._weights.load, args=(update.tensors,), kwargs=kwargs)
        if missing:
            raise WeightSyncError(f"The weight sync of version {update.version} {missing_sentence(missing)}")
        if update.moves_tower:
            self._clear_image_cache()
        self._has_tower = True
        if self._adapter is not None:
            self._adapter.drop()  # it belonged to the previous weights
        self._forget_prefixes()
        self.has_base = update.kind == "weights"

    def prepare(self) -> bool:
        """Return False: this receiver is always reachable, and never new."""
        return False

    def probes(self) -> list[TokenSequence]:
        return probe_sequences(
            self._llm.get_tokenizer(), vocab_size=self._vocab_size, max_model_len=self._max_model_len, image_spec=self._image_spec
        )

    def scores(self, sequences: Sequence[TokenSequence]) -> Mapping[str, list[list[float]]]:
        return {f"rank {self._rank}": self.score(sequences)}

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Return the log-probs of `scores` for this rank's engine."""
        self._wake("weights", "kv_cache")
        rows = [(row.token_ids.tolist(), row.images) for row in sequences]
        answers = iter(self._run([(ids, images, params) for long, images in rows for ids, params in vllm_requests.scoring_requests(long)]))
        return [vllm_requests.scores(ids, next(answers), next(answers)) for ids, _ in rows]

    @contextlib.contextmanager
    def wake_up(self) -> Iterator[None]:
        """Wake the engine for sampling, and put it to sleep at the end. Does nothing on a CPU and at sleep_level 0.

        At sleep_level 2 the weights are gone afterwards, and `version` is NO_VERSION.
        """
        self._wake("weights", "kv_cache")
        with CleanUp(self._sleep):  # an engine that failed may fail to sleep too: the first error is the one to report
            yield

    def _sleep(self) -> None:
        if self._sleep_level:
            self._finish_steps()
            self._buffers = self._llm.collective_rpc(copy_buffers)
            self._llm.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}
            if self._sleep_level == 2:
                self.version, self.has_base, self._has_tower = NO_VERSION, False, False

    def close(self) -> None:
        if self._llm is not None:
            with vllm_patches.restore_process():
                self._llm.llm_engine.engine_core.shutdown()
                self._llm, self._weights = None, WeightLoader()  # its tables hold the model's layers
                if torch.cuda.is_available():  # the next engine of this process may need the GPU's memory
                    gc.collect()

    # A test switches these off, to show that the check after a weight sync detects it.

    def _forget_prefixes(self) -> None:
        # vLLM keeps the KV cache of the old weights, and would continue it with the new ones.
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM could not reset its prefix cache: a request is still running.")

    def _clear_image_cache(self) -> None:
        # vLLM caches the old vision tower's outputs by image, and would reuse them.
        self._llm.llm_engine.reset_encoder_cache()

    def _finish_steps(self) -> None:
        """Step the idle engine until no step is in flight.

        With asynchronous scheduling, vLLM's default on a GPU, one more step is in flight when the last request stops. Its results are not
        needed, but vLLM must have taken them before its caches are reset: if it returns experts, a later rollout fails otherwise.
        """
        engine = self._llm.llm_engine
        with vllm_patches.restore_process():
            while engine.engine_core.engine_core.batch_queue and not engine.has_unfinished_requests():
                engine.step()

    def _request_seed(self, seed: int, prompt: Prompt, sampling: SamplingSettings) -> int | None:
        # Never None: without a seed each rank of an engine uses its own global generator, and they sample different tokens.
        return prompt_seed(seed, prompt.number, sampling.n)

    # ----

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            self._llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)
            if "weights" in asleep:
                self._llm.collective_rpc(refuse_changed, args=(self._buffers[0], "sleep"))

    def _run(self, requests: Sequence[tuple[Sequence[int], vllm_requests.PlacedImages, Any]]) -> list[Any]:
        if not requests:
            return []
        with vllm_patches.restore_process():
            return self._llm.generate(
                [vllm_requests.make_vllm_prompt(ids, images) for ids, images, _ in requests], [params for _, _, params in requests],
                lora_request=self._adapter.request if self._adapter is not None else None, use_tqdm=False,
            )  # fmt: skip

    def _completions(self, prompt: Prompt, outputs: Sequence[Any], sampling: SamplingSettings) -> list[Completion]:
        experts: Sequence[np.ndarray | None] = [None] * len(outputs)
        if self._experts is not None:
            opening = len(prompt.token_ids)
            experts = collect_group_experts(
                [completion_routes(self._experts.read(o.routed_experts), opening, i) for i, o in enumerate(outputs)], opening
            )
        draws = [vllm_requests.sampled(output, sampling, self._vocab_size) for output in outputs]
        return [
            make_completion(
                prompt.token_ids, output.token_ids, logprobs, sampling_mask=sampling_mask, text=output.text,
                finish_reason=output.finish_reason,
                version=self.version, experts=routes, images=prompt.images,
            )
            for output, (logprobs, sampling_mask), routes in zip(outputs, draws, experts, strict=True)
        ]  # fmt: skip

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: SamplingSettings) -> None:
        longest = max((prompt for prompt in prompts), key=lambda prompt: len(prompt.token_ids), default=None)
        if longest is None:
            return
        length = len(longest.token_ids)
        num_needed = length + sampling.max_completion_length
        if num_needed > self._max_model_len:
            message = (
                f"prompt {longest.number} has {length} tokens, and {length} + max_completion_length ({sampling.max_completion_length}) = "
                f"{num_needed} exceeds vllm_max_model_len ({self._max_model_len}). Use {num_needed}."
            )
            flags = ["vllm_max_model_len", "max_completion_length"]
            raise ConfigError([Problem(flags=flags, nearest={"vllm_max_model_len": [num_needed]}, message=message)])

    def _all_cancelled(self) -> Callable[[], bool]:
        """Return the check for cancellation that runs before every step of the engine.

        The ranks of one engine step together, so they must cancel together.
        """
        if self._tensor_parallel_size == 1:
            return lambda: self.should_cancel()
        from vllm.distributed.parallel_state import get_tp_group

        group, num_steps = get_tp_group().cpu_group, count()

        def all_cancelled() -> bool:
            if next(num_steps) % STEPS_BETWEEN_AGREEMENTS:
                return False
            return bool(collectives.max_(torch.tensor(int(self.should_cancel())), group))

        return all_cancelled

    def _agreed(
        self, request: tuple[Sequence[Prompt], SamplingSettings, int], answers: list[list[Completion]] | None, fault: str | None
    ) -> list[list[Completion]]:
        """Return the answers once all ranks have confirmed that they are consistent. Collective.

        All ranks must have passed the same arguments, and the ranks of one engine must have sampled the same tokens. Log-probs may differ
        in their last bit.

        Raises:
            CancelledError: A rank has no answers.
            RunError: A rank has a fault.
            RuntimeError: The arguments or the sampled tokens differ.
        """
        question = _question(*request)
        sampled = "" if answers is None else _digest(*(c.sequence.token_ids.tobytes() for row in answers for c in row))
        answers_by_rank, faults = zip(
            *(
                (completion_routes[:2], completion_routes[2])
                for completion_routes in collectives.all_gather_object((question, sampled, fault))
            ),
            strict=True,
        )
        if first_fault := next(filter(None, faults), None):
            raise RunError(first_fault)
        _refuse_different((question for question, _ in answers_by_rank), "generate")
        if answers is None or not all(sampled for _, sampled in answers_by_rank):
            raise CancelledError
        for first in range(0, len(answers_by_rank), self._tensor_parallel_size):
            if len({sampled for _, sampled in answers_by_rank[first : first + self._tensor_parallel_size]}) > 1:
                raise RuntimeError(
                    f"ranks {first} to {first + self._tensor_parallel_size - 1} share a vLLM engine but sampled different tokens"
                )
        return answers


def _question(prompts: Sequence[Prompt], *settings: Any) -> str:
    """Return a digest of a request, equal on every rank that makes the same request."""
    return _digest(repr((settings, [(prompt.number, prompt.token_ids) for prompt in prompts])).encode())


def _refuse_different(questions: Iterable[str], action: str) -> None:
    if len(set(questions)) > 1:
        raise RuntimeError(f"ranks called the rollout engine with different prompts, settings or seeds; {action} is collective")


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _fault(prompts: Sequence[Prompt], outputs: Sequence[Any]) -> str | None:
    """Return a sentence about the first prompt whose tokens in vLLM are not those of the trainer; None if there is no such prompt."""
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt.images and (difference := vllm_requests.prompt_difference(output, prompt.token_ids)):
            return f"prompt {prompt.number} (data-set row {prompt.row}): {difference}."
    return None
