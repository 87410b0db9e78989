"""Owns turning `--environment` and `--tools` into a class whose objects are episodes, and into what plays them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem, said_by
from megatron_grpo.config.config import Config
from megatron_grpo.data.chat import opening_of
from megatron_grpo.environments.calls import reader
from megatron_grpo.environments.foreign_environments import adapted
from megatron_grpo.environments.play import Play, Rules
from megatron_grpo.environments.protocol import Environment
from megatron_grpo.environments.template import ChatTemplate
from megatron_grpo.environments.tools import UnusableTool, schema_of, tool_set
from megatron_grpo.rewards.loading import user_object
from megatron_grpo.types import Prompt


def load_environment(cfg: Config, tokenizer: Any = None) -> type[Environment] | None:
    """The class of a run's episodes; None where a prompt gets one answer. Runs the user's code.

    tokenizer: for a parser of vLLM; without it calls are read as Hermes'. Raises ConfigError with all that is wrong.
    """
    turns = cfg.turns
    if not turns.plays:
        return None
    problems: list[Problem] = []
    inner, functions = None, dict[str, Callable[..., Any]]()
    if turns.environment is not None:
        try:
            inner = _environment(turns.environment)
        except ConfigError as error:
            problems += error.problems
    for spec in turns.tools:
        try:
            function = user_object(spec, flag="tools")
            functions[function.__name__] = function
        except ConfigError as error:
            problems += error.problems
        except AttributeError:
            problems.append(Problem(flags=("tools",), message=f"tools: {spec} has no name that a model could call; wrap it in a function."))
    if not problems and len(functions) < len(turns.tools):
        problems.append(Problem(flags=("tools",), message=f"tools ({' '.join(turns.tools)}) names two functions of one name."))
    if problems:
        raise ConfigError(problems)
    if not functions:
        return inner
    try:
        schemas = [schema_of(function) for function in functions.values()]
        read = reader(turns.tool_call_parser if tokenizer is not None else "hermes", tokenizer, schemas)
        return tool_set(functions, inner=inner, read=read)
    except UnusableTool as error:
        raise ConfigError([Problem(flags=("tools",), message=f"tools: one of {' '.join(turns.tools)} {error}")]) from error


def _environment(spec: str) -> type[Environment]:
    found = user_object(spec, flag="environment")
    try:
        made = adapted(found) if isinstance(found, type) else None
    except UnusableTool as error:
        raise _fail(f"environment {spec}: one of its methods {error}") from error
    if made is None:
        raise _fail(
            f"environment {spec} is no environment: a class that inherits megatron_grpo.environments.protocol.Environment, or one of TRL's "
            "(reset, methods that are tools), Megatron-SWIFT's (reset, step) or verifiers' (env_response)."
        )
    if made.reply is Environment.reply:
        raise _fail(f"environment {spec} has no `reply`.")
    try:
        json.dumps(list(made.tools))
    except (TypeError, ValueError) as error:
        raise _fail(f"environment {spec}: `tools` is a list of JSON schemas: {said_by(error)}") from error
    return made


def _fail(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("environment",), message=message)])


def end_ids_of(model_path: Path, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> frozenset[int]:
    """The tokens at which vLLM ends a turn: the tokenizer's and the model's own, and those of the settings."""
    found = {*stop_token_ids}
    for name in ("generation_config.json", "config.json"):
        if (model_path / name).is_file():
            own = json.loads((model_path / name).read_text(encoding="utf-8")).get("eos_token_id")
            found |= {own} if isinstance(own, int) else {*(own or ())}
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the episodes of a run are played: its environment, its template, its rules."""

    environment: type[Environment]
    template: ChatTemplate
    rules: Rules
    system: str | None

    @classmethod
    def of(cls, cfg: Config, environment: type[Environment], tokenizer: Any, *, model_path: Path, max_model_len: int) -> Stage:
        turns, rollout = cfg.turns, cfg.rollout
        return cls(
            environment=environment,
            template=template_of(cfg, environment, tokenizer, model_path=model_path),
            rules=Rules(
                max_turns=turns.max_turns,
                max_completion_length=rollout.max_completion_length,
                max_model_len=rollout.vllm_max_model_len or max_model_len,
                timeout=turns.environment_timeout,
                concurrency=turns.max_environment_concurrency,
                history=turns.turn_history,  # type: ignore[arg-type]  # one of its choices
            ),
            system=cfg.data.system,
        )

    def begin(self, prompts: Sequence[Prompt], *, n: int, seed_of: Callable[[int, int, int], int]) -> Play:
        """n: episodes of a prompt. seed_of: see `Play`."""
        return Play(prompts, n=n, make=self.environment, template=self.template, rules=self.rules, seed_of=seed_of, opening_of=self.opening)

    def opening(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """A row's messages, as its tokens were made of them."""
        assert not isinstance(prompt.raw, str)  # refused as the data are read
        return opening_of(prompt.raw, system=self.system)


def template_of(cfg: Config, environment: type[Environment], tokenizer: Any, *, model_path: Path) -> ChatTemplate:
    end_ids = end_ids_of(model_path, tokenizer, cfg.rollout.stop_token_ids)
    return ChatTemplate(tokenizer, tools=environment.tools, options=cfg.data.template_options, end_ids=end_ids)
