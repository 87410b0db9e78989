"""The settings of a run: `Config`, the groups of core/settings.py and those that no step reads. No torch.

The groups are the groups of `--help` and may be used as sections of a YAML file; the names are unique over all groups, so a flat file works
as well. `cli` turns these dataclasses into flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_grpo.core.field import between_rollouts, fixed, free, setting
from megatron_grpo.core.settings import StepConfig


# fmt: off
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    dataset: str = setting("",
        "prompts: .jsonl, .json, .parquet, a directory, or a Hub name; NAME#500 takes 500 rows; several data sets are mixed")
    further_datasets: list[str] = setting([], "second and later values of dataset", is_hidden=True)
    interleave_prob: list[float] = setting([], "weights of the data sets, in their order (default: all rows of all data sets)", above=0)
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = setting("first_exhausted",
        "end of a weighted mixture: when the first, or when every data set is exhausted")
    columns: dict[str, str] = setting({}, "columns to rename: name in the data = name here; a.b is a value inside a column")
    split_dataset_ratio: float = setting(0.0, "share of the data set to hold out, as the set eval", at_least=0, below=1)
    dataset_split: str = setting("train", "split of the data set, if it has several")
    max_prompt_length: int | None = setting(None,
        "limit of the prompt length; truncation_strategy handles longer prompts (default: no limit)", unit="tokens", at_least=1)
    truncation_strategy: Literal["raise", "delete", "left"] = setting("raise",
        "handling of prompts that are too long: raise an error, delete them, or cut them on the left")
    system: str | None = setting(None, "system message for chat prompts without one, or a .txt file with it")
    enable_thinking: bool | None = setting(None, "value of enable_thinking for the chat template")
    chat_template_kwargs: dict[str, Any] = setting({}, "arguments for the chat template: name=value, or JSON")
    dataset_shuffle: bool = fixed(True, "shuffle rows in each epoch, with the seed; false: file order")
    dataset_drop_last: bool = fixed(False,
        "end an epoch with its last complete rollout and optimizer step; false: continue into the next epoch")
    streaming: bool = fixed(False, "read and check rows in blocks during the run, instead of all rows before it")
    shuffle_buffer_size: int = fixed(1000, "rows that are read and shuffled together, with streaming", at_least=1)
    load_from_cache_file: bool = free(True, "cache the tokenised data set in the user's cache directory")
    data_root: str | None = free(None, "directory that contains the images (default: directory of the data set)")
    max_pixels: int | None = between_rollouts(None,
        "pixels of an image above which it is scaled down (default: the variable MAX_PIXELS, else the model's own limit)",
        unit="pixels", at_least=1)
    min_pixels: int | None = between_rollouts(None,
        "pixels of an image below which it is scaled up (default: the variable MIN_PIXELS, else the model's own limit)",
        unit="pixels", at_least=1)
    limit_images: int | None = free(None,
        "limit of images per prompt (default: the largest number in the data)", unit="images", at_least=1)

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the options of the chat template besides messages and tools."""
        return {**self.chat_template_kwargs, **({} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking})}


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Turns (environments, tools and agents)"""

    environment: str | None = setting(None,
        "environment of multi-turn episodes: path/to/file.py:Class, or package.module:Class (docs/turns.md)")
    tools: list[str] = setting([],
        "Python functions that the model may call: path/to/file.py:function; can be combined with an environment")
    max_turns: int = setting(8, "limit of model turns per episode", unit="turns", at_least=1)
    turn_history: Literal["template", "sampled"] = setting("template",
        "handling of earlier turns that the chat template rewrites; template: begin a new context; sampled: keep the sampled tokens")
    turn_discount: float = setting(1.0, "discount of turn rewards: turn t counts with this to the power t", at_least=0, at_most=1)
    environment_timeout: float = setting(60.0, "longest wait for an answer of an environment, or for a tool call", unit="seconds", above=0)
    max_environment_concurrency: int = free(64, "concurrent environment calls of a rank", unit="calls", at_least=1)
    max_failed_episodes: float = setting(0.5,
        "share of the episodes of a rollout that fail because of their environment, above which the run ends", at_least=0, at_most=1)
    tool_call_parser: str = setting("hermes", "parser of tool calls in the model's text: hermes (Qwen2.5, Qwen3), or a parser of vLLM")
    agent: str | None = setting(None,
        "agent that sends requests to an endpoint of the policy: path/to/file.py:function (docs/agents.md)")
    agent_command: str | None = setting(None,
        "program that is started as the agent of each episode, for example \"python my_agent.py\" (docs/agents.md)")
    agent_verdict: str | None = setting(None,
        "function that returns the reward of a program's episode: path/to/file.py:function; used by the reward environment")
    agent_columns: list[str] = setting([], "columns of the data set that a program gets besides the prompt")
    agent_env: list[str] = setting([], "environment variables of the run that a program gets, besides PATH and LANG")
    agent_timeout: float = setting(900.0, "time of an agent's episode", unit="seconds", above=0)
    agent_memory_mb: int = free(0, "limit for the address space of a program's process; 0: none", unit="MiB", at_least=0)
    max_agents: int = free(16, "agents of a rank that run at a time", unit="agents", at_least=1)
    agent_host: str = free("127.0.0.1", "address on which the endpoint of agents listens, on each rank that samples (docs/agents.md)")
    agent_port: int = free(0, "its port on the first rank of a machine, then one more per rank; 0: free ones", at_least=0, at_most=65_000)
    agent_ssl_certfile: str | None = free(None, "TLS certificate of the endpoint of agents (PEM)")
    agent_ssl_keyfile: str | None = free(None, "its TLS private key (default: in agent_ssl_certfile)")
    max_agent_contexts: int = setting(16, "limit of contexts of an agent's episode: edits, sub-agents, parallel requests", at_least=1)

    @property
    def has_agent(self) -> bool:
        """Return whether an episode is played by an agent."""
        return self.agent is not None or self.agent_command is not None

    @property
    def plays(self) -> bool:
        """Return whether a completion is an episode."""
        return self.environment is not None or bool(self.tools) or self.has_agent

    @property
    def player(self) -> str:
        """Return the setting that names the agent, environment or tools of the run."""
        return next((name for name in ("agent", "agent_command", "environment") if getattr(self, name) is not None), "tools")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards"""

    reward_funcs: list[str] = setting([], "reward functions: built-in names, path/to/file.py:function, or package.module:function")
    reward_weights: list[float] = setting([], "weights of the reward functions, in their order (default: 1 each)")
    reward_timeout: float = setting(60.0, "time limit of a reward function for one batch", unit="seconds", above=0)
    reward_on_error: Literal["raise", "none"] = setting("raise", "effect of a failing reward function: end the run, or count as None")
    answer_column: str | None = setting(None, "column with the right answer (default: `answer`, else `solution`)")
    accuracy_exact: bool = setting(False, "accuracy: compare the whole completion with the answer, character by character")
    math_timeout: float = setting(5.0, "math: time limit of one comparison, after which an answer counts as wrong", unit="seconds", above=0)
    format_tags: list[str] = setting(["think", "answer"], "format: tags that must enclose a completion, in this order")
    length_target: int = setting(0, "length: target length; 0 rewards short completions", unit="tokens", at_least=0)
    cosine_min_len_value_wrong: float = setting(-0.5, "cosine: reward of a wrong answer of length 0")
    cosine_max_len_value_wrong: float = setting(0.0, "cosine: reward of a wrong answer of length cosine_max_len")
    cosine_min_len_value_correct: float = setting(1.0, "cosine: reward of a right answer of length 0")
    cosine_max_len_value_correct: float = setting(0.5, "cosine: reward of a right answer of length cosine_max_len")
    cosine_max_len: int | None = setting(None,
        "cosine: length at the end of the curve (default: max_completion_length)", unit="tokens", at_least=1)
    repetition_n_grams: int = setting(3, "repetition: length of the n-grams", unit="tokens", at_least=1)
    repetition_max_penalty: float = setting(-1.0, "repetition: reward of a completion that consists of repetition", at_most=0)
    code_timeout: float = setting(10.0, "code: limit of wall-clock and of CPU time of a program", unit="seconds", at_least=0.1)
    code_memory_mb: int = setting(512, "code: memory limit of a program", unit="MiB", at_least=64)
    code_num_workers: int = free(2, "code: programs that a rank runs at a time", unit="processes", at_least=1)
    code_all_or_nothing: bool = setting(False, "code: give 1 if all tests pass and else 0, instead of the share of passed tests")
    code_without_landlock: bool = free(False, "code: run programs also on a kernel without Landlock, where they can read all your files")
    reward_model: str | None = setting(None, "reward_model: sequence classifier, a directory or Hub name (one copy per rank)")
    reward_model_url: str | None = setting(None,
        "reward_model: HTTP endpoint instead of a model: vLLM's /classify or /pooling, or plain JSON")
    reward_model_batch_size: int = free(8, "reward_model: sequences per forward pass, or per request", unit="sequences", at_least=1)
    reward_model_max_length: int = setting(2048, "reward_model: length above which a text is cut on the left", unit="tokens", at_least=1)
    llm_judge_url: str | None = setting(None, "llm_judge: base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1")
    llm_judge_model: str | None = setting(None, "llm_judge: model name at the endpoint")
    llm_judge_prompt: str | None = setting(None, "llm_judge: file with the instruction; {prompt}, {completion} and {answer} are replaced")
    llm_judge_max_score: float = setting(10.0, "llm_judge: score that gives reward 1", above=0)
    llm_judge_max_tokens: int = setting(512, "llm_judge: limit of the length of a verdict", unit="tokens", at_least=1)
    llm_judge_api_key_env: str = free("OPENAI_API_KEY",
        "llm_judge: environment variable with the API key; if it is not set, no key is sent")
    reward_concurrency: int = free(16, "reward_model, llm_judge: concurrent requests of a rank", unit="requests", at_least=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run"""

    output_dir: str = free("output", "directory of all outputs", aliases=["save"])
    max_steps: int | None = setting(None, "length of the run", unit="optimizer steps", aliases=["train_iters"], at_least=1)
    num_train_epochs: float | None = setting(None, "length of the run, instead of max_steps (default: 1)", unit="epochs",
        aliases=["max_epochs"], above=0)
    seed: int = fixed(42, "seed of prompts, sampling and everything else that is random", at_least=0, at_most=2**32 - 1)
    save_steps: int = free(0, "interval of checkpoints; 0: only at the end", unit="optimizer steps", aliases=["save_interval"], at_least=0)
    save_interval_seconds: float = free(0.0, "time since the last checkpoint after which another one is saved; 0: never", unit="seconds",
        at_least=0)
    save_total_limit: int | None = free(2, "checkpoints to keep, including the last good one (docs/checkpoints.md)", unit="checkpoints",
        at_least=1)
    metric_for_best_model: str | None = free(None,
        "metric of the best checkpoint, which is kept: eval, eval/pass@8, reward ... (docs/checkpoints.md)")
    greater_is_better: bool | None = free(None, "whether a larger metric_for_best_model is better (default: unless its name ends in loss)")
    load_best_model_at_end: bool = free(False, "export the best checkpoint to hf/, instead of the last step")
    async_save: bool = free(False, "write checkpoints during training; needs host memory for a copy of what a rank writes")
    record_rows: bool = free(False, "save with each checkpoint the rows of its next step, for compare-losses")
    check_replicas: bool = free(False,
        "compare replicated weights, gradients and optimizer state bit for bit before the optimizer step")
    check_replicas_interval: int = free(50, "interval of checks, which also run before the first step", unit="optimizer steps", at_least=1)
    check_replicas_action: Literal["stop", "warn"] = free("stop", "effect of a difference: end the run, or log a warning")
    debug_dump_steps: int = free(2, "newest steps to keep under debug_dump/, each with what `replay` needs to repeat it; 0: none",
        unit="steps", at_least=0)
    debug_dump_weights_gb: float = free(20.0,
        "size up to which a dump contains the weights; a larger dump names the place of its weights", unit="GB", at_least=0)
    resume: str = free("auto", "auto: resume from the newest checkpoint in output_dir; never: start anew; or a checkpoint directory",
        aliases=["resume_from_checkpoint"])
    mcore_model: str | None = setting(None,
        "checkpoint of another run (checkpoints/iter_*), of any parallel layout, whose weights to start from, at step 0")
    finetune: bool | None = free(None,
        "true: use the checkpoint of resume as mcore_model; false: resume from the checkpoint of mcore_model")
    no_load_optim: bool = free(False, "resume from the checkpoint of resume without its optimizer state")
    no_load_rng: bool = free(False, "resume from the checkpoint of resume without its random generators")
    stop_drain_seconds: float = free(10.0,
        "time that a run waits, when it stops, for completions that are being sampled or scored", unit="seconds", at_least=0)
    stop_after_minutes: float | None = free(None,
        "time since the launch after which the run saves and stops, with exit code 3", unit="minutes",
        aliases=["exit_duration_in_mins"], above=0)
    stop_before_end_seconds: float | None = free(None,
        "Slurm: time before the end of the job at which the run saves and stops; 0: never (default: 300, or a tenth of the time limit)",
        unit="seconds", at_least=0)
    requeue: bool = free(False, "Slurm: requeue the job when it has stopped at its time limit")
    report_to: list[str] = free(["none"],
        "tracking services besides metrics.jsonl: tensorboard, wandb, swanlab, mlflow, trackio, all, none")
    run_name: str | None = free(None, "name of the run at tracking services (default: the folder of output_dir)",
        aliases=["wandb_exp_name", "swanlab_exp_name"])
    project: str | None = free(None, "project at tracking services (default: WANDB_PROJECT and similar variables)",
        aliases=["wandb_project", "swanlab_project"])
    logging_steps: int = free(1, "interval of reports to tracking services, which get means over it; metrics.jsonl has every step",
        unit="optimizer steps", at_least=1)
    log_completions_steps: int = free(1, "interval at which completions/ is written; 0: never", unit="rollouts", at_least=0)
    log_completions_nodes: int = free(64,
        "limit of nodes that write the completions of a rollout; if there are more, they take turns", unit="nodes", at_least=1)
    overwrite_output_dir: bool = free(False, "start anew in an output_dir that contains another run")
    export_hf: bool = free(True, "export the model to hf/ at the end")
    max_shard_size: str = free("5GB", "size limit of an exported weight file, such as 500MB or 2GiB")
    push_to_hub: bool = free(False, "upload the export to the Hugging Face Hub, with the token in HF_TOKEN")
    hub_model_id: str | None = free(None, "repository on the Hub: owner/name, or name (default: the folder of output_dir)")
    hub_private_repo: bool | None = free(None, "make a new repository private (default: setting of its owner)")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation"""

    eval_dataset: str = setting("", "held-out prompts; completions are greedy unless a setting below changes it")
    eval_datasets: dict[str, str] = setting({}, "several held-out sets, by name: name=path or name=Hub name")
    eval_dataset_split: str | None = setting(None, "split of held-out sets with several (default: test, or the only one)")
    eval_columns: dict[str, str] = setting({}, "columns to rename in held-out sets (default: columns)")
    eval_truncation_strategy: Literal["raise", "delete", "left"] | None = setting(None,
        "handling of held-out prompts that are too long (default: truncation_strategy)")
    eval_steps: int = free(0, "interval of evaluations; 0: only before and after training", unit="optimizer steps", at_least=0)
    eval_num_prompts: int | None = setting(None, "limit of prompts of each held-out set (default: all)", unit="prompts", at_least=1)
    num_generations_eval: int | None = setting(None, "completions per held-out prompt (default: 8; 1 if greedy)",
        unit="completions", at_least=1)
    eval_temperature: float | None = setting(None,
        "sampling temperature of evaluations; 0: greedy (default: temperature; 0 for eval_dataset alone)", at_least=0)
    eval_top_p: float | None = setting(None, "nucleus sampling of evaluations (default: top_p; 1 if greedy)", above=0, at_most=1)
    eval_top_k: int | None = setting(None, "top-k sampling of evaluations; 0: off (default: top_k)", unit="tokens", at_least=0)
    eval_min_p: float | None = setting(None, "min_p of evaluations (default: min_p; 0 if greedy)", at_least=0, at_most=1)
    eval_max_completion_length: int | None = setting(None, "limit of the completion length in evaluations (default: max_completion_length)",
        unit="tokens", at_least=1)
    eval_generation_kwargs: dict[str, Any] = setting({},
        "further SamplingParams of vLLM for evaluations, penalties included (default: those of training)")
    eval_reward: str | None = setting(None, "reward function that is the score (default: weighted sum of all)")
    eval_pass_threshold: float | None = setting(None,
        "score from which a completion counts as right, for pass@k (default: 1; for a sum, 1 of its reward math, accuracy, code or "
        "environment, else the weights of its rewards)")
    eval_seed: int = setting(0, "seed of evaluations, the same for each of them", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Plan (what `plan` prints)"""

    plan_rollouts: int = free(2, "rollouts to show in the schedule", unit="rollouts", at_least=1, at_most=1000)
    num_prompts: int | None = free(None, "size of the data set, if it is not on this machine", unit="prompts", at_least=1)
    gpu_memory_gb: float | None = free(None, "memory of one GPU, to compare the estimate with", unit="GB", above=0)
    lengths: str | None = free(None, "file with a prompt length and a completion length per line, or output_dir of a run", unit="tokens")
    json: bool = free(False, "print one JSON object instead of tables and a figure")
    png: str | None = free(None, "file for a figure of the schedule (needs the extra `plot`)")
    dialect: Literal["trl", "skyrl", "skyrl-doc", "swift-megatron", "swift", "ms-swift", "verl", "slime", "cs336"] | None = free(None,
        "system whose names, sizes and defaults are used (docs/configuration.md); swift is swift-megatron")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve (a rollout server)"""

    host: str = free("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of the machine")
    port: int = free(8000, "port to listen on; 0: any free port", at_least=0, at_most=65535)
    vllm_data_parallel_size: int = free(1, "engines of a server, each with vllm_tensor_parallel_size workers", unit="engines",
        aliases=["data_parallel_size"], at_least=1)
    address_file: str | None = free(None, "file that contains http://host:port while the server accepts requests")
    token_file: str | None = free(None,
        "file with the token, readable by its owner alone; created if missing (default: the variable MEGATRON_GRPO_TOKEN)")
    ssl_certfile: str | None = free(None, "TLS certificate of the server (PEM)")
    ssl_keyfile: str | None = free(None, "TLS private key (default: in ssl_certfile)")
    frozen: bool = free(False,
        "keep the model's weights: no run can claim the server or sync weights to it; it scores tokens as a teacher_model_server")
    metrics: bool = free(True, "serve GET /metrics, with vLLM's counters")
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeOrigin:
    """A batch size as it was typed under another system's names.

    Args:
        name: The name to change.
        count: Its value in `unit`; None if it is left open.
        unit: "completions", or the unit of the size itself; "prompts" (times num_generations); or "micro-steps".
        text: Everything that determines the size, in that system's names.
    """

    name: str
    count: int | None
    unit: str = "completions"
    text: str = ""


# The groups in the order of --help.
GROUPS = "model tuner parallel kernels batch data rollout turns rewards grpo optimizer run eval plan serve".split()


@dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """All settings of a run, in groups. Immutable: use `with_values` for other values."""

    data: DataConfig = field(default_factory=DataConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    run: RunConfig = field(default_factory=RunConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    # Source of each value ("default", "run.yaml", "command line", "launcher", "derived from ..."), by setting name.
    sources: Mapping[str, str] = field(default_factory=dict)
    # Name that the user typed for a setting, possibly an alias: error messages use it.
    typed: Mapping[str, str] = field(default_factory=dict)
    # Batch sizes as typed under another system's names.
    origins: Mapping[str, BatchSizeOrigin] = field(default_factory=dict)

    def groups(self) -> dict[str, Any]:
        """Return the groups by section name, in the order of --help."""
        return {name: getattr(self, name) for name in GROUPS}

    def with_values(self, values: Mapping[str, Any], *, sources: Mapping[str, str] | None = None) -> Config:
        """Return a configuration with other values of some settings, whichever group they belong to.

        Raises:
            KeyError: If a name is not a setting.
        """
        remaining, changed = dict(values), {}
        for group, section in self.groups().items():
            section_values = {name: remaining.pop(name) for name in vars(section) if name in remaining}
            if section_values:
                changed[group] = replace(section, **section_values)
        if remaining:
            raise KeyError(f"no setting is called {', '.join(remaining)}")
        return replace(self, **changed, sources={**self.sources, **(sources or {})})
