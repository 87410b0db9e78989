"""Episodes without an engine: a sampler with scripted turns, and the environment runner that uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_grpo.core.rollout.engine import SampledTurn
from megatron_grpo.core.types import Completion, Prompt
from megatron_grpo.plugins.environments.episode_runner import EpisodeRunner, EpisodeRunnerFactory
from megatron_grpo.plugins.environments.protocol import Environment
from megatron_grpo.plugins.environments.trajectory import ChatTemplate
from tests.chat_models import TEMPLATE, chat_tokenizer

END = 2
QUESTION = [{"role": "user", "content": "q"}]


class ScriptedSampler:
    """A sampler in which turn t of an episode is `text(key, t)` and the end-of-turn token; log-probs are -0.1, -0.2 and so on."""

    def __init__(self, tokenizer: Any, text: Callable[[tuple[int, int], int], str], *, ends: bool = True):
        self.tokenizer, self.text, self.ends = tokenizer, text, ends
        self.turns: dict[tuple[int, int], int] = {}
        self.asked: list[tuple[tuple[int, int], tuple[int, ...], int, int]] = []  # (key, context, seed, most tokens)
        self._open: list[tuple[tuple[int, int], int]] = []

    @property
    def num_running(self) -> int:
        return len(self._open)

    def submit(self, key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        self.asked.append((key, tuple(token_ids), seed, max_tokens))
        self._open.append((key, max_tokens))

    def poll(self) -> list[tuple[tuple[int, int], SampledTurn]]:
        open_, self._open = self._open, []
        return [(key, self._sampled_turn(key, most)) for key, most in open_]

    def _sampled_turn(self, key, most: int) -> SampledTurn:
        turn = self.turns.get(key, 0)
        self.turns[key] = turn + 1
        tokens = [*self.tokenizer(self.text(key, turn), add_special_tokens=False)["input_ids"], *([END] if self.ends else [])]
        is_cut, tokens = len(tokens) > most, tokens[:most]
        return SampledTurn(token_ids=tuple(tokens), logprobs=tuple(-0.1 * (i + 1) for i in range(len(tokens))), is_cut=is_cut, version=4)


def make_prompt(number: int = 0, template: str = TEMPLATE, **columns: Any) -> Prompt:
    ids = chat_tokenizer(template).apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    return Prompt(number=number, row=number, raw=QUESTION, token_ids=tuple(ids), columns=columns)


def make_runner_factory(environment: type[Environment], *, template: str = TEMPLATE, **rules: Any) -> EpisodeRunnerFactory:
    known = dict(max_turns=3, max_completion_length=400, max_model_len=1000, timeout=5.0, concurrency=8)
    tokenizer = chat_tokenizer(template)
    return EpisodeRunnerFactory(
        environment=environment, template=ChatTemplate(tokenizer, tools=environment.tools, end_ids=[END]), system=None, **known | rules,
    )  # fmt: skip


def run_episodes(
    environment: type[Environment],
    text: Callable[[tuple[int, int], int], str] | str,
    *,
    n: int = 1,
    template: str = TEMPLATE,
    columns: dict[str, Any] | None = None,
    ends: bool = True,
    **rules: Any,
) -> tuple[list[Completion], ScriptedSampler]:
    """The completions of one prompt, and who said what."""
    where = make_runner_factory(environment, template=template, **rules)
    says = ScriptedSampler(where.template.tokenizer, (lambda key, turn: text) if isinstance(text, str) else text, ends=ends)
    ids = where.template.encode(where.template.render(QUESTION), where.template.guards())
    asked = Prompt(number=0, row=0, raw=QUESTION, token_ids=tuple(ids), columns=columns or {})
    play = EpisodeRunner(where, [asked], n=n, derive_seed=lambda number, place, turn: 1000 * place + turn)
    while not play.advance(says, 1.0, version=4):
        pass
    [group] = play.groups()
    return list(group.completions), says
