"""Routed experts as vLLM returns them, the experts of a group, and invalid routes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_grpo.core.rollout.experts import ExpertLayers, InvalidRoutingError, collect_group_experts, completion_routes
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.core.weights.shape import ModelShape
from tests.unit.weights.tiny import make_model_config

LAYERS = ExpertLayers(layers=(1, 3), num_experts=300, topk=2)
# As vLLM 0.32 returned it: 5 prompt and 3 drawn tokens, the last of which was never run; layers 0 and 2 have no experts; ids above 255 make
# it uint16.
RECORDED = np.zeros((7, 4, 2), dtype=np.uint16)
RECORDED[:, 1] = [[t, 290 + t] for t in range(7)]
RECORDED[:, 3] = [[40 + t, 7] for t in range(7)]


def make_sequence(experts) -> TokenSequence:
    return TokenSequence(token_ids=np.arange(len(experts)), mask=np.ones(len(experts), dtype=bool), experts=experts)


def test_expert_routes_omit_layers_without_experts():
    found = LAYERS.read(RECORDED)
    assert found.dtype == np.int16 and found.shape == (7, 2, 2)
    assert found[3].tolist() == [[3, 293], [43, 7]]


def test_group_experts_share_prompt_routes_and_leave_last_token_free():
    other = RECORDED + (RECORDED > 0).astype(np.uint16)  # the same prompt, otherwise routed: a micro-batch of its own
    parts = [completion_routes(LAYERS.read(one), 5, place) for place, one in enumerate((RECORDED, other, other[:6]))]
    assert [len(part) for part in parts] == [7, 2, 1]
    first, second, third = collect_group_experts(parts, 5)
    assert (first[:7] == LAYERS.read(RECORDED)).all()
    assert (second[:5] == first[:5]).all() and (second[5:7] == LAYERS.read(other)[5:7]).all() and len(second) == 8
    assert len(third) == 7 and (third[5] == LAYERS.read(other)[5]).all()
    for experts in (first, second, third):
        assert experts.dtype == np.int16 and (experts[-1] == -1).all()
        LAYERS.check(make_sequence(experts))


def test_expert_layers_equal_those_of_the_model():
    assert ExpertLayers.from_shape(ModelShape.from_hf(make_model_config("deepseek_v3"))) == ExpertLayers(layers=(1,), num_experts=4, topk=2)
    assert ExpertLayers.from_shape(ModelShape.from_hf(make_model_config("qwen3_moe_mixed"))).layers == (3,)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        ExpertLayers.from_shape(ModelShape.from_hf(make_model_config("llama")))


@pytest.mark.parametrize(("change", "words"), [
    (lambda e: None, "returned no routed experts for 8 tokens"),
    (lambda e: e[:-1], r"routed experts of shape \(7, 2, 2\) for 8 tokens"),
    (lambda e: e[:, :1], r"\(8, 1, 2\) for 8 tokens; expected 2 layers"),
    (lambda e: np.where(e == 293, 300, e), r"token 3 of a sequence to experts \[3, 300\] in layer 1"),
    (lambda e: np.where(e == 7, 44, e), r"token 4 of a sequence to experts \[44, 44\] in layer 3"),
    (lambda e: np.where(e == 2, -1, e), r"token 2 of a sequence to experts \[-1, 292\] in layer 1"),
])  # fmt: skip
def test_expert_routes_that_are_impossible_raise(change, words):
    (good,) = collect_group_experts([LAYERS.read(RECORDED)], 5)
    changed = change(good)
    with pytest.raises(InvalidRoutingError, match=words):
        LAYERS.check(dataclasses.replace(make_sequence(good), experts=changed))


def test_expert_routes_missing_from_engine_raise():
    with pytest.raises(InvalidRoutingError, match="vLLM returned no routed experts"):
        LAYERS.read(None)
    with pytest.raises(InvalidRoutingError, match=r"\(7, 2, 2\), but the last layer with experts is 3"):
        LAYERS.read(RECORDED[:, :2])
