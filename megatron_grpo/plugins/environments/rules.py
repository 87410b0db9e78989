"""Rules about episodes of environments, tools and agents, and about the user's rollout function; and warnings. No torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_grpo.plugins.servers.addresses import is_loopback, list_addresses
from megatron_grpo.run.config.rules import Rule, changed
from megatron_grpo.run.config.rules.settings import REWARD

AGENTS = ("agent_verdict", "agent_columns", "agent_env", "agent_memory_mb", "agent_timeout", "max_agents", "max_agent_contexts",
          "agent_host", "agent_port", "agent_ssl_certfile", "agent_ssl_keyfile")  # fmt: skip


def _answered_once(c: SimpleNamespace) -> dict[str, Any] | None:
    names = ("max_turns", "turn_history", "turn_discount", "environment_timeout", "max_environment_concurrency", "max_failed_episodes",
             "tool_call_parser")  # fmt: skip
    settings = [] if c.plays else changed(c, *names)
    listed = ", ".join(f"{c.cfg.typed.get(s['name'], s['name'])} ({s['value']})" for s in settings)
    return {"told": listed, "names": " ".join(s["name"] for s in settings)} if settings else None


def _half_empty(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the number of episodes that the engine of one rank could sample at a time, if fewer agents run."""
    if not c.cfg.turns.has_agent:
        return None
    servers = len(list_addresses(c.cfg.rollout)) if c.vllm_mode == "server" else 0
    players = 1 if servers else max(1, c.layout.world_size // c.vllm_tensor_parallel_size)
    room = min(c.vllm_max_num_seqs * max(1, servers), -(-c.sizes.num_rollout_prompts // players) * c.sizes.num_generations)
    return {"room": room} if c.max_agents < room else None


# fmt: off
EPISODES = (
    Rule("{names}", _answered_once, "{told}: only used with an environment or tools; without them an episode has one turn. Set "
                                    "--environment or --tools, or omit it."),
    Rule("agent agent_command", lambda c: c.agent is not None and c.agent_command is not None,
         "agent ({agent}) and agent_command ({agent_command}) both define the agent of an episode. Use one of them.",
         {"agent": ["none"], "agent_command": ["none"]}),
    Rule("{player} {other}", lambda c: c.cfg.turns.has_agent and [{"other": name} for name in ("environment", "tools") if getattr(c, name)],
         "{player} and {other} cannot be combined: both define who answers the policy's turns. Use one of them."),
    Rule("{name} agent", lambda c: not c.cfg.turns.has_agent and changed(c, *AGENTS),
         "{name} ({value}) requires agent or agent_command. Set one of them, or omit {name}."),
    Rule("{name} agent", lambda c: c.agent is not None and changed(c, *AGENTS[:4]),
         "{name} ({value}) requires agent_command; the function of agent does this itself. Omit {name}."),
    Rule("{name} {player}", lambda c: c.cfg.turns.has_agent
         and changed(c, "turn_discount", "environment_timeout", "max_environment_concurrency"),
         "{name} ({value}) is not supported with {player}. Use {off}.", lambda c: {c.name: [c.off]}),
    Rule("{player} vllm_max_model_len", lambda c: c.cfg.turns.has_agent and c.vllm_max_model_len is None,
         "{player} requires vllm_max_model_len: the length of an agent's prompts is not known before it sends them. Set it to the length "
         "of the longest conversation in tokens, which servers must support too."),
    Rule("agent_ssl_keyfile agent_ssl_certfile", lambda c: c.agent_ssl_keyfile is not None and c.agent_ssl_certfile is None,
         "agent_ssl_keyfile ({agent_ssl_keyfile}) needs a certificate. Set agent_ssl_certfile."),
    Rule("reward_funcs agent_verdict", lambda c: c.agent_command is not None and c.agent_verdict is None and REWARD in c.reward_funcs,
         "reward_funcs environment with agent_command requires agent_verdict, which returns the reward of an episode. Set it, or use "
         "reward functions that read the conversation."),
    Rule("agent_verdict reward_funcs", lambda c: c.agent_command is not None and c.agent_verdict is not None
         and bool(c.reward_funcs) and REWARD not in c.reward_funcs,
         "agent_verdict ({agent_verdict}) returns the reward environment, which reward_funcs does not name. Use --reward_funcs environment "
         "with it, or omit it."),
    Rule("tool_call_parser tools", lambda c: c.plays and c.tool_call_parser != "hermes" and not c.tools
         and not c.cfg.turns.has_agent,
         "tool_call_parser ({tool_call_parser}) parses calls of --tools, which is not set; an environment parses the model's text itself. "
         "Omit it, or set --tools.", {"tool_call_parser": ["hermes"]}),
    Rule("reward_funcs environment", lambda c: c.plays and REWARD in c.reward_funcs and c.environment is None
         and not c.cfg.turns.has_agent,
         "reward_funcs environment uses the rewards that an environment returns per turn, and --tools alone returns none. Use a reward "
         "function that scores the episode."),
    Rule("async_rollout_depth {player}", lambda c: c.plays and c.async_rollout_depth and c.vllm_mode == "colocate",
         "async_rollout_depth {async_rollout_depth} interrupts completions at weight syncs, and episodes of {players} cannot be "
         "interrupted. Use async_rollout_depth 0.", {"async_rollout_depth": [0]}),
    Rule("async_rollout_depth {player}", lambda c: c.plays and c.async_rollout_depth and c.vllm_mode == "server",
         "async_rollout_depth {async_rollout_depth} is not supported with {players}: they would run in the trainer's process "
         "during training and slow it down. Use async_rollout_depth 0.", {"async_rollout_depth": [0]}),
    Rule("router_replay_mode {player}", lambda c: c.plays and c.router_replay_mode == "R3",
         "router_replay_mode R3 is not supported with {players}: the expert choices of an episode come from several requests, "
         "which are not merged. Use R2, or disabled.", {"router_replay_mode": ["R2", "disabled"]}),
    Rule("truncation_strategy {player}", lambda c: c.plays and c.max_prompt_length is not None
         and "left" in (c.truncation_strategy, c.eval_truncation_strategy),
         "truncation_strategy left is not supported with {players}: it removes the beginning of a prompt, which the chat "
         "template renders again when it rewrites earlier turns. Use delete, or raise.", {"truncation_strategy": ["delete", "raise"]}),
)

ROLLOUT_FUNC = (
    Rule("rollout_func_timeout rollout_func", lambda c: c.rollout_func is None and "rollout_func_timeout" in c.cfg.typed
         and changed(c, "rollout_func_timeout"),
         "rollout_func_timeout ({rollout_func_timeout:g}) requires rollout_func. Set it, or omit rollout_func_timeout."),
    Rule("rollout_func {player}", lambda c: c.rollout_func is not None and c.plays,
         "rollout_func and {player} cannot be combined: both define how completions are generated. Use one of them.",
         {"rollout_func": ["none"]}),
    Rule("async_rollout_depth rollout_func", lambda c: c.rollout_func is not None and c.async_rollout_depth and c.vllm_mode == "colocate",
         "async_rollout_depth {async_rollout_depth} interrupts completions at weight syncs, and those of rollout_func cannot be "
         "interrupted. Use async_rollout_depth 0.", {"async_rollout_depth": [0]}),
    Rule("async_rollout_depth rollout_func", lambda c: c.rollout_func is not None and c.async_rollout_depth and c.vllm_mode == "server",
         "async_rollout_depth {async_rollout_depth} is not supported with rollout_func: the function would run in the trainer's process "
         "during training and slow it down. Use async_rollout_depth 0.", {"async_rollout_depth": [0]}),
    Rule("router_replay_mode rollout_func", lambda c: c.rollout_func is not None and c.router_replay_mode == "R3",
         "router_replay_mode R3 is not supported with rollout_func: the requests that sampled the returned tokens are unknown. Use R2, or "
         "disabled.", {"router_replay_mode": ["R2", "disabled"]}),
)

WARNINGS = (
    Rule("agent_host agent_ssl_certfile",
         lambda c: c.cfg.turns.has_agent and c.agent_ssl_certfile is None and not is_loopback(c.agent_host),
         "agent_host ({agent_host}): requests and keys of agents are sent unencrypted. On a shared network set agent_ssl_certfile."),
    Rule("max_agents vllm_max_num_seqs", _half_empty,
         "Note: max_agents ({max_agents}) leaves the engine partly empty: a rank could sample {room} episodes at a time. Raise max_agents "
         "if the machine has room for more agents."),
)
# fmt: on
