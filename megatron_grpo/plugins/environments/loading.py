"""Loading of `--environment`, `--tools` and `--rollout_func`, and their check against the chat template before a run.

The module does not import torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, one_line, problem_with
from megatron_grpo.plugins.environments.agent_programs import AgentEnvironment, load_agent
from megatron_grpo.plugins.environments.foreign_environments import adapted
from megatron_grpo.plugins.environments.protocol import Environment, Message
from megatron_grpo.plugins.environments.tools import InvalidToolError, ToolEnvironment, make_schema, reader, tool_set
from megatron_grpo.plugins.environments.trajectory import ChatTemplate, History
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import read_end_ids
from megatron_grpo.run.rewards.loading import user_object

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

_QUESTION: Message = {"role": "user", "content": "What is it?"}
_ANSWER = "It is the seventh."
_THOUGHT = "<think>\nIt may be the seventh.\n</think>\n\nI say so."
_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": 7}}\n</tool_call>'


def read_environment(cfg: Config, inputs: ValidatedInputs) -> None:
    """Load the class of the run's episodes."""
    inputs.environment = load_environment(cfg, inputs.tokenizer)


def load_environment(cfg: Config, tokenizer: Any = None) -> type[Environment] | None:
    """Load the environment class of a run, including its tools. Imports user code.

    Args:
        tokenizer: Tokenizer of the model, for a tool-call parser of vLLM. Without it calls are parsed in Hermes' format.

    Returns:
        The class, or None for single-turn rollouts.

    Raises:
        ConfigError: Lists all problems with the environment and the tools.
    """
    turns = cfg.turns
    if not turns.plays:
        return None
    if turns.has_agent:
        return load_agent(cfg)
    problems: list[Problem] = []
    inner, functions = None, dict[str, Callable[..., Any]]()
    try:
        inner = _environment(turns.environment) if turns.environment is not None else None
    except ConfigError as error:
        problems += error.problems
    for spec in turns.tools:
        try:
            function = user_object(spec, flag="tools")
            functions[function.__name__] = function
        except ConfigError as error:
            problems += error.problems
        except AttributeError:
            problems.append(problem_with("tools", f"tools: {spec} has no name by which a model could call it; wrap it in a function."))
    if not problems and len(functions) < len(turns.tools):
        problems.append(problem_with("tools", f"tools ({' '.join(turns.tools)}) names two functions with the same name."))
    if problems:
        raise ConfigError(problems)
    if not functions:
        return inner
    try:
        schemas = [make_schema(function) for function in functions.values()]
        read_calls = reader(turns.tool_call_parser if tokenizer is not None else "hermes", tokenizer, schemas)
        return tool_set(functions, inner=inner, read_calls=read_calls)
    except InvalidToolError as error:
        raise config_error("tools", f"tools: one of {' '.join(turns.tools)} {error}") from error


def _environment(spec: str) -> type[Environment]:
    user_class = user_object(spec, flag="environment")
    try:
        environment_class = adapted(user_class) if isinstance(user_class, type) else None
    except InvalidToolError as error:
        raise config_error("environment", f"environment {spec}: one of its methods {error}") from error
    if environment_class is None:
        raise config_error(
            "environment",
            f"environment {spec} is not an environment. Use a class that inherits megatron_grpo.Environment, or one for TRL "
            "(reset, methods that are tools), Megatron-SWIFT (reset, step) or verifiers (env_response).",
        )
    if environment_class.step is Environment.step:
        raise config_error("environment", f"environment {spec} has no `step`.")
    try:
        json.dumps(list(environment_class.tools))
    except (TypeError, ValueError) as error:
        raise config_error("environment", f"environment {spec}: `tools` must be a list of JSON schemas: {one_line(error)}") from error
    return environment_class


def read_rollout_func(cfg: Config, inputs: ValidatedInputs) -> None:
    """Load the function that `rollout_func` names."""
    inputs.rollout_func = load_rollout_func(cfg)


def load_rollout_func(cfg: Config) -> Callable[..., Any] | None:
    """Load the rollout function of a run. Imports user code.

    Returns:
        The function, or None if `--rollout_func` is not set.

    Raises:
        ConfigError: It is not a plain function, or does not accept the arguments (prompts, sampler).
    """
    spec = cfg.rollout.rollout_func
    if spec is None:
        return None
    function = user_object(spec, flag="rollout_func")
    fault = None
    if inspect.isclass(function) or not callable(function):
        fault = f"{spec} is not a function"
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        fault = f"{spec} is a coroutine or a generator. Use a function that returns completions; it may call the sampler from threads"
    else:
        try:
            inspect.signature(function).bind((), None)
        except (TypeError, ValueError) as error:
            fault = f"{spec} must accept the call {spec.rpartition(':')[2]}(prompts, sampler) ({error})"
    if fault:
        raise config_error("rollout_func", f"rollout_func: {fault}.")
    return function


