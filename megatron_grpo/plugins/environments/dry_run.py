"""Support of `megatron-grpo dry-run` for environments: plays an environment with scripted turns, without a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunEpisodes:
    """Episodes played with one kind of scripted turn.

    Args:
        summary: Summary in one line.
        faults: Errors of the environment.
    """

    groups: Sequence[Group]
    summary: str
    faults: list[str]

    @classmethod
    def from_groups(cls, groups: Sequence[Group], notes: Sequence[str] = ()) -> DryRunEpisodes:
        """Summarize episodes.

        `summary` reads `8 episodes, 3.0 turns; done 6, error 2; mean environment reward 0.5`. `faults` lists the three most frequent errors
        with their counts.

        Args:
            groups: Groups of episodes; at least one completion has an episode record.
        """
        records = [completion.record for group in groups for completion in group.completions if completion.record is not None]
        finish_reason = Counter(record.numbers.finish_reason for record in records)
        turns = sum(record.numbers.num_turns for record in records) / len(records)
        mean_reward = sum(reward or 0.0 for record in records for reward in record.turn_rewards) / len(records)
        end = ", ".join(f"{end} {count}" for end, count in finish_reason.most_common())
        faults = Counter(record.numbers.fault for record in records if record.numbers.finish_reason in FAULTS)
        return cls(
            groups=groups,
            summary="; ".join([f"{len(records)} episodes, {turns:.1f} turns", end, f"mean environment reward {mean_reward:.4g}", *notes]),
            faults=[f"{count} of {len(records)} episodes: {fault}" for fault, count in faults.most_common(3)],
        )


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
        template = self._template
        tokens = [*template.tokenizer(text, add_special_tokens=False)["input_ids"], min(template.end_ids)]
        if template.tokenizer.eos_token_id is not None:
            tokens[-1] = template.tokenizer.eos_token_id
        return SampledTurn(
            token_ids=tuple(tokens[:max_tokens]), logprobs=(0.0,) * min(max_tokens, len(tokens)), is_cut=len(tokens) > max_tokens, version=0
        )


def play_rows(
    cfg: Config, inputs: ValidatedInputs, prompts: Sequence[Prompt], kinds: Mapping[str, Sequence[str]]
) -> dict[str, DryRunEpisodes]:
    """Play one episode per prompt and kind of scripted turn.

    Args:
        prompts: The prompts; their numbers are their indices.
        kinds: Name of a kind -> text of every turn, one per prompt. Calls of each tool of the environment are added as further kinds.

    Returns:
        Name of a kind -> its episodes.
    """
    environment = inputs.environment
    assert environment is not None
    longest = max(len(prompt.token_ids) for prompt in prompts) + cfg.rollout.max_completion_length
    if issubclass(environment, AgentEnvironment):
        agents = AgentRunnerFactory.from_config(cfg, inputs, max_model_len=longest)
        return _play_agents(agents, prompts, kinds)
    stage = EpisodeRunnerFactory.from_config(cfg, inputs, max_model_len=longest)
    episodes_by_kind = {}
    for kind, texts in {**kinds, **_calls(environment, len(prompts))}.items():
        player = EpisodeRunner(stage, prompts, n=1, derive_seed=lambda *key: 0)
        episodes_by_kind[kind] = DryRunEpisodes.from_groups(_play(player, stage.template, dict(enumerate(texts))))
    return episodes_by_kind


def _play(player: RequestLoop, template: ChatTemplate, texts: Mapping[int, str]) -> Sequence[Group]:
    turns = _Scripted(template, texts)
    while not player.advance(turns, 1.0, version=0):
        pass
    return player.groups()


def _play_agents(stage: AgentRunnerFactory, prompts: Sequence[Prompt], kinds: Mapping[str, Sequence[str]]) -> dict[str, DryRunEpisodes]:
    """Run the agent of the first row alone, once for each kind: an agent may take minutes."""
    episodes_by_kind = {}
    for kind, texts in kinds.items():
        sampling = SamplingSettings(n=1, max_completion_length=stage.limits.max_completion_length)
        notes: list[str] = []
        player = AgentLoop(stage, prompts[:1], sampling, seed=0, notify=notes.append)
        groups = _play(player, stage.template, {prompts[0].number: texts[0]})
        contexts = sum(len(completion.sequence.contexts) for completion in groups[0].completions)
        counted = [f"{words} ({count} times)" if count > 1 else words for words, count in Counter(notes).items()]
        episodes_by_kind[kind] = DryRunEpisodes.from_groups(groups, [f"{contexts} contexts", *counted])
    return episodes_by_kind


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
