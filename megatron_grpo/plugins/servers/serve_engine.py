"""vLLM engine of a rollout server, in separate processes. Independent of HTTP and of ownership. Written for vLLM 0.32."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.base.errors import ConfigError, config_error
from megatron_grpo.core.images import ImageProcessorSpec, decode_image
from megatron_grpo.core.rollout import vllm_patches, vllm_requests
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.rollout.experts import ExpertLayers, completion_routes
from megatron_grpo.core.weights.lora import LoraSync
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.serve_settings import ServeSettings
from megatron_grpo.run.adapters import lora_sync

DEFAULT_IMAGES = 8  # images per prompt if limit_images is not set
WORKER = "megatron_grpo.plugins.servers.vllm_worker.WeightTransferWorker"
# Runs the worker in the engine's process. Given by its path, since vLLM replaces the short name by another executor on a CPU.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
ONE_CALL_EXECUTOR = "megatron_grpo.core.rollout.vllm_executor.PatchedMultiprocExecutor"


class WeightUpdateError(Exception):
    """Error raised if the weights do not arrive, or not all of them. The message is a sentence."""


class ServedEngine:
    """vLLM engine with weight updates over a link.

    Build it in the main thread: the processes that it starts end with the thread that started them.

    Args:
        lora: Adapter capacity; None: no adapters.
        experts: MoE layers, if completions must include the routed experts.
        image_spec: Image processor of a vision-language model; None: text only.
        limit_images: Images per prompt.

    Attributes:
        Dead: Exception that every method raises after the engine's process has died.
        world_size: Number of workers of all engines.
        max_num_seqs: Sequences decoded concurrently, by all engines.
        adapter_rank: Largest supported LoRA rank; 0: no adapters.
    """

    def __init__(
        self,
        llm: Any,
        lora: LoraSync | None,
        experts: ExpertLayers | None,
        image_spec: ImageProcessorSpec | None = None,
        limit_images: int = 0,
    ):
        self.limit_images, self.max_pixels = (limit_images, image_spec.max_pixels) if image_spec else (0, 0)
        self._llm, self._room, self._experts = llm, lora, experts
        self._num_adapters = 0  # adapters received so far
        self._adapter: Any = None  # vLLM's LoRARequest, which every request must carry
        from vllm.v1.engine.exceptions import EngineDeadError

        self.Dead = EngineDeadError
        config = llm.vllm_config
        self._num_engines = config.parallel_config.data_parallel_size
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.world_size = config.parallel_config.world_size * self._num_engines
        self.max_model_len = config.model_config.max_model_len
        self.max_num_seqs = config.scheduler_config.max_num_seqs * self._num_engines
        self.adapter_rank = lora.slot_rank if lora is not None else 0
        self.returns_experts = experts is not None
        self.vocab_size = config.model_config.get_vocab_size()

    @classmethod
    def build(cls, serving: ServeSettings) -> ServedEngine:
        """Load the model and start the engine.

        Raises:
            ConfigError: The machine or the model does not support the settings.
        """
        import torch

        on_gpu = torch.cuda.is_available()
        vllm_patches.prepare_server(on_gpu=on_gpu)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        vllm_patches.patch_start(on_gpu=on_gpu)
        vllm_requests.take_logprobs_as_they_come()
        cfg, rollout = serving.cfg, serving.cfg.rollout
        workers = rollout.vllm_tensor_parallel_size * cfg.serve.vllm_data_parallel_size
        if on_gpu and workers > torch.cuda.device_count():
            tp, dp, gpus = rollout.vllm_tensor_parallel_size, cfg.serve.vllm_data_parallel_size, torch.cuda.device_count()
            product = f"vllm_tensor_parallel_size ({tp}) x vllm_data_parallel_size ({dp}) = {workers} workers"
            flags = "vllm_tensor_parallel_size", "vllm_data_parallel_size"
            raise config_error(flags, f"{product}, but this machine has {gpus} GPUs.")
        lora = _room(serving, on_gpu=on_gpu)
        longest = serving.max_model_len or serving.shape.max_position_embeddings or 0
        # The engine's process logs the full reason of a failure; its first error is translated to a message about the settings.
        with vllm_requests.startup_errors(rollout, longest, on_gpu=on_gpu):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_options(serving, lora, on_gpu=on_gpu)))
        return cls(llm, lora, serving.experts, serving.image_spec, cfg.data.limit_images or DEFAULT_IMAGES)

    # ---- sampling

    async def answer(
        self, request: wire.Request, sampling: wire.Sampling, *, version: int, index: int, image_data: Mapping[str, bytes] | None = None,
        bounds: wire.PixelBounds | None = None,
    ) -> wire.GenerateLine:  # fmt: skip
        """Sample one group.

        Args:
            index: Index of the request in its body; requests are distributed over the engines by it.
            bounds: Bounds on image sizes; required if the request has images.

        Returns:
            The completions, or an error of the request, or the keys of missing images.

        Raises:
            RuntimeError: Tokens were sampled by another version, since weights were synced meanwhile.
        """
        if fault := wire.find_request_problem(request, self.max_model_len):
            return wire.GenerateLine(key=request.key, error=fault)
        if missing := tuple(image.key for image in request.images if image.key not in (image_data or {})):
            return wire.GenerateLine(key=request.key, lacks=missing)
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingSettings(n=request.n, max_completion_length=request.max_tokens, **msgspec.structs.asdict(sampling))
        try:
            params = vllm_requests.sampling_params(
                settings, request.seed, vocab_size=self.vocab_size, output_kind=RequestOutputKind.FINAL_ONLY
            )
            prompt = await self._prompt(request.ids, request.images, image_data or {}, bounds)
            output = await self._ask(prompt, params, index)
            if request.images and (difference := vllm_requests.prompt_difference(output, request.ids)):
                return wire.GenerateLine(key=request.key, error=f"{difference}.")
        except (ValueError, TypeError, VLLMValidationError) as error:  # wrong with this request; any other error is the engine's
            return wire.GenerateLine(key=request.key, error=str(error))
        if settings.stop and request.num_sampled:
            part_request = self._llm.get_tokenizer(), request.ids, request.num_sampled, settings
            output.outputs = [vllm_requests.until_stop(output_item, *part_request) for output_item in output.outputs]
        try:
            draws = [vllm_requests.sampled(output_item, settings, self.vocab_size, may_be_aborted=True) for output_item in output.outputs]
        except ConfigError as error:
            return wire.GenerateLine(key=request.key, error=str(error))
        sampled = tuple(
            _sampled_completion(
                completion, *draw, self._routed_experts(completion, len(request.ids), number), self._text(request, completion, settings)
            )
            for number, (completion, draw) in enumerate(zip(output.outputs, draws, strict=True))
        )
        if any(spans != version for completion in sampled for spans, _, _ in completion.versions):
            raise RuntimeError(f"request {request.key} was not sampled entirely by version {version}")
        return wire.GenerateLine(key=request.key, completions=sampled)

    def _text(self, request: wire.Request, output: Any, sampling: SamplingSettings) -> str:
        if not request.num_sampled or output.finish_reason == "abort":
            return output.text
        begin = len(request.ids) - request.num_sampled
        return vllm_requests.decode_completion(
            self._llm.get_tokenizer(), request.ids[:begin], [*request.ids[begin:], *output.token_ids], sampling,
            is_stopped=output.finish_reason == "stop",
        )  # fmt: skip

    def _routed_experts(self, output: Any, opening: int, index: int) -> np.ndarray | None:
        return completion_routes(self._experts.read(output.routed_experts), opening, index) if self._experts is not None else None

    async def score(self, body: wire.ScoreRequest) -> tuple[tuple[float, ...], ...]:
        """Compute log-probs of each token after the first, at temperature 1; the last is read through the prefix cache.

        Returns:
            One row of natural logs per sequence.

        Raises:
            ValueError: A sequence cannot be scored.
        """
        from vllm.exceptions import VLLMValidationError

        sequences = body.sequences
        all_images = body.images or ((),) * len(sequences)
        image_data = {image.key: image.data for image in body.image_data}

        async def score_one(index: int, ids: Sequence[int], images: Sequence[wire.PlacedImage]) -> tuple[float, ...]:
            # Sequentially and on the same engine: the second request reads the prefix cache that the first one filled.
            prompts = [
                (await self._prompt(part, images, image_data, body.bounds), params) for part, params in vllm_requests.scoring_requests(ids)
            ]
            uncached, cached = [await self._ask(prompt, params, index) for prompt, params in prompts]
            if images and (difference := vllm_requests.prompt_difference(uncached, ids)):
                raise ValueError(difference)
            return tuple(vllm_requests.scores(ids, uncached, cached))

        if len(all_images) != len(sequences) or any(image.key not in image_data for images in all_images for image in images):
            raise ValueError("image positions are required for each sequence, and the images must be sent with them")
        for ids in sequences:
            if not 2 <= len(ids) < self.max_model_len:
                raise ValueError(f"a sequence of {len(ids)} tokens cannot be scored: it must have 2 to {self.max_model_len - 1} tokens")
        try:
            pairs = zip(sequences, all_images, strict=True)
            return tuple(await asyncio.gather(*(score_one(index, ids, images) for index, (ids, images) in enumerate(pairs))))
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    async def prompt_logprobs(self, ids: Sequence[int], index: int) -> list[float]:
        """Compute log-probs of each token after the first, at temperature 1.

        Args:
            index: Index of the sequence in its body, as in `answer`.
        """
        return vllm_requests.sequence_logprobs(ids, await self._ask({"prompt_token_ids": list(ids)}, vllm_requests.scoring_params(), index))

    async def _prompt(
        self, ids: Sequence[int], images: Sequence[wire.PlacedImage], image_data: Mapping[str, bytes], bounds: wire.PixelBounds | None
    ) -> dict[str, Any]:
        """Build vLLM's prompt. Raises ValueError if the images are not supported or cannot be decoded."""
        if not images:
            return {"prompt_token_ids": list(ids)}
        if bounds is None or not self.limit_images:
            raise ValueError("the model does not support images" if bounds else "images were sent without size bounds")
        files = [await asyncio.to_thread(decode_image, image_data[image.key]) for image in images]
        size = {"shortest_edge": bounds.min_pixels, "longest_edge": bounds.max_pixels}
        return vllm_requests.prompt_with(ids, [(image.place, image.tokens) for image in images], files, mm_processor_kwargs={"size": size})

    async def _ask(self, prompt: dict[str, Any], params: Any, index: int) -> Any:
        """Return the final output of a request. vLLM aborts the request if this coroutine is cancelled."""
        # Without a fixed rank vLLM spreads the n completions over its engines, and each engine computes the prompt.
        engine = index % self._num_engines if self._num_engines > 1 else None
        stream: AsyncIterator[Any] = self._llm.generate(
            prompt, params, secrets.token_hex(8), lora_request=self._adapter, data_parallel_rank=engine
        )
        return [output async for output in stream][-1]

    async def abort(self, *, clear_cache: bool = True) -> None:
        """Abort all running requests. Their outputs contain what they have sampled so far.

        Args:
            clear_cache: Whether to clear the prefix cache.
        """
        await self._llm.pause_generation(mode="abort", clear_cache=clear_cache)
        await self._llm.resume_generation()

    # ---- weights

    async def join(self, join: wire.JoinRequest) -> None:
        """Make all workers members of a link.

        Raises:
            WeightUpdateError: A worker could not join.
        """
        await self._all_workers("join_link", msgspec.structs.asdict(join))

    async def update_weights(self, update: wire.WeightUpdateRequest, has_base: bool = False) -> None:
        """Receive all weights on every worker. Earlier adapters are removed.

        Args:
            has_base: Whether this owner has synced all weights before; then the vision tower may be omitted.

        Raises:
            WeightUpdateError: A worker did not receive all weights.
        """
        self._adapter = None
        await self._update(update.version, "receive_weights", update.link, update.moves_tower, has_base)

    async def update_adapter(self, update: wire.AdapterUpdateRequest) -> None:
        """Receive an adapter on every worker, and use it for all following requests.

        Raises:
            WeightUpdateError: A worker did not receive the adapter, or the server does not support adapters.
        """
        from megatron_grpo.core.rollout.vllm_weights import adapter_request

        if self._room is None:
            raise WeightUpdateError(
                "this server does not support adapters; start it with --tuner_type lora and the run's lora_rank and target_modules"
            )
        self._adapter = None
        self._num_adapters += 1
        await self._update(update.version, "receive_adapter", update.link, self._num_adapters, update.config, list(update.modules))
        self._adapter = adapter_request(self._num_adapters, update.version)

    async def _update(self, version: int | None, method: str, *args: Any) -> None:
        # The owner has no running requests during a weight sync; any others are orphans and are aborted. The prefix cache is cleared.
        await self._llm.pause_generation(mode="abort")
        try:
            await self._all_workers(method, *args)
            await self._llm.update_weight_version(str(version))
            if not await self._llm.reset_prefix_cache():
                raise WeightUpdateError("vLLM could not reset its prefix cache: a request is still running")
            if self.limit_images:
                await self._llm.reset_encoder_cache()  # image embeddings of the previous vision tower
        finally:
            await self._llm.resume_generation()

    async def _all_workers(self, method: str, *args: Any) -> None:
        # Calls all engines and collects all answers: AsyncLLM.collective_rpc returns only those of the first engine.
        answers = await self._llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        failures = {sentence for engine in answers for sentence in engine if sentence}
        if failures:
            raise WeightUpdateError("; ".join(sorted(failures)))

    # ---- health and shutdown

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process has failed."""
        return self._llm.errored

    async def check(self) -> None:
        """Raise `Dead` if the engine's process has failed."""
        await self._llm.check_health()

    def close(self) -> None:
        """Shut the engine down within 10 s."""
        self._llm.shutdown(timeout=10)


