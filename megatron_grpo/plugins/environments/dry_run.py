"""Support of `megatron-grpo dry-run` for environments: plays an environment with scripted turns, without a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import Key
from megatron_grpo.core.types import FAULTS, Group, Prompt
from megatron_grpo.plugins.environments.agent_programs import AgentEnvironment
from megatron_grpo.plugins.environments.agents import AgentLoop, AgentRunnerFactory
from megatron_grpo.plugins.environments.episode_runner import EpisodeRunner, EpisodeRunnerFactory
from megatron_grpo.plugins.environments.players import RequestLoop
from megatron_grpo.plugins.environments.protocol import Environment
from megatron_grpo.plugins.environments.tools import ToolEnvironment
from megatron_grpo.plugins.environments.trajectory import ChatTemplate
from megatron_grpo.run.config.settings import Config

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

MADE_UP: Mapping[str, Any] = {"string": "7", "integer": 7, "number": 0.5, "boolean": True, "array": [], "object": {}}  # JSON type -> value


def summarize_episodes(groups: Sequence[Group], notes: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return (summary of episodes in one line, errors of their environment).

    The summary reads `8 episodes, 3.0 turns; done 6, error 2; mean environment reward 0.5`. The errors are the three most frequent with
    their counts.

    Args:
        groups: Groups of episodes; at least one completion has an episode record.
    """
    records = [completion.record for group in groups for completion in group.completions if completion.record is not None]
    finish_reason = Counter(record.numbers.finish_reason for record in records)
    turns = sum(record.numbers.num_turns for record in records) / len(records)
    mean_reward = sum(reward or 0.0 for record in records for reward in record.turn_rewards) / len(records)
    end = ", ".join(f"{end} {count}" for end, count in finish_reason.most_common())
    faults = Counter(record.numbers.fault for record in records if record.numbers.finish_reason in FAULTS)
    summary = "; ".join([f"{len(records)} episodes, {turns:.1f} turns", end, f"mean environment reward {mean_reward:.4g}", *notes])
    return summary, [f"{count} of {len(records)} episodes: {fault}" for fault, count in faults.most_common(3)]


class _Scripted:
    """`TurnSampler` that returns the same text for every turn of a row."""

    num_running = 0

    def __init__(self, template: ChatTemplate, texts: Mapping[int, str]):
        self._template, self._texts = template, texts
        self._asked: list[tuple[Key, int]] = []

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        self._asked.append((key, max_tokens))

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        requests, self._asked = self._asked, []
        return [(key, self._sampled_turn(self._texts[key[0]], max_tokens)) for key, max_tokens in requests]

    def _sampled_turn(self, text: str, max_tokens: int) -> SampledTurn:
        tokenizer = self._template.tokenizer
        end = min(self._template.end_ids) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        return SampledTurn(
            token_ids=tuple(tokens[:max_tokens]), logprobs=(0.0,) * min(max_tokens, len(tokens)), is_cut=len(tokens) > max_tokens, version=0
        )


def play_rows(
    cfg: Config, inputs: ValidatedInputs, prompts: Sequence[Prompt], kinds: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Sequence[Group], str, list[str]]]:
    """Play one episode per prompt and kind of scripted turn. An agent plays the first prompt alone, because it may take minutes.

    Args:
        kinds: Name of a kind -> text of every turn, one per prompt. Calls of each tool of the environment are added as further kinds.

    Yields:
        (name of a kind, its episodes, their summary, errors of the environment).
    """
    environment = inputs.environment
    assert environment is not None
    longest = max(len(prompt.token_ids) for prompt in prompts) + cfg.rollout.max_completion_length
    notes: list[str] = []
    make_player: Callable[[], RequestLoop]
    is_agent = issubclass(environment, AgentEnvironment)
    if is_agent:
        agents, prompts = AgentRunnerFactory.from_config(cfg, inputs, max_model_len=longest), prompts[:1]
        sampling = SamplingSettings(n=1, max_completion_length=agents.limits.max_completion_length)
        template, make_player = agents.template, partial(AgentLoop, agents, prompts, sampling, seed=0, notify=notes.append)
    else:
        runners = EpisodeRunnerFactory.from_config(cfg, inputs, max_model_len=longest)
        template, make_player = runners.template, partial(EpisodeRunner, runners, prompts, n=1, derive_seed=lambda *key: 0)
    for kind, texts in {**kinds, **_calls(environment, len(prompts))}.items():
        turns, player = _Scripted(template, {prompt.number: text for prompt, text in zip(prompts, texts)}), make_player()
        while not player.advance(turns, 1.0, version=0):
            pass
        groups, counted = player.groups(), [f"{text} ({count} times)" if count > 1 else text for text, count in Counter(notes).items()]
        contexts = sum(len(completion.sequence.contexts) for completion in groups[0].completions)
        yield kind, groups, *summarize_episodes(groups, [f"{contexts} contexts", *counted] if is_agent else ())
        notes.clear()


def _calls(environment: type[Environment], count: int) -> dict[str, list[str]]:
    """Return a call of each tool in Hermes' format, with arguments of the right types."""
    if not issubclass(environment, ToolEnvironment):
        return {}
    texts_by_name = {}
    for tool in environment.tools:
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        arguments = {name: MADE_UP.get(str(schema.get("type")), "7") for name, schema in properties.items()}
        call = json.dumps({"name": function["name"], "arguments": arguments})
        texts_by_name[f"{function['name']}()"] = [f"<tool_call>\n{call}\n</tool_call>"] * count
    return texts_by_name
