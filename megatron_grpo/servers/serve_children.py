"""Processes that vLLM starts for a server: none of them outlives the server, however that ends.

vLLM leaves its EngineCore behind, with all its memory and under another name, when the process that started it is killed.
"""

from __future__ import annotations

import os
from multiprocessing import context
from typing import Any

from megatron_grpo.base.cleanup import die_with_parent


class EndsWithParent(context.SpawnProcess):
    """A child, started afresh, that the kernel kills when its parent dies; and so are its own children."""

    def __reduce__(self) -> Any:
        # So the child calls _begin before it imports anything for its work.
        return _begin, (os.getpid(),), self.__dict__


def let_no_child_outlive() -> None:
    """From now on for every process that `multiprocessing` starts here. The thread that starts one must live as long as it does."""
    context.SpawnContext.Process = EndsWithParent


def _begin(parent: int) -> EndsWithParent:
    die_with_parent(parent)
    let_no_child_outlive()
    from megatron_grpo.rollout import vllm_patches

    vllm_patches.quiet()
    return EndsWithParent.__new__(EndsWithParent)
