"""A look at the chat template before a run, by rendering alone: whether it shows what is answered, and what it does to earlier turns."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.base.errors import ConfigError, Problem, said_by
from megatron_grpo.environments.protocol import Environment, Message
from megatron_grpo.environments.template import ChatTemplate
from megatron_grpo.environments.tools import ToolEnvironment
from megatron_grpo.environments.transcript import History

_QUESTION: Message = {"role": "user", "content": "What is it?"}
_ANSWER = "It is the seventh."
_THOUGHT = "<think>\nIt may be the seventh.\n</think>\n\nI say so."
_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": 7}}\n</tool_call>'


def roles_of(environment: type[Environment]) -> list[str]:
    """Who its answers are from."""
    if environment.role:
        return [environment.role]
    if not issubclass(environment, ToolEnvironment):
        return ["tool"] if environment.tools else ["user"]
    inner = environment.inner
    return ["tool", *(roles_of(inner) if isinstance(inner, type) and issubclass(inner, Environment) else [])]


def look_at(template: ChatTemplate, environment: type[Environment], *, history: History, flag: str) -> list[str]:
    """What a person should know of the template. Raises ConfigError where it refuses or drops what is answered.

    flag: the setting that named the environment.
    """
    notes = []
    for role in dict.fromkeys(roles_of(environment)):
        turns = {"": _CALL if role == "tool" else "I say so.", " that thinks": _THOUGHT}
        if "think" not in str(template.tokenizer.chat_template):
            del turns[" that thinks"]
        rewritten = [kind for kind, said in turns.items() if _rewrites(template, role, said, flag)]
        if rewritten and history == "template":
            which = "a turn" if "" in rewritten else f"a turn{rewritten[0]}"
            notes.append(
                f"The chat template rewrites {which} once a message of role {role} has answered it: an episode of T such turns is T "
                "contexts, and each is computed. --turn_history sampled keeps one, as it was drawn."
            )
    return [*notes, *_ends(template)]


def _rewrites(template: ChatTemplate, role: str, said: str, flag: str) -> bool:
    answer: Message = {"role": role, "content": _ANSWER, **({"name": "look"} if role == "tool" else {})}
    opened = template.render([_QUESTION])
    prefill = template.prefill([_QUESTION], opened)
    said = said.removeprefix(prefill) if prefill else said
    try:
        full = template.render([_QUESTION, {"role": "assistant", "content": prefill + said}, answer])
    except Exception as error:  # a template raises what it likes
        raise _problem(flag, f"the chat template refuses a message of role {role}, of which answers would be: {said_by(error)}") from error
    if _ANSWER not in full:
        raise _problem(
            flag,
            f"the chat template shows nothing of a message of role {role}, so the model would answer without ever having seen one. "
            "A template of the tokenizer that knows this role is needed, or an environment that answers as user.",
        )
    return not full.startswith(opened + said)


def _ends(template: ChatTemplate) -> Iterator[str]:
    """Whether a turn ends, for vLLM, where it ends for the template."""
    said = [_QUESTION, {"role": "assistant", "content": "I say so."}, {"role": "user", "content": _ANSWER}]
    behind = template.render(said).partition("I say so.")[2].lstrip()
    marks = template.encode(behind, template.guards())
    if marks and marks[0] not in template.end_ids:
        mark = marks[0]
        yield (
            f"The chat template ends a turn with {template.decode([mark])!r} (token {mark}), and sampling does not stop there: every turn "
            f"would run on, or be rewritten. --stop_token_ids {mark} stops it."
        )


def _problem(flag: str, message: str) -> ConfigError:
    return ConfigError([Problem(flags=(flag,), message=f"{flag}: {message}")])
