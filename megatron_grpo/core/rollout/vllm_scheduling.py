"""Less work for vLLM's engine on a CPU: one prefill for the completions of a prompt, and no allocation where a token has room.

vLLM shares whole blocks of the KV cache between requests; a block has 32 tokens on a CPU. So all requests of a group compute the last block
of their prompt, and a shorter prompt is computed for every completion. With these patches the first request of a group computes it. The
others compute the last token alone, because they need its logits: in that step they attend to the block of the first, and after it they
go on in a copy of that block. Written for vLLM 0.32, whose scheduler makes such copies for hybrid models.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

PROMPT = "prompt-"  # `name_PROMPT3` is the name of a request for a completion of prompt 3


def patch_scheduling(llm: Any) -> None:
    """Patch an engine that runs on a CPU in this process, with vLLM's older model runner (V1).

    Does nothing to an engine with another kind of KV cache, with chunked prefill, or with Model Runner V2, which a CPU with Triton has.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if llm.llm_engine.vllm_config.use_v2_model_runner:
        return
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    config = llm.llm_engine.vllm_config
    if [type(spec) for spec in specs] == [FullAttentionSpec] and [len(groups) for groups in runner.attn_groups] == [1]:
        if not config.scheduler_config.enable_chunked_prefill and config.speculative_config is None:
            _Patches(core.scheduler.kv_cache_manager, runner).apply()


class _Patches:
    """Patched methods of a KV-cache manager and of a model runner."""

    def __init__(self, manager: Any, runner: Any):
        (blocks,) = manager.coordinator.single_type_managers
        self._manager, self._runner = manager, runner
        self._request_blocks, self._block_size = blocks.req_to_blocks, blocks.block_size
        self._first = WeakValueDictionary[str, Any]()  # the request that computes the prompt, by the ID of its group
        self._copies: list[Any] = []  # blocks to copy after the step, (source, copy)
        self._find, self._allocate = manager.get_computed_blocks, manager.allocate_slots
        self._execute, self._describe = runner.execute_model, runner._build_attention_metadata

    def apply(self) -> None:
        self._manager.get_computed_blocks, self._manager.allocate_slots = self.get_computed_blocks, self.allocate_slots
        self._runner.execute_model, self._runner._build_attention_metadata = self.execute_model, self.build_attention_metadata

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """Return the computed blocks of a new request, their tokens and a boundary, with its prompt's last block if its group has it."""
        blocks, num_computed, boundary = self._find(request)
        group, last = request.request_id.partition("_")[2], request.num_prompt_tokens - 1
        if group.startswith(PROMPT):  # one request a completion: vLLM has added characters that differ between them
            group = group.rpartition("-")[0]
        # A request with images needs the encoder's output; one with tokens of its own was preempted.
        if not group or request.mm_features or request.num_tokens > last + 1:
            return blocks, num_computed, boundary
        first, remainder = self._first.setdefault(group, request), last % self._block_size
        shared = self._request_blocks.get(first.request_id)
        if not shared:  # not computed yet, or freed
            self._first[group] = request
        elif 0 < remainder == last - num_computed and self._manager.prefix_cache_lookup_enabled(request) and _same_prompt(first, request):
            tail = shared[last // self._block_size]
            return self._manager.create_kv_cache_blocks(([*blocks.blocks[0], tail],)), last, boundary
        return blocks, num_computed, boundary

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Return the new blocks of a request: none if its next token has room and fills no block, which would have to be cached."""
        blocks, num_tokens = self._request_blocks.get(request.request_id), request.num_computed_tokens + 1
        if num_new_tokens == 1 and blocks and num_tokens % self._block_size and num_tokens < len(blocks) * self._block_size:
            return self._manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, *args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a step, and copy blocks after it rather than before it, because the step may compute them."""
        self._copies, scheduler_output.kv_cache_block_copies = scheduler_output.kv_cache_block_copies or [], None
        result = self._execute(scheduler_output, *args, **kwargs)
        if self._copies:  # vLLM's own function copies byte by byte. A few blocks at a time: new memory costs more than the copies
            for source, copy in torch.tensor(self._copies).T.split(16, dim=1):
                for cache in self._runner.kv_caches:
                    blocks = cache.unflatten(0, (self._runner.kv_cache_config.num_blocks, -1))
                    blocks.index_copy_(0, copy, blocks.index_select(0, source))
        return result

    def build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Build the attention metadata of a step. Blocks that are still to be copied are read at their source."""
        metadata, *extras = self._describe(*args, **kwargs)
        if self._copies:
            shared = next(iter(metadata.values()))  # all layers have the same object
            source, copy = torch.tensor(self._copies, dtype=shared.block_table.dtype).unbind(dim=1)
            block_index = torch.arange(self._runner.kv_cache_config.num_blocks, dtype=source.dtype)
            block_index[copy.long()] = source
            shared.block_table = block_index[shared.block_table.long()]
        return metadata, *extras


def _same_prompt(first: Any, second: Any) -> bool:
    facts = ((x.prompt_token_ids, x.lora_request, x.cache_salt) for x in (first, second))
    return next(facts) == next(facts)
