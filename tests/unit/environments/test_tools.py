"""Tools: schemas, valid and malformed calls, results; and environments of other trainers."""

from __future__ import annotations

import asyncio
import json

import pytest

from megatron_grpo.plugins.environments.foreign_environments import adapted
from megatron_grpo.plugins.environments.protocol import Environment, StepOutput
from megatron_grpo.plugins.environments.tools import InvalidToolError, make_schema, read_hermes, tool_set
from tests.unit.environments.scripted import run_episodes


def product(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: one number
        b: the other
    """
    return a * b


async def slowly(word: str) -> dict:
    """
    Says a word.

    Args:
        word: what to say
    """
    await asyncio.sleep(0)
    if word == "leave":
        raise SystemExit(3)
    return {"said": word}


def format_tool_call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOOLS = tool_set({"product": product, "slowly": slowly})


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (format_tool_call("product", a=47, b=38), ["1786"]),
        (format_tool_call("product", a="47", b=38), ["1786"]),  # pydantic reads what a model writes
        (f"hm {format_tool_call('product', a=1, b=2)} and {format_tool_call('slowly', word='x')}", ["2", '{"said": "x"}']),
        (format_tool_call("product", a=1), ["Error: b: Missing required argument"]),
        (format_tool_call("divide", a=1, b=2), ["Error: no tool is called 'divide'; there are product, slowly"]),
        (format_tool_call("slowly", word="leave"), ["Error: SystemExit: 3"]),
        ("<tool_call>\n{'a': 1}\n</tool_call>", ["Error: the call is not JSON: Expecting property name enclosed in double quotes"]),
        ('<tool_call>\n{"name": "product", "arguments": [1]}\n</tool_call>', ["Error: the arguments are not a JSON object"]),
        ('<tool_call>\n{"name": "product"', ["Error: a <tool_call> without </tool_call>"]),
        (f"{format_tool_call('product', a=2, b=3)}<tool_call>", ["6", "Error: a <tool_call> without </tool_call>"]),
    ],
)
def test_tool_calls_each_get_a_result_message(text, answers):
    [one], _ = run_episodes(TOOLS, lambda key, turn: "done" if turn else text)
    told = [message["content"] for message in one.record.messages if message["role"] == "tool"]
    assert one.finish_reason == "done" and len(told) == len(answers)
    assert all(found.startswith(answer) for found, answer in zip(told, answers, strict=True)), told
    failed = sum(answer.startswith("Error") for answer in answers)
    assert one.record.numbers.metrics == {"tool_calls": len(answers), "tool_errors": failed}


def test_tool_call_tokens_stay_in_context_as_sampled():
    """Trap 9: a template that writes a parsed call anew gives it other white space."""
    text = '<tool_call>\n{"name":   "product",  "arguments": {"a": 4,"b": 5}}\n</tool_call>'
    [one], says = run_episodes(TOOLS, lambda key, turn: "20" if turn else text)
    assert one.sequence.starts == (0,) and text in says.tokenizer.decode(says.asked[1][1])


def test_tool_call_in_thoughts_is_not_executed():
    assert read_hermes(f"<think>I may {format_tool_call('product', a=1, b=2)}</think>It is 2") == []
    assert [one.name for one in read_hermes(f"hm</think>{format_tool_call('product', a=1, b=2)}")] == ["product"]


def test_tool_function_without_type_hints_or_docstring_is_rejected():
    def bare(x):
        return x

    with pytest.raises(InvalidToolError, match="docstring"):
        make_schema(bare)


class GreetingEnvironment(Environment):
    def start(self, prompt):
        return [*prompt, {"role": "user", "content": "hello"}]

    def step(self, turn):
        return StepOutput(messages=[{"role": "user", "content": "and?"}], reward=1.0, done=turn.is_last)


def test_tools_with_environment_handle_calls_and_environment_other_turns():
    both = tool_set({"product": product}, inner=GreetingEnvironment)
    [one], _ = run_episodes(both, lambda key, turn: format_tool_call("product", a=2, b=3) if turn == 0 else "six")
    told = [(message["role"], message["content"]) for message in one.record.messages if message["role"] != "assistant"]
    assert told == [("user", "q"), ("user", "hello"), ("tool", "6"), ("user", "and?"), ("user", "and?")]
    assert one.record.turn_rewards == (None, 1.0, 1.0) and len(both.tools) == 1


class CounterEnvironment:
    """An environment in TRL's form."""

    def reset(self, answer=None, **columns):
        self.count = int(answer or 0)
        return " Count."

    def increment(self, step: int) -> int:
        """
        Counts.

        Args:
            step: how far
        """
        self.count += step
        return self.count

    def get_reward(self):
        return float(self.count)


def test_trl_environment_methods_are_tools_with_own_state():
    kind = adapted(CounterEnvironment)
    assert [tool["function"]["name"] for tool in kind.tools] == ["increment"]
    assert list(kind.tools[0]["function"]["parameters"]["properties"]) == ["step"]
    completions, _ = run_episodes(
        kind, lambda key, turn: format_tool_call("increment", step=key[1] + 1) if turn < 2 else "done", n=2, columns={"answer": "10"}
    )
    assert [one.record.turn_rewards for one in completions] == [(None, None, 12.0), (None, None, 14.0)]
    assert completions[0].record.messages[0]["content"] == "q Count."


class GymEnvironment:
    """An environment in Megatron-SWIFT's form."""

    def __init__(self, env_config):
        self.left = env_config["left"]

    async def reset(self, config):
        return f"left: {self.left}", {}, "be brief"

    async def step(self, action):
        self.left -= 1
        return f"left: {self.left}", 0.5, self.left == 0, {"said": action[-1]["content"]}

    async def close(self):
        pass


def test_megatron_swift_environment_returns_observation_and_reward_per_step():
    [one], _ = run_episodes(adapted(GymEnvironment), "a", columns={"env_config": {"left": 2}})
    assert one.finish_reason == "done" and one.record.turn_rewards == (0.5, 0.5)
    assert [message["content"] for message in one.record.messages] == ["be brief", "left: 2", "a", "left: 1", "a"]


class VerifiersEnvironment:
    """An environment in the form of verifiers."""

    async def setup_state(self, state):
        return {**state, "heard": 0}

    async def is_completed(self, messages, state):
        return state["heard"] == 2

    async def env_response(self, messages, state):
        state["heard"] += 1
        return [{"role": "user", "content": f"{state['heard']} of {state['answer']}"}], state


def test_verifiers_environment_has_one_state_per_episode():
    completions, _ = run_episodes(adapted(VerifiersEnvironment), "a", n=2, columns={"answer": "x"}, max_turns=5)
    for one in completions:
        assert one.finish_reason == "done" and [m["content"] for m in one.record.messages[1:]] == ["a", "1 of x", "a", "2 of x", "a"]


def test_adapted_returns_none_for_other_classes():
    assert adapted(dict) is None and adapted(GreetingEnvironment) is GreetingEnvironment


def test_vllm_tool_parsers_read_calls_and_report_unreadable_ones():
    """Read in a process of its own: this one never loads vLLM."""
    from tests.ranks import run_ranks

    def body(rank, world_size, schemas):
        from megatron_grpo.core.base.errors import ConfigError
        from megatron_grpo.plugins.environments.tools import reader
        from tests.chat_models import chat_tokenizer

        tokenizer = chat_tokenizer()
        read, xml = reader("pythonic", tokenizer, schemas), reader("qwen3_xml", tokenizer, schemas)
        written = (
            "<tool_call>\n<function=product>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
        )
        found = [read(text) for text in ("[product(a=1, b=2)]", "[product(a=1, b=", "product is 2")] + [xml(written), xml("<tool_call> 7")]
        refused = []
        for name in ("llama3_json", "nope"):
            try:
                reader(name, tokenizer, schemas)
            except ConfigError as error:
                refused.append(str(error))
        return [[(one.name, one.arguments, one.error) for one in calls] for calls in found], refused

    [(found, refused)] = run_ranks(body, 1, list(TOOLS.tools), timeout=120)
    call = ("product", {"a": 1, "b": 2}, "")
    assert found[0] == found[3] == [call] and found[2] == []
    assert found[1] == [("", {}, "the call cannot be read")] and found[4][0][2]
    assert "does not support this model's tokenizer" in refused[0] and "Unsupported tool_call_parser" in refused[1]
