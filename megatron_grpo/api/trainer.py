"""`GRPOTrainer`, `RunResult` and `plan`: a run as a Python program describes it."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.api import launch
from megatron_grpo.api.callbacks import CallbackHandler
from megatron_grpo.api.settings import explicit_settings, write_settings
from megatron_grpo.commands.analysis.run_files import RunFiles
from megatron_grpo.commands.html import table
from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError, RunInterruptedError, config_error, problem_with
from megatron_grpo.run import jobs, python_objects
from megatron_grpo.run.metrics.records import JsonlFile

if TYPE_CHECKING:
    from megatron_grpo.commands.planning.command import Plan
    from megatron_grpo.run.config.parse import ParsedConfig
    from megatron_grpo.run.config.settings import Config

Function = str | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run.

    Args:
        output_dir: Directory of all its files.
        step: Number of optimizer steps done.
        finished: False if the run was asked to stop and saved (time limit, callback, SIGTERM). `train` then continues it.
        history: Metrics of every optimizer step, as in metrics.jsonl.
        evaluations: Scores of every evaluation, as in evaluations.jsonl.
        end: Sentence about the end of the run, such as why it was stopped.
    """

    output_dir: Path
    step: int
    finished: bool
    history: list[dict[str, Any]] = field(repr=False)
    evaluations: list[dict[str, Any]] = field(repr=False)
    end: str = ""

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last optimizer step."""
        return self.history[-1] if self.history else {}

    @property
    def model(self) -> Path:
        """Folder of the exported model, for transformers and vLLM."""
        return self.output_dir / "hf"

    def _repr_html_(self) -> str:
        from megatron_grpo.commands.analysis.run_report import summary

        run = RunFiles(self.output_dir)
        run.steps, run.evaluations = self.history, self.evaluations
        rows = summary(run) if self.history else [("optimizer steps", "0")]
        return table("Run", {**dict(rows), "finished": self.finished, "output_dir": self.output_dir})


class GRPOTrainer:
    """Trainer for GRPO. The first five arguments are TRL's, in TRL's order.

    In a process of torchrun this process is a rank. Otherwise `train` starts `nproc_per_node` ranks as processes, waits for them and
    returns. The ranks get copies of all objects: what a reward function appends to a list of the program is lost. Use callbacks to see in
    the program what happens; they are called in this process (under torchrun on rank 0).

    Args:
        model: Hugging Face checkpoint: a directory or a Hub name.
        reward_funcs: One reward function or several: functions of (prompts, completions, and columns of the data set by name) that return
            one number per completion, as TRL's; or names as for `--reward_funcs`.
        args: Settings: `megatron_grpo.GRPOConfig`, TRL's GRPOConfig, or a mapping of names to values.
        train_dataset: A path or Hub name, a list of dicts, a `datasets.Dataset`, or another sequence of mappings.
        eval_dataset: One held-out set, or several as a dict by name; each as `train_dataset`.
        environment: Environment class, or its name as for `--environment`.
        tools: One function that the model can call or several, or names.
        rollout_func: Function that generates completions, or its name.
        callbacks: Objects with methods of `transformers.TrainerCallback`: on_train_begin, on_step_end, on_log (with `logs`), on_evaluate
            (with `metrics`), on_train_end, each called with (args, state, control). `control.should_training_stop = True` saves and stops
            the run.
        nproc_per_node: Number of ranks that `train` starts. Default: the number of visible GPUs, else the product of the tensor, pipeline
            and context parallel sizes.
        echo: Whether to print what the ranks print.

    Raises:
        ConfigError: If a data set is not a sequence of mappings, a function is neither callable nor a name, a callback has no supported
            method, or `nproc_per_node` is not a number of ranks.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        reward_funcs: Function | Sequence[Function] | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        environment: Any = None,
        tools: Function | Sequence[Function] | None = None,
        rollout_func: Function | None = None,
        callbacks: Sequence[Any] = (),
        nproc_per_node: int | None = None,
        echo: bool = True,
    ):
        if nproc_per_node is not None and (not isinstance(nproc_per_node, int) or nproc_per_node < 1):
            raise config_error("nproc_per_node", f"nproc_per_node must be a whole number of at least 1, not {nproc_per_node!r}.")
        self.args, self.nproc_per_node, self.echo = args, nproc_per_node, echo
        self._callbacks = CallbackHandler(callbacks, args)
        self.objects: dict[str, Any] = {}  # by the names that settings have for them
        self._own: dict[str, Any] = {}  # settings that the other arguments imply
        if model is not None:
            self._own["model"] = os.fspath(model)
        if train_dataset is not None:
            self._own["dataset"] = self._rows(train_dataset, "train_dataset")
        if isinstance(eval_dataset, Mapping):
            self._own["eval_datasets"] = {
                name: self._rows(rows_of_set, f"eval_dataset_{name}") for name, rows_of_set in eval_dataset.items()
            }
        elif eval_dataset is not None:
            self._own["eval_dataset"] = self._rows(eval_dataset, "eval_dataset")
        for name, values, own_name in (("reward_funcs", reward_funcs, "reward"), ("tools", tools, "tool")):
            if values is not None:
                functions = values if isinstance(values, (list, tuple)) else [values]
                self._own[name] = [self._function(function, f"{own_name}_{number}", name) for number, function in enumerate(functions)]
        for name, value in (("environment", environment), ("rollout_func", rollout_func)):
            if value is not None:
                self._own[name] = self._function(value, name, name)

    def train(self) -> RunResult:
        """Train, and return the result. A run in `output_dir` that is not finished is continued.

        Raises:
            ConfigError: If settings or inputs are wrong; nothing was started.
            RewardError: If a reward function failed.
            RunError: If the run failed for a reason outside the program.
            KeyboardInterrupt: After Ctrl-C, once the run is saved.
        """
        launched, number = launcher.read(), self._num_ranks()
        calls = bool(self._callbacks.callbacks) and launched.rank == 0
        if calls or not launched.is_launched:  # problems are found here, before any rank imports anything
            made = self.plan()
            _require_parts(made.checked.config)
            self._callbacks.begin(made.schedule.num_steps or 0)
        output_dir = self.output_dir
        code = self._run("train", self._settings(), number, output_dir)
        if calls:
            self._callbacks.end()
        run = RunFiles(output_dir)
        return RunResult(
            output_dir=output_dir, step=run.step, finished=code == EXIT_DONE, history=run.steps, evaluations=run.evaluations, end=run.end
        )

    def evaluate(self, **settings: Any) -> list[dict[str, Any]]:
        """Evaluate on the held-out sets and return one dict per set: the newest checkpoint of the run, or the model if there is none.

        Args:
            settings: Settings that differ from those of the run. `output_dir` is `<output_dir>-eval` unless it is among them.

        Raises:
            ConfigError: If settings are wrong; what they say by themselves is checked before a rank starts.
        """
        output_dir = self.output_dir
        values = {**self._settings(), "output_dir": f"{output_dir}-eval"}
        values.pop("overwrite_output_dir", None)
        if (newest := _newest_checkpoint(output_dir)) is not None:
            values["resume"] = str(newest)
        values |= settings
        if not launcher.read().is_launched:
            _require_readable(_parse(values, self._num_ranks()))
        records = JsonlFile(Path(values["output_dir"]) / "evaluations.jsonl")
        num_before = len(records.all())
        self._run("eval", values, self._num_ranks(), output_dir)
        return records.all()[num_before:]

    def save_model(self, output_dir: str | Path) -> Path:
        """Copy the exported model to a folder, for transformers and vLLM.

        Args:
            output_dir: Folder to create.

        Raises:
            ConfigError: If the run has exported no model yet.
        """
        exported = self.output_dir / "hf"
        if not exported.is_dir():
            message = f"{exported} does not exist: a run exports its model at its end. Call train until the result is finished, and leave "
            raise config_error("output_dir", message + "export_hf true.")
        shutil.copytree(exported, output_dir, dirs_exist_ok=True)
        return Path(output_dir)

    def plan(self) -> Plan:
        """Check settings and inputs and return the plan: schedule, memory, cost and warnings. Nothing is started.

        Raises:
            ConfigError: With all problems.
        """
        from megatron_grpo.commands.planning.command import plan_run

        python_objects.provide(self.objects)
        return plan_run(self.parsed(self._num_ranks()))

    @property
    def output_dir(self) -> Path:
        """Output directory of the run. All settings are parsed for it."""
        return Path(self.parsed().config.run.output_dir).absolute()

    # ---- settings

    def _settings(self) -> dict[str, Any]:
        """Return the explicit settings of the run. They are read again for each call, so an assignment to `args` counts."""
        return {**explicit_settings(self.args), **self._own}

    def parsed(self, world_size: int | None = None) -> ParsedConfig:
        """Return the parsed settings, with the problems found in them.

        Args:
            world_size: Number of ranks; None if it is not known.
        """
        return _parse(self._settings(), world_size)

    def _num_ranks(self) -> int:
        launched = launcher.read()
        if launched.is_launched:
            return launched.world_size
        parallel = (config := self.parsed().config).parallel
        if self.nproc_per_node or config.sources.get("world_size") != "default":
            return self.nproc_per_node or parallel.world_size or 1
        sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size)
        return jobs.num_gpus() or math.prod(sizes)

    def _rows(self, value: Any, name: str) -> str:
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        if isinstance(value, Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
            message = f"{name} is a {type(value).__name__}: pass a path or Hub name, a list of dicts, or a datasets.Dataset. To stream, "
            raise config_error(name, message + "pass a path or Hub name and streaming=True.")
        if len(value) and not isinstance(value[0], Mapping):
            raise config_error(name, f"{name}: its first row is a {type(value[0]).__name__}. Each row is a dict of columns.")
        return self._name(value, name)

    def _function(self, value: Any, name: str, flag: str) -> str:
        if not callable(value) and not isinstance(value, (str, os.PathLike)):
            raise config_error(flag, f"{flag}: {value!r} is neither callable nor a name. Pass a function, or a name as for --{flag}.")
        return self._name(value, name)

    def _name(self, value: Any, name: str) -> str:
        """Return the text that stands for a value in the settings; an object is kept under that name."""
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        own_name = getattr(value, "__name__", "")
        name = own_name if own_name.isidentifier() and own_name not in self.objects else name
        self.objects[name] = value
        return python_objects.PREFIX + name

    # ---- running

    def _run(self, command: str, settings: Mapping[str, Any], number: int, output_dir: Path) -> int:
        """Run a command in this process if it is a rank, else in `number` ranks, and return its exit code."""
        python_objects.provide(self.objects)  # fingerprints are taken here, where sources of notebooks can be read
        listen = self._callbacks.listen if command == "train" and self._callbacks.callbacks else None
        if launcher.read().is_launched:
            return _run_here(command, settings, {"listener": listen} if listen else {})
        with launch.launch_folder(output_dir) as folder:
            words = write_settings(folder, settings)
            launch.write_launch(folder, command, words, self.objects, listens=listen is not None)
            return launch.RankProcesses(folder, number, listen=listen, echo=self.echo).run()


def _run_here(command: str, settings: Mapping[str, Any], parts: Mapping[str, Any]) -> int:
    from megatron_grpo import cli

    with _command_line(settings) as words:
        try:
            return cli.run(command, words, parts)
        except RunInterruptedError as error:
            from megatron_grpo.core.parallel import state

            state.stop()  # so that a later call can join a job again
            return cli.exit_code(error)


def _parse(settings: Mapping[str, Any], world_size: int | None) -> ParsedConfig:
    from megatron_grpo import cli
    from megatron_grpo.run.config import parse

    with _command_line(settings) as words:
        return parse(words, launcher_world_size=world_size, dialects=cli.load_dialects)


def _require_readable(parsed: ParsedConfig) -> None:
    """Raise ConfigError for problems of explicit settings alone. The others come from the checkpoint, which only the ranks read."""
    from megatron_grpo.run.config.rules.settings import validate

    cfg = parsed.config.with_values({"eval_steps": 0})
    problems = [problem for problem in validate(cfg, parsed.unreadable) if {*problem.flags} <= {*cfg.typed.values()}]
    if problems := [*parsed.problems, *problems]:
        raise ConfigError(problems)


def _require_parts(cfg: Config) -> None:
    """Raise ConfigError for parts of a run that a plan may lack."""
    has_rewards = cfg.rewards.reward_funcs or cfg.grpo.teacher_flag
    parts = {"model": cfg.model.model, "reward_funcs": has_rewards, "train_dataset": cfg.data.dataset}
    if missing := [name for name, value in parts.items() if not value]:
        raise ConfigError([problem_with(name, f"{name} is missing: pass it to GRPOTrainer.") for name in missing])


def _newest_checkpoint(output_dir: Path) -> Path | None:
    from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory

    folder = CheckpointDirectory(output_dir / "checkpoints")
    return next((folder.directory(manifest.step) for manifest in folder.candidates() if not isinstance(manifest, str)), None)


def plan(args: Any = None, **parts: Any) -> Plan:
    """Return the plan of a run: `GRPOTrainer(args=args, **parts).plan()`.

    Args:
        args: Settings of the run.
        parts: Further arguments of `GRPOTrainer`.

    Raises:
        ConfigError: With all problems of settings and inputs.
    """
    return GRPOTrainer(args=args, **parts).plan()


@contextmanager
def _command_line(settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a command line that names a file with these settings."""
    with tempfile.TemporaryDirectory(prefix="megatron_grpo.") as folder:
        yield write_settings(Path(folder), settings)
