"""Environment variables that a rank sets before it first uses its GPU."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import start

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize("tp, typed, found", [(1, None, None), (2, None, "1"), (2, "8", "8")])
def test_cuda_device_max_connections_is_1_for_tensor_parallel_unless_set(monkeypatch, tp, typed, found):
    """Megatron-Core relies on it to overlap a layer's communication with its product, and warns without it."""

    class FirstUseError(Exception):
        pass

    def first_use():
        raise FirstUseError

    monkeypatch.setenv(NAME, typed) if typed else monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", first_use)
    with pytest.raises(FirstUseError):
        start(Layout(world_size=tp, tp=tp))
    assert os.environ.get(NAME) == found
    monkeypatch.delenv(NAME, raising=False)
