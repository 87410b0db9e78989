"""vLLM inside the trainer's own ranks: one engine a rank, or one shared by `vllm_tensor_parallel_size` consecutive ranks.

Engines share the prompts of a rollout between them; afterwards every rank holds all groups. Every rank must build its engine at the same
place of the program, after the trainer's process group exists: vLLM takes that group as its own and makes sub-groups of it, which is
collective.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.cleanup import CleanUp
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout import vllm_patches
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.rollout.engine import SamplingSettings, WeightSyncError, prompt_seed
from megatron_grpo.rollout.vllm_adapters import AdapterSlot, lora_options
from megatron_grpo.rollout.vllm_options import CPU_BLOCK_SIZE, cpu_options, gpu_options, problem_of
from megatron_grpo.settings.config import RolloutConfig
from megatron_grpo.types import Completion, Group, Prompt, answered
from megatron_grpo.weights.update import NO_VERSION, WeightUpdate

PROBE_LENGTH = 2 * CPU_BLOCK_SIZE + 2  # tokens: two full blocks of the prefix cache, then the token that is read through it
NUM_PROBES = 4


class ColocatedEngine:
    """An `Engine`. See `megatron_grpo.rollout.engine` for what its methods promise."""

    def __init__(self, llm: Any, *, rank: int, world_size: int, tensor_parallel_size: int, max_model_len: int, sleep_level: int,
                 adapter: AdapterSlot | None = None):  # fmt: skip
        """adapter: where the policy's adapter goes, if it is pushed by itself."""
        self._llm, self._adapter = llm, adapter
        self._replica, self._rank_in_engine = divmod(rank, tensor_parallel_size)
        self._num_replicas = world_size // tensor_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        self._max_model_len = max_model_len
        self._sleep_level = sleep_level
        self._version, self._has_base = 0, True
        self._asleep: set[str] = set()  # of "weights" and "kv_cache": vLLM's names for what sleep takes away

    @classmethod
    def build(cls, cfg: RolloutConfig, *, model_path: str | Path, dtype: str, max_model_len: int, seed: int, rank: int, world_size: int,
              lora: LoraPush | None = None) -> ColocatedEngine:  # fmt: skip
        """Loads the model at `model_path` (version 0: nothing needs to be pushed before the first rollout). Collective over all ranks.

        dtype: "float32" or "bfloat16"; `vllm_dtype` of the settings goes before it. max_model_len: prompt + completion, in tokens;
        `vllm_max_model_len` goes before it. lora: how adapters are pushed, where they train. Raises ConfigError where the KV cache cannot
        hold one sequence.
        """
        on_gpu = torch.cuda.is_available()
        vllm_patches.prepare_environment(on_gpu=on_gpu)
        from vllm import LLM

        vllm_patches.apply_patches(on_gpu=on_gpu)
        tp = cfg.vllm_tensor_parallel_size
        max_model_len = cfg.vllm_max_model_len or max_model_len
        options = (gpu_options(cfg) if on_gpu else cpu_options(cfg)) | {"dtype": cfg.vllm_dtype or dtype}
        room = lora if lora is not None and lora.kind == "adapter" else None
        if room is not None:
            options |= lora_options(room)
        if collectives.has_job():
            options["distributed_executor_backend"] = "external_launcher"  # one worker in each of the launcher's ranks
        with vllm_patches.trainer_untouched():
            try:
                llm = LLM(
                    str(model_path), tensor_parallel_size=tp, max_model_len=max_model_len,
                    max_num_seqs=cfg.vllm_max_num_seqs, enable_prefix_caching=cfg.vllm_enable_prefix_caching,
                    seed=(seed + rank // tp) % 2**32,  # equal on the ranks of one engine; requests carry their own
                    logprobs_mode="processed_logprobs",  # of the distribution sampled from; the default ignores temperature and top-p
                    disable_log_stats=True, use_tqdm_on_load=False, **options,
                )  # fmt: skip
            except ValueError as error:
                problem = problem_of(cfg, max_model_len, on_gpu, str(error))
                if problem is None:
                    raise
                raise ConfigError([problem]) from error
        return cls(llm, rank=rank, world_size=world_size, tensor_parallel_size=tp, max_model_len=max_model_len,
                   sleep_level=cfg.sleep_level if on_gpu else 0, adapter=AdapterSlot(llm, room.modules) if room else None)  # fmt: skip

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_base(self) -> bool:
        return self._has_base

    @property
    def dtype(self) -> str:
        return str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self._version == NO_VERSION:
            raise WeightSyncError(
                "the rollout engine holds no weights of a version: it slept at sleep_level 2, or a weight push failed. Push them first."
            )
        self._check_lengths(prompts, sampling)
        mine = prompts[self._replica :: self._num_replicas]
        requests = [(prompt.token_ids, self._params(sampling, self._request_seed(seed, prompt, sampling))) for prompt in mine]
        answers = [[_completion(prompt, output, self._version) for output in answer.outputs]
                   for prompt, answer in zip(mine, self._run(requests), strict=True)]  # fmt: skip
        self._check_agreement((prompts, sampling, seed), answers)
        # The ranks of one engine hold the same groups, and judge every so many of them.
        share = slice(self._rank_in_engine, None, self._tensor_parallel_size)
        return [Group(prompt=prompt, completions=tuple(found)) for prompt, found in list(zip(mine, answers, strict=True))[share]]

    def take(self, update: WeightUpdate) -> None:
        self._version = NO_VERSION  # until all of it has arrived
        self._wake("weights")
        if update.kind == "adapter":
            self._take_adapter(update)
        else:
            self._take_weights(update)
        self._version = update.version

    def _take_adapter(self, update: WeightUpdate) -> None:
        if self._adapter is None:
            raise WeightSyncError(
                f"the push of version {update.version} is an adapter, and the rollout engine was started without room for one."
            )
        if not self._has_base:
            raise WeightSyncError(
                f"the adapter of version {update.version} came to a rollout engine without the base weights it belongs to."
            )
        self._adapter.take(update)

    def _take_weights(self, update: WeightUpdate) -> None:
        self._has_base = False
        with vllm_patches.trainer_untouched():
            (missing,) = self._llm.collective_rpc(_load, args=(update.tensors, self._repack))
        if missing:
            names = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
            raise WeightSyncError(f"the push of version {update.version} left {len(missing)} of the engine's weights as they were: {names}")
        if self._adapter is not None:
            self._adapter.drop()  # it belonged to what was there before
        self._forget_prefixes()
        self._has_base = update.kind == "weights"

    def probes(self) -> list[tuple[int, ...]]:
        tokenizer = self._llm.get_tokenizer()
        special = set(tokenizer.all_special_ids)
        vocab_size = min(len(tokenizer), self._llm.llm_engine.model_config.get_vocab_size())
        ordinary = np.array([token for token in range(vocab_size) if token not in special])
        # One position is left for the token that vLLM always generates.
        length = min(PROBE_LENGTH, self._max_model_len - 1)
        return [tuple(row) for row in np.random.default_rng(0).choice(ordinary, (NUM_PROBES, length)).tolist()]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        # Two requests each. Prompt log-probs never read the prefix cache, so alone they could not tell a stale one; sampling does.
        whole = [(ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)) for ids in token_ids]
        last = [
            (ids[:-1], SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=[ids[-1]], detokenize=False)) for ids in token_ids
        ]
        self._wake("weights", "kv_cache")
        answers = self._run(whole + last)
        scores = []
        for ids, fresh, cached in zip(token_ids, answers[: len(whole)], answers[len(whole) :], strict=True):
            logprobs = [position[token].logprob for position, token in zip(fresh.prompt_logprobs[1:-1], ids[1:-1], strict=True)]
            scores.append([*logprobs, cached.outputs[0].logprobs[0][ids[-1]].logprob])
        return scores

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Does nothing on a CPU and at sleep_level 0. At sleep_level 2 the weights are gone afterwards, and `version` says so."""
        self._wake("weights", "kv_cache")
        with CleanUp(self._sleep):  # an engine that failed may fail to sleep too: the first error is the one to hear
            yield

    def _sleep(self) -> None:
        if self._sleep_level:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}
            if self._sleep_level == 2:
                self._version, self._has_base = NO_VERSION, False

    def close(self) -> None:
        if self._llm is not None:
            with vllm_patches.trainer_untouched():
                self._llm.llm_engine.engine_core.shutdown()
                self._llm = None
                gc.collect()

    # What a test switches off to show that the check after a push notices.

    def _repack(self, model: torch.nn.Module) -> None:
        if not torch.cuda.is_available():
            vllm_patches.repack_cpu_weights(model)

    def _forget_prefixes(self) -> None:
        # vLLM keeps the KV cache of the old weights, and would continue it with the new ones.
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM could not reset its prefix cache: some request is still running.")

    def _request_seed(self, seed: int, prompt: Prompt, sampling: SamplingSettings) -> int | None:
        # Never None: without it each rank of an engine draws from its own global generator, and they draw different tokens.
        return prompt_seed(seed, prompt.number, sampling.n)

    # ----

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            self._llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def _run(self, requests: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
        if not requests:
            return []
        with vllm_patches.trainer_untouched():
            return self._llm.generate(
                [{"prompt_token_ids": list(ids)} for ids, _ in requests], [params for _, params in requests],
                lora_request=self._adapter.request if self._adapter is not None else None, use_tqdm=False,
            )  # fmt: skip

    def _params(self, sampling: SamplingSettings, seed: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=sampling.n, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed,
            max_tokens=sampling.max_completion_length, stop=list(sampling.stop), stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0, flat_logprobs=True,  # the sampled token's only, in lists instead of an object a token
        )  # fmt: skip

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: SamplingSettings) -> None:
        longest = max((prompt for prompt in prompts), key=lambda prompt: len(prompt.token_ids), default=None)
        if longest is None:
            return
        length = len(longest.token_ids)
        needed = length + sampling.max_completion_length
        if needed > self._max_model_len:
            message = (
                f"prompt {longest.number} has {length} tokens, and {length} + max_completion_length ({sampling.max_completion_length}) = "
                f"{needed} exceeds vllm_max_model_len ({self._max_model_len}). Use {needed}."
            )
            flags = ["vllm_max_model_len", "max_completion_length"]
            raise ConfigError([Problem(flags=flags, nearest={"vllm_max_model_len": [needed]}, message=message)])

    def _check_agreement(self, asked: tuple[Sequence[Prompt], SamplingSettings, int], answers: Sequence[Sequence[Completion]]) -> None:
        """All ranks asked for the same, and the ranks of one engine drew the same tokens. Log-probs may differ in their last bit."""
        prompts, sampling, seed = asked
        question = _digest(repr((sampling, seed, [(prompt.number, prompt.token_ids) for prompt in prompts])).encode())
        drawn = _digest(*(one.sequence.token_ids.tobytes() for found in answers for one in found))
        everyone = collectives.from_all((question, drawn))
        if len({question for question, _ in everyone}) > 1:
            raise RuntimeError("ranks asked the rollout engine for different prompts, settings or seeds; generate is collective")
        for first in range(0, len(everyone), self._tensor_parallel_size):
            if len({drawn for _, drawn in everyone[first : first + self._tensor_parallel_size]}) > 1:
                raise RuntimeError(
                    f"ranks {first} to {first + self._tensor_parallel_size - 1} share a vLLM engine but drew different tokens"
                )


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _completion(prompt: Prompt, output: Any, version: int) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with finish_reason {output.finish_reason!r}")
    logprobs = _sampled_logprobs(output)
    return answered(prompt.token_ids, output.token_ids, logprobs, text=output.text, ended=output.finish_reason, version=version)


def _sampled_logprobs(output: Any) -> tuple[float, ...]:
    flat = output.logprobs
    logprobs = tuple(flat.logprobs[start] for start in flat.start_indices)  # the sampled token comes first at each position
    if len(logprobs) != len(output.token_ids):
        raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(output.token_ids)} tokens")
    return logprobs


def _load(worker: Any, named: Iterable[tuple[str, torch.Tensor]], repack: Any) -> list[str]:
    """Runs in the engine: one layer-wise reload of everything. Returns the weights that were not among `named`.

    Several reloads with a part each would give garbage: a layer's kernel layout is made when the layer is complete.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    # A layer with room for an adapter is inside another module, and its weights are loaded under their own names all the same.
    expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(named)
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        repack(model)
    return sorted(expected - loaded)
