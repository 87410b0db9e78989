"""Rules about rollout servers, and warnings. No torch, and no connection is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.plugins.servers.addresses import FROM_FILE, Address, list_addresses
from megatron_grpo.run.config.rules import Rule, changed

NAMES = ("vllm_server_host", "vllm_server_base_url")
# Settings with which an engine is started. Servers have their own: the trainer then has no engine.
ENGINE_SETTINGS = (
    *("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_kv_cache_memory_mb", "vllm_max_model_len", "vllm_max_num_seqs"),
    *("vllm_dtype", "vllm_enforce_eager", "vllm_enable_prefix_caching", "sleep_level"),
)


def _find_engine_settings(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for typed engine settings if the engine belongs to a server."""
    engine = [name for name in ENGINE_SETTINGS if name in c.cfg.typed and not (name == "vllm_max_model_len" and c.cfg.turns.has_agent)]
    settings = changed(c, *engine) if c.vllm_mode == "server" else []
    if not settings:
        return None
    names, defaults = ", ".join(f"{s['name']} ({s['value']})" for s in settings), {s["name"]: [s["off"]] for s in settings}
    return {"flags": " ".join(defaults), "said": names, "near": defaults, "them": "it" if len(settings) == 1 else "them"}


def _idle(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for settings that name servers if no server samples."""
    idle_names = [name for name in NAMES if getattr(c, name)] if c.vllm_mode != "server" else []
    return {"flags": " ".join(idle_names), "named": " and ".join(idle_names)} if idle_names else None


def read_addresses(c: SimpleNamespace) -> tuple[list[Address], str]:
    """Return (addresses of the rollout servers, what is wrong with them)."""
    try:
        return list_addresses(c.cfg.rollout), ""
    except ValueError as error:
        return [], str(error)


def _hosts(c: SimpleNamespace) -> list[str]:
    return [host for host in c.vllm_server_host if not host.startswith(FROM_FILE)]


def _plain_http_servers(c: SimpleNamespace) -> dict[str, Any] | None:
    plain = [str(address) for address in read_addresses(c)[0] if not address.is_https]
    return {"plain": ", ".join(plain)} if c.vllm_server_ca is not None and plain else None


def _in_the_clear(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the servers that receive unencrypted traffic."""
    addresses = list_addresses(c.cfg.rollout) if c.vllm_mode == "server" else ()
    clear = [str(address) for address in addresses if not address.is_https and not address.is_here]
    return {"them": ", ".join(clear[:4])} if clear else None


# fmt: off
RULES = (
    Rule("{flags} vllm_mode", _idle,
         "{named} sets addresses of rollout servers, but vllm_mode ({vllm_mode}) samples inside the training ranks. Use vllm_mode server, "
         "or omit it.", {"vllm_mode": ["server"]}),
    Rule("vllm_server_host vllm_mode", lambda c: c.vllm_mode == "server" and not c.vllm_server_host and not c.vllm_server_base_url,
         "vllm_mode server requires rollout servers. Set vllm_server_host (and vllm_server_port), or vllm_server_base_url."),
    (
        Rule("vllm_server_port vllm_server_host", lambda c: c.vllm_mode == "server" and len(_hosts(c)) > 1
             and len(c.vllm_server_port) not in (1, len(_hosts(c))) and {"ports": len(c.vllm_server_port), "hosts": len(_hosts(c))},
             "vllm_server_port has {ports} ports for {hosts} hosts. Set one port for all hosts, or one per host."),
        Rule("vllm_server_base_url "
            "vllm_server_host", lambda c: c.vllm_mode == "server" and (invalid := read_addresses(c)[1]) and {"wrong": invalid},
             "servers: {wrong}."),
        Rule("vllm_server_host", lambda c: c.vllm_mode == "server"
             and (invalid := [url for url in _hosts(c) if "/" in url or url.count(":") == 1]) and {"wrong": ", ".join(invalid)},
             "vllm_server_host ({wrong}) must be a host without a port. Set the port with vllm_server_port."),
    ),
    Rule("vllm_server_ca vllm_server_base_url", lambda c: c.vllm_mode == "server" and _plain_http_servers(c),
         "vllm_server_ca requires https, and {plain} does not use it. Use https://."),
    Rule("{flags}", _find_engine_settings,
         "{said}: no effect with vllm_mode server. Pass {them} to `megatron-grpo serve`, and omit {them} here.",
         lambda c: c.near),
    Rule("vllm_server_ca", lambda c: c.vllm_mode == "server" and c.vllm_server_ca is not None and not Path(c.vllm_server_ca).is_file(),
         "vllm_server_ca ({vllm_server_ca}) is not a file. Expected a file with certificates (PEM)."),
)
WARNINGS = (
    Rule("vllm_server_host", _in_the_clear,
         "Prompts, completions and the token are sent unencrypted to {them}. On a shared network use https (megatron-grpo serve "
         "--ssl_certfile, and vllm_server_ca here). Weights are always sent unencrypted."),
)
# fmt: on
