"""Structured-output bounds that none of vLLM's parsers accepts are rejected before a model loads."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.rollout.sampling_mask import training_structured_outputs
from megatron_grpo.run.config.parse import parse
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.sampling_mask import parser_error, structured_outputs_problems
from megatron_grpo.run.config.settings import Config


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ({"regex": "[0-9]{1,3}"}, None),
        ({"regex": r"\p{L}+"}, None),  # by the second reader alone
        ({"regex": "(a"}, "Regex parsing error at position 3: The parenthesis is not closed"),
        ({"regex": r"(a)\1"}, "Backreference is not supported yet"),
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, None),
        ({"json": '{"type": "boolean"}'}, None),
        ({"json": "{"}, ""),
        ({"json": {"type": "objec"}}, 'Unsupported type "objec"'),
        ({"grammar": 'root ::= "a" | "b"'}, None),
        ({"grammar": 'start: "a" | "b"'}, None),
        ({"grammar": 'root ::= "a" | b'}, 'Rule "b" is not defined'),
        ({"structural_tag": '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}'}, None),
        ({"structural_tag": '{"structures": [{"begin": "<a>"}]}'}, "must have a format field"),
        ({"choice": ["a", "b"]}, None),
        ({"json_object": True}, None),
    ],
)
def test_structured_output_bounds_are_accepted_as_by_vllm(bound, why):
    said = parser_error(bound)
    assert said is None if why is None else said is not None and why in said and "/" not in said, said


def test_structured_output_problems_name_training_and_evaluation_flags():
    values = {"vllm_structured_outputs_regex": "(a", "eval_generation_kwargs": {"structured_outputs": {"json": {"type": "objec"}}}}
    first, second = structured_outputs_problems(Config().with_values(values))
    assert first.message.startswith(
        "vllm_structured_outputs_regex ((a) cannot be used for sampling: Regex parsing error"
    ) and first.flags == ("vllm_structured_outputs_regex",)
    assert second.message == (
        "eval_generation_kwargs: structured_outputs json ({'type': 'objec'}) cannot be used for sampling: Unsupported type \"objec\"."
    )
    assert structured_outputs_problems(Config()) == []


def test_structured_outputs_with_teacher_are_rejected():
    values = {"teacher_model_server": ["http://t:1"], "vllm_structured_outputs_regex": "a", "top_k": 5}
    said = [problem.message for problem in validation.problems(Config().with_values(values))]
    assert sum("with vllm_structured_outputs_regex tokens are sampled from those that a grammar allows." in one for one in said) == 1
    for words in (
        "--vllm_guided_decoding_regex a",
        "--dialect swift --structured_outputs_regex a",
        "--dialect trl --vllm_guided_decoding_regex a",
    ):
        cfg = parse([*words.split(), "--top_k", "5"], dialects=lambda: DIALECTS).config
        assert cfg.rollout.vllm_structured_outputs_regex == "a" and training_structured_outputs(cfg.rollout) == {"regex": "a"}