# ---- the chat template


def read_template(cfg: Config, inputs: ValidatedInputs) -> None:
    """Check how the chat template renders the turns of episodes.

    Args:
        inputs: Inputs read so far; the notes are stored in it.

    Raises:
        ConfigError: If there is no template, or if it drops turns.
    """
    assert inputs.environment is not None
    flag = cfg.turns.player
    if not getattr(inputs.tokenizer, "chat_template", None):
        message = f"{flag}: the model's tokenizer has no chat template (a base model?), which turns require. Use a chat model."
        raise config_error((flag, "model"), message)
    inputs.notes = [*inputs.notes, *find_template_notes(cfg, inputs.environment, inputs.tokenizer, inputs.model_path)]


def find_template_notes(cfg: Config, environment: type[Environment], tokenizer: Any, model_path: Path) -> list[str]:
    """Return what `check_template` finds for the settings of a run."""
    template = make_template(cfg, environment, tokenizer, model_path=model_path)
    return check_template(template, environment, history=cfg.turns.turn_history, flag=cfg.turns.player)


def make_template(cfg: Config, environment: type[Environment], tokenizer: Any, *, model_path: Path) -> ChatTemplate:
    """Return the chat template of a run with the tools of its environment."""
    end_ids = read_end_ids(model_path, tokenizer, cfg.rollout.stop_token_ids)
    return ChatTemplate(tokenizer, tools=environment.tools, options=cfg.data.template_options, end_ids=end_ids)


def list_roles(environment: type[Environment]) -> list[str]:
    """Return the roles of the messages that an environment may return."""
    if environment.role:
        return [environment.role]
    if issubclass(environment, AgentEnvironment):
        return ["user", "tool"]
    if not issubclass(environment, ToolEnvironment):
        return ["tool"] if environment.tools else ["user"]
    inner = environment.inner
    return ["tool", *(list_roles(inner) if isinstance(inner, type) and issubclass(inner, Environment) else [])]


def check_template(template: ChatTemplate, environment: type[Environment], *, history: History, flag: str) -> list[str]:
    """Check that a chat template renders the messages of an environment.

    Args:
        history: The setting `turn_history`.

    Returns:
        Notes for the user: whether earlier turns are rewritten, and whether sampling stops at the end of a turn.

    Raises:
        ConfigError: The template rejects or drops messages of the environment's role.
    """
    notes = []
    for role in dict.fromkeys(list_roles(environment)):
        turns = {"": _CALL if role == "tool" else "I say so.", " that thinks": _THOUGHT}
        if "think" not in str(template.tokenizer.chat_template):
            del turns[" that thinks"]
        rewritten = [kind for kind, text in turns.items() if _rewrites(template, role, text, flag)]
        if rewritten and history == "template":
            turn_text = "a turn" if "" in rewritten else f"a turn{rewritten[0]}"
            notes.append(
                f"The chat template rewrites {turn_text} when a message of role {role} follows it: an episode of T such turns has T "
                "contexts, "
                f"and each is computed. --turn_history sampled keeps one context, as it was sampled."
            )
    return [*notes, *_ends(template)]


def _rewrites(template: ChatTemplate, role: str, text: str, flag: str) -> bool:
    answer: Message = {"role": role, "content": _ANSWER, **({"name": "look"} if role == "tool" else {})}
    opening = template.render([_QUESTION])
    prefill = template.prefill([_QUESTION])
    text = text.removeprefix(prefill) if prefill else text
    try:
        full = template.render([_QUESTION, {"role": "assistant", "content": prefill + text}, answer])
    except Exception as error:  # a template may raise anything
        rejected = f"{flag}: the chat template rejects messages of role {role}, which the environment returns: {one_line(error)}"
        raise config_error(flag, rejected) from error
    if _ANSWER not in full:
        raise config_error(
            flag,
            f"{flag}: the chat template drops messages of role {role}, so the model would not receive them. Use a tokenizer whose "
            "template supports this role, or an environment that answers as user.",
        )
    return not full.startswith(opening + text)


def _ends(template: ChatTemplate) -> Iterator[str]:
    """Yield a note if sampling does not stop at the token with which the template ends a turn."""
    messages = [_QUESTION, {"role": "assistant", "content": "I say so."}, {"role": "user", "content": _ANSWER}]
    ending = template.render(messages).partition("I say so.")[2].lstrip()
    marks = template.encode(ending, template.guards())
    if marks and marks[0] not in template.end_ids:
        mark = marks[0]
        yield (
            f"The chat template ends a turn with {template.decode([mark])!r} (token {mark}), but sampling does not stop at it: every turn "
            f"would continue, or be rewritten. Use --stop_token_ids {mark}."
        )
