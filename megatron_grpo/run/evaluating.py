"""The `megatron-grpo eval` command: evaluate a model, an export, an adapter or a checkpoint of any layout on held-out sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError, problem_with
from megatron_grpo.core.base.files import write_mark
from megatron_grpo.core.parallel import state
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.trainer.weight_sync import WeightSyncManager
from megatron_grpo.run import plug_ins
from megatron_grpo.run.assemble.engines import sampler_of_run
from megatron_grpo.run.assemble.output import start_parallel
from megatron_grpo.run.assemble.policy import build_loaded
from megatron_grpo.run.assemble.run import build_evaluator, build_generator
from megatron_grpo.run.check import tuner_problems, with_adapter
from megatron_grpo.run.checkpoint.manifest import read_manifest
from megatron_grpo.run.checkpoint.output_files import overwrite_obstacle
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.evaluation import list_sets
from megatron_grpo.run.config.rules.layout import engine_problems
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.inputs import TRAINING_PARTS, ValidatedInputs, read_inputs, settings_of_sampler
from megatron_grpo.run.lifecycle import take_output_dir
from megatron_grpo.run.metrics.display import Display
from megatron_grpo.run.metrics.evaluations import EvaluationResult, Evaluations, describe
from megatron_grpo.run.open_checkpoint import make_layout, settings_of_checkpoint
from megatron_grpo.run.rewards.loading import close_rewards
from megatron_grpo.run.rewards.reward_manager import RewardManager

if TYPE_CHECKING:
    from megatron_grpo.core.policy.reference import FrozenPolicy

_RUN_FILES, _EVAL = ("metrics.jsonl", "checkpoints", "plan.json"), "eval"


def run_eval(parsed: ParsedConfig, bitwise_parity: Callable[[], None]) -> int:
    """Evaluate, write the files that docs/evaluation.md lists to `output_dir`, and print a table.

    Returns:
        The exit code.

    Raises:
        ConfigError: With all problems, before a model loads.
    """
    cfg = evaluation_settings(parsed)
    inputs = read_inputs(cfg, TRAINING_PARTS)
    with CleanUp(partial(close_rewards, inputs.rewards)) as clean_up:
        layout, problems = make_layout(cfg, inputs.shape)
        engine_ranks = 1 if cfg.rollout.vllm_mode == "server" else cfg.rollout.vllm_tensor_parallel_size
        problems += engine_problems(inputs.shape, engine_ranks, world_size=layout.world_size)
        if problems := [*problems, *tuner_problems(cfg, inputs.shape)]:
            raise ConfigError(problems)
        parallel = start_parallel(cfg, layout)
        clean_up.add(state.stop)
        take_output_dir(cfg, clean_up)
        display = Display() if parallel.is_rank_zero else None
        if display is not None:
            write_mark(Path(cfg.run.output_dir), _EVAL)
            display.open()
            for note in inputs.notes:
                display.print_line(note)
            clean_up.add(display.stop)
        step, evaluated = evaluate(cfg, inputs, parallel, clean_up, bitwise_parity)
        if display is not None:
            display.close()
            _print_scores(cfg, display, step, evaluated)
    return EXIT_DONE


def evaluation_settings(parsed: ParsedConfig) -> Config:
    """Return the settings of the evaluation; for a checkpoint those of its run, with typed values on top.

    Raises:
        ConfigError: With all problems of the settings.
    """
    cfg, problems = parsed.config, list(parsed.problems)
    if "output_dir" not in cfg.typed:
        problems.append(problem_with("output_dir", "eval needs --output_dir."))
    elif run_files := [name for name in _RUN_FILES if (Path(cfg.run.output_dir) / name).exists()]:
        out = cfg.run.output_dir
        message = f"output_dir ({out}) contains a training run ({', '.join(run_files)}). Use another directory: {out}-eval."
        problems.append(problem_with("output_dir", message))
    elif obstacle := overwrite_obstacle(Path(cfg.run.output_dir), _EVAL, ("evaluations.jsonl", "evaluations")):
        problems.append(problem_with("output_dir", f"output_dir: {obstacle}"))
    if not problems and _is_of_checkpoint(cfg):
        cfg = _without_other_sets(settings_of_checkpoint(cfg, Path(cfg.run.resume)), typed_cfg=cfg)
    elif cfg.tuner.adapters:
        cfg = with_adapter(cfg.with_values({"tuner_type": "lora"})) if Path(cfg.tuner.adapters).is_dir() else cfg
    if not problems and not list_sets(cfg):
        message = "eval requires held-out prompts: --eval_datasets name=path ..., or --eval_dataset path."
        problems.append(problem_with("eval_datasets", message))
    if problems := [*problems, *validate(cfg.with_values({"eval_steps": 0}), parsed.unreadable)]:
        raise ConfigError(problems)
    return cfg.with_values({"output_dir": str(Path(cfg.run.output_dir).absolute())})


def evaluate(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, clean_up: CleanUp, bitwise_parity: Callable[[], None]
) -> tuple[int, list[EvaluationResult]]:
    """Evaluate all held-out sets. Collective.

    Returns:
        (optimizer steps of the weights, result of each set).
    """
    step, model = load_model(cfg, inputs, parallel)
    engine = plug_ins.ENGINES[cfg.rollout.vllm_mode].load()(cfg, inputs, parallel, bitwise_parity=bitwise_parity)
    clean_up.add(engine.close)
    sampled_cfg = settings_of_sampler(cfg, inputs.tokenizer)
    sampler, reward_manager = sampler_of_run(sampled_cfg, inputs, engine), RewardManager(inputs.rewards, cfg.rewards.reward_weights)
    if model is not None:
        is_low_precision = cfg.model.torch_dtype != "float32"
        weight_sync = WeightSyncManager(
            model, engine, verify=cfg.rollout.verify_weight_sync, is_low_precision=is_low_precision, starts_as_checkpoint=False
        )
        weight_sync.sync_weights(step)
        sampler = build_generator(
            sampled_cfg, inputs, sampler, reward_manager, Timers(), sync_again=partial(weight_sync.sync_weights, step)
        )
    return step, build_evaluator(sampled_cfg, inputs, sampler, reward_manager, last_step=0).run()


def load_model(cfg: Config, inputs: ValidatedInputs, parallel: ParallelState) -> tuple[int, FrozenPolicy | None]:
    """Load the model that the sampler must receive. Collective.

    Args:
        inputs: Validated inputs: shape and path of the model.

    Returns:
        (optimizer steps of the weights, the model); the model is None if the sampler reads its files directly.
    """
    is_of_checkpoint = _is_of_checkpoint(cfg)
    if not is_of_checkpoint and not cfg.tuner.adapters and cfg.rollout.vllm_mode == "colocate":
        return 0, None
    checkpoint = Path(cfg.run.resume) if is_of_checkpoint else None
    model = build_loaded(cfg, inputs.shape, parallel, model_path=inputs.model_path, checkpoint=checkpoint)
    step = 0
    if is_of_checkpoint:
        manifest = read_manifest(Path(cfg.run.resume))
        assert not isinstance(manifest, str)  # it has been read before
        step = manifest.step
    return step, model


def _print_scores(cfg: Config, display: Display, step: int, evaluated: Sequence[EvaluationResult]) -> None:
    out = Path(cfg.run.output_dir)
    evaluations = Evaluations(out, replaces=False, writes_completions=bool(cfg.run.log_completions_steps))
    evaluations.start()
    model_text = _evaluated_model(cfg)
    sampling_text, heads, rows = describe([evaluations.add(step, result, model=model_text) for result in evaluated])
    display.table(f"{model_text} ({sampling_text})", heads, rows)
    display.print_line(f"Done: {out}")


def _evaluated_model(cfg: Config) -> str:
    """Return what was evaluated, in words."""
    if _is_of_checkpoint(cfg):
        return cfg.run.resume
    return f"{cfg.model.model} with {cfg.tuner.adapters}" if cfg.tuner.adapters else cfg.model.model


def _is_of_checkpoint(cfg: Config) -> bool:
    return cfg.run.resume not in ("auto", "never")


def _without_other_sets(cfg: Config, *, typed_cfg: Config) -> Config:
    """Drop the held-out sets of the checkpoint's run if any set was typed."""
    no_sets: dict[str, Any] = {"eval_dataset": "", "eval_datasets": {}, "split_dataset_ratio": 0.0}
    typed_names = {name for name in no_sets if name in typed_cfg.typed}
    return cfg.with_values({name: value for name, value in no_sets.items() if name not in typed_names}) if typed_names else cfg