def _room(serving: ServeSettings, *, on_gpu: bool) -> LoraSync | None:
    """Return the adapter capacity if a run with these settings syncs adapters separately, else None."""
    if serving.cfg.tuner.tuner_type != "lora" or serving.cfg.serve.frozen:
        return None
    from megatron_grpo.core.rollout.vllm_weights import sampler_obstacle

    obstacle = sampler_obstacle(serving.shape.architecture, on_gpu=on_gpu)
    lora = lora_sync(serving.cfg, serving.shape, on_gpu=on_gpu, sampler_obstacle=obstacle)
    return lora if lora is not None and lora.kind == "adapter" else None


def _options(serving: ServeSettings, lora: LoraSync | None, *, on_gpu: bool) -> dict[str, Any]:
    cfg, rollout = serving.cfg, serving.cfg.rollout
    options = vllm_requests.engine_options(
        rollout, dtype=cfg.model.torch_dtype, trust_remote_code=cfg.model.trust_remote_code, image_spec=serving.image_spec,
        max_images=cfg.data.limit_images or DEFAULT_IMAGES, lora=lora, returns_experts=serving.experts is not None, on_gpu=on_gpu,
    )  # fmt: skip
    if on_gpu:
        options["enable_sleep_mode"] = False
    if rollout.vllm_tensor_parallel_size == 1:
        options["distributed_executor_backend"] = ONE_PROCESS
    elif serving.experts is not None and not on_gpu:
        options["distributed_executor_backend"] = ONE_CALL_EXECUTOR
    return options | {
        "model": str(serving.model_path),
        "data_parallel_size": cfg.serve.vllm_data_parallel_size,
        "max_model_len": serving.max_model_len,
        "seed": cfg.run.seed % 2**32,  # requests carry their own
        "disable_log_stats": not cfg.serve.metrics,
        "worker_extension_cls": WORKER,
    }


def _sampled_completion(
    output: Any, logprobs: list[float], sampling_mask: SamplingMask | None, experts: np.ndarray | None, text: str
) -> wire.SampledCompletion:
    return wire.SampledCompletion(
        logprobs=np.array(logprobs, np.float32),
        sampling_mask=sampling_mask,
        tokens=np.array(output.token_ids, np.int32),
        text=text,
        reason=output.finish_reason,
        versions=tuple((int(span.version), span.start, min(span.end, len(output.token_ids))) for span in output.weight_versions or ()),
        experts=experts,
    )
