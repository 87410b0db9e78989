"""Read and validate what settings name (model, data, rewards and others) before any model loads.

All problems are reported together. `PARTS` is the one list of steps, for `train`, for `eval` and `plan`, which leave some out, and for
`dry-run`. Nothing here imports torch before it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, problem_with
from megatron_grpo.core.weights.safetensors_files import stored_names
from megatron_grpo.core.weights.shape import ModelShape, read_config
from megatron_grpo.run import plug_ins
from megatron_grpo.run.config import remote_code
from megatron_grpo.run.config.evaluation import choose_data_config, find_set_flag, list_sets, longest_completion
from megatron_grpo.run.config.rules.layout import length_problems
from megatron_grpo.run.config.sampling_mask import structured_outputs_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import (  # fmt: skip
    SpecialTokens,
    find_clock,
    fingerprint_vocabulary,
    load_tokenizer,
    read_end_ids,
    unread_names,
)
from megatron_grpo.run.models import as_teacher_problem, find_model, read_image_spec
from megatron_grpo.run.rewards.loading import check_columns, close_rewards, load_rewards
from megatron_grpo.run.rewards.protocol import RewardFunction

if TYPE_CHECKING:
    from megatron_grpo.core.images import ImageProcessorSpec
    from megatron_grpo.run.checkpoint.resume import ResumePlan
    from megatron_grpo.run.data.prompts import PromptDataset, PromptStream

Read = TypeVar("Read")
ADAPTERS = ("adapters", "ref_adapters")  # settings that name a directory in PEFT's format
TRAINING_PARTS = ("dataset", "report_to", "servers", "teacher", "ref_model", "teacher_model")  # parts that an evaluation leaves out
_UNREAD: Any = None
_EPISODE_COLUMNS = ("messages", "turn_rewards", "num_turns", "finish_reason", "ended")  # that reward functions receive from an episode


@dataclass(slots=True, kw_only=True)
class ValidatedInputs:
    """Model, data, rewards and plug-ins that the settings name, as far as they were read.

    A part that was left out or could not be read is None. For a training run everything is present.

    Args:
        left_out: Names of parts that were skipped on request.
        model_path: The model's directory.
        shape: The model's shape.
        tokenizer: The model's tokenizer. Without one, only `rows` are read, not `prompts`.
        image_spec: Image processor of a vision-language model.
        is_blind: Whether the model is known to take no images.
        environment: Class whose instances are the episodes (`plugins.environments.protocol.Environment`), if completions are episodes.
        rollout_func: The user's function that generates completions.
        prompts: Tokenized prompts of the training set.
        held_out: Prompts of each held-out set, by name.
        sets: (setting that names the set, rows) of every set that was read.
        rows: Rows of the training set.
        rewards: Reward functions, in the order of `reward_funcs`.
        notes: Messages that the user should see.
        ref_model_path: Checkpoint of the reference, if it differs from the initial model.
        teacher_path: Checkpoint of a teacher that the training ranks hold.
        resume: How the run begins: afresh or from a checkpoint.
    """

    left_out: Collection[str] = ()
    model_path: Path = _UNREAD
    shape: ModelShape = _UNREAD
    tokenizer: Any = None
    image_spec: ImageProcessorSpec | None = None
    is_blind: bool = False
    environment: type[Any] | None = None
    rollout_func: Callable[..., Any] | None = None
    prompts: PromptStream = _UNREAD
    held_out: dict[str, PromptStream] = field(default_factory=dict)
    sets: list[tuple[str, PromptDataset]] = field(default_factory=list)
    rows: PromptDataset | None = None
    rewards: list[RewardFunction] = field(default_factory=list)
    notes: Sequence[str] = ()
    ref_model_path: Path | None = None
    teacher_path: Path | None = None
    resume: ResumePlan = _UNREAD

    @property
    def streams(self) -> list[PromptStream]:
        """Return the prompts of all sets, the training set first."""
        return [*([self.prompts] if self.prompts is not None else []), *self.held_out.values()]

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt of all sets."""
        return max(stream.longest_prompt for stream in self.streams)

    @property
    def longest_row(self) -> int:
        """Return the tokens of the longest prompt of the sets that were read; 0 if unknown."""
        return max((rows.longest_prompt or 0 for _, rows in self.sets), default=0)

    @property
    def max_images(self) -> int:
        """Return the largest number of images in one prompt, over all sets."""
        return max(stream.rows.max_images for stream in self.streams)


class Problems(list[Problem]):
    """Problems found so far, without duplicates."""

    def attempt(self, read: Callable[[], Read]) -> Read | None:
        """Return the result of a function, or None after adding the problems of the ConfigError that it raised."""
        try:
            return read()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def add(self, inputs: Iterable[Problem]) -> None:
        """Append problems whose message is not in the list yet.

        Args:
            inputs: The problems. Those that an iterator yields before it raises are kept.
        """
        messages = {problem.message for problem in self}
        for problem in inputs:
            if problem.message not in messages:
                self.append(problem)


# -- the model, and others beside it ------------------------------------------------------------------------------------------------------


def model(cfg: Config, inputs: ValidatedInputs) -> None:
    """Find the model's directory, downloading it from the Hub if needed."""
    inputs.model_path = find_model(cfg.model.model, with_code=cfg.model.trust_remote_code)


def architecture(cfg: Config, inputs: ValidatedInputs) -> Iterator[Problem]:
    """Check the model's own code and read its shape."""
    yield from filter(None, [remote_code.find_code_problem(inputs.model_path, is_trusted=cfg.model.trust_remote_code)])
    inputs.shape = ModelShape.from_pretrained(inputs.model_path)


def weights(cfg: Config, inputs: ValidatedInputs) -> None:
    """Check that the model's weight files are complete, undamaged and in a supported format."""
    stored_names(inputs.model_path)


def grammar(cfg: Config, inputs: ValidatedInputs) -> Iterable[Problem]:
    """Return problems with regular expressions, JSON schemas and grammars that bound completions."""
    return structured_outputs_problems(cfg)


def adapter_bases(cfg: Config, inputs: ValidatedInputs) -> Iterator[Problem]:
    """Yield a problem for each adapter that was trained on another base model."""
    from megatron_grpo.run.checkpoint.fingerprints import base_problems

    for flag in ADAPTERS if cfg.tuner.tuner_type == "lora" else ():
        if directory := getattr(cfg.tuner, flag):
            yield from base_problems(directory, inputs.model_path, flag=flag)


def tokenizer(cfg: Config, inputs: ValidatedInputs) -> None:
    """Load the model's tokenizer. A chat template that prints the date prints that of the checkpoint that the run continues."""
    inputs.tokenizer = load_tokenizer(str(inputs.model_path), trust_remote_code=cfg.model.trust_remote_code)
    if clock := find_clock(inputs.tokenizer):
        from megatron_grpo.run.checkpoint.fingerprints import DAY
        from megatron_grpo.run.checkpoint.resume import find_recorded

        clock.day = find_recorded(DAY, cfg) or clock.day


def stop_strings(cfg: Config, inputs: ValidatedInputs) -> Iterable[Problem]:
    """Return problems with stop strings that would never stop."""
    skips = cfg.rollout.generation_kwargs.get("skip_special_tokens", True)
    return SpecialTokens(inputs.tokenizer).stop_problems(cfg.rollout.stop) if skips else ()


def settings_of_sampler(cfg: Config, tokenizer: Any) -> Config:
    """Return the settings as the sampler takes them; files of the run keep what was typed.

    Stop strings that are special tokens become token IDs. If tags that rewards read are special tokens, completions keep special tokens.
    """
    tokens, sampling = SpecialTokens(tokenizer), cfg.rollout
    strings, token_ids = tokens.split_stop(sampling.stop)
    keeps = {"skip_special_tokens": False} if tokens.hides_tags(cfg.rewards.format_tags) else {}
    values = {
        "stop": strings,
        "stop_token_ids": list(dict.fromkeys([*sampling.stop_token_ids, *token_ids])),
        "generation_kwargs": keeps | sampling.generation_kwargs,
    }
    return cfg.with_values(values)


def template_options(cfg: Config, inputs: ValidatedInputs) -> Iterator[Problem]:
    """Yield problems with `chat_template_kwargs` that the chat template does not read, and note an `enable_thinking` that it does not."""
    if cfg.data.enable_thinking is not None and unread_names(inputs.tokenizer, ["enable_thinking"]):
        inputs.notes = [*inputs.notes, "enable_thinking has no effect: the model's chat template has no variable of that name."]
    for name in unread_names(inputs.tokenizer, cfg.data.chat_template_kwargs):
        yield problem_with("chat_template_kwargs", f"chat_template_kwargs: the model's chat template has no variable {name}.")


def end_of_answers(cfg: Config, inputs: ValidatedInputs) -> None:
    """Note if the chat template ends an answer with a token at which sampling does not stop. Episodes have their own check, `template`.

    Args:
        inputs: Inputs read so far; the note is stored in it.
    """
    sampling = settings_of_sampler(cfg, inputs.tokenizer).rollout
    sets = [rows for rows in (inputs.rows, *(rows for _, rows in inputs.sets)) if rows is not None]
    has_chats = any(not isinstance(rows.raw(0), str) for rows in sets)
    if has_chats and inputs.environment is None and not sampling.stop:
        end_ids = read_end_ids(inputs.model_path, inputs.tokenizer, sampling.stop_token_ids)
        note = SpecialTokens(inputs.tokenizer).find_unended(cfg.data.template_options, end_ids)
        inputs.notes = [*inputs.notes, *filter(None, [note])]


def image_spec(cfg: Config, inputs: ValidatedInputs) -> None:
    """Load the image processor of a vision-language model."""
    from megatron_grpo.core.images import is_multimodal

    inputs.is_blind = not is_multimodal(read_config(inputs.model_path))
    is_config_alone = "weights" in inputs.left_out and not (inputs.model_path / "preprocessor_config.json").exists()
    if not inputs.is_blind and not is_config_alone:
        inputs.image_spec = read_image_spec(cfg.data, inputs.model_path)


def _refuse_word(name: str, flags: Sequence[str]) -> None:
    """Raise ConfigError if `name` is neither an existing path nor of the form of a Hub name."""
    if "/" not in name and not Path(name).exists():
        raise config_error(flags, f"{flags[0]} ({name}) is neither a local directory nor a Hub name (owner/name).")


def reference(cfg: Config, inputs: ValidatedInputs) -> None:
    """Find the reference model and check that it has the shape and the vocabulary of the model.

    Raises:
        ConfigError: If it cannot be found, or if shape or vocabulary differ.
    """
    from megatron_grpo.run.checkpoint.fingerprints import vocabulary_fingerprint

    name, shape, flags = cfg.grpo.ref_model or "", inputs.shape, ("ref_model", "model")
    _refuse_word(name, flags)
    path = find_model(name, flag="ref_model")
    ref_shape = ModelShape.from_pretrained(path)
    stored_names(path)
    if shape is not None and ref_shape != shape:
        different = [f.name for f in fields(ModelShape) if getattr(ref_shape, f.name) != getattr(shape, f.name)]
        sizes = ", ".join(f"{name} {getattr(ref_shape, name)} (model: {getattr(shape, name)})" for name in different)
        message = f"ref_model ({name}) does not have the model's architecture: {sizes}. The reference uses the model's layout."
        raise config_error(flags, message)
    if inputs.model_path is not None and vocabulary_fingerprint(path) not in (None, vocabulary_fingerprint(inputs.model_path)):
        raise config_error(flags, f"ref_model ({name}) has a different vocabulary from the model. Use a reference with the same token IDs.")
    inputs.ref_model_path = path


def teacher_model(cfg: Config, inputs: ValidatedInputs) -> None:
    """Find the teacher, a model of any size, and check that its tokenizer has the policy's vocabulary.

    Raises:
        ConfigError: If it cannot be found or read, or if the vocabularies differ.
    """
    name, flag, trusts = cfg.grpo.teacher_model or "", "teacher_model", cfg.model.trust_remote_code
    _refuse_word(name, (flag,))
    path = find_model(name, flag=flag, with_code=trusts)
    try:
        ModelShape.from_pretrained(path)
        stored_names(path)
    except ConfigError as error:
        raise ConfigError([as_teacher_problem(problem) for problem in error.problems]) from error
    tokenizer = inputs.tokenizer
    if tokenizer is not None and fingerprint_vocabulary(
        load_tokenizer(str(path), trust_remote_code=trusts, flag=flag)
    ) != fingerprint_vocabulary(tokenizer):
        message = (
            f"teacher_model ({name}) has a tokenizer that differs from the policy's: the same token IDs would be different text. Use a "
            "teacher with the policy's vocabulary."
        )
        raise config_error((flag, "model"), message)
    inputs.teacher_path = path


# -- data, rewards -------------------------------------------------------------------------------------------------------------------------


def training_set(cfg: Config, inputs: ValidatedInputs) -> None:
    """Read the training set: tokenized prompts, or rows alone if there is no tokenizer."""
    prompts = _read_set(cfg, inputs, "dataset")
    inputs.rows = inputs.sets[-1][1]
    if prompts is not None:
        inputs.prompts = prompts


def held_out_sets(cfg: Config, inputs: ValidatedInputs) -> Problems:
    """Read all held-out sets and return their problems.

    Evaluations use every row, so every row is read; rows of the training set may be read during the run.
    """
    problems = Problems()
    for name, path in list_sets(cfg).items():
        if name_part(name) not in inputs.left_out:
            problems.attempt(partial(_held_out_set, cfg, inputs, name, path))
    return problems


def _held_out_set(cfg: Config, inputs: ValidatedInputs, name: str, path: str) -> None:
    prompts = _read_set(cfg, inputs, find_set_flag(name, cfg), path)
    if prompts is not None:
        inputs.held_out[name] = prompts


def _read_set(cfg: Config, inputs: ValidatedInputs, flag: str, path: str | None = None) -> PromptStream | None:
    """Read a set; the training set if `path` is None. Return its prompts; None without a tokenizer, when its rows are checked alone."""
    from megatron_grpo.run.data.checks import check_for_episodes, check_images
    from megatron_grpo.run.data.prompts import load_rows, open_stream
    from megatron_grpo.run.data.tokens import FEW

    cfg_data, prompts = cfg.data if path is None else choose_data_config(cfg, flag), None
    options: dict[str, Any] = {"dataset": path, "flag": flag, "image_spec": inputs.image_spec, "seed": cfg.run.seed}
    if inputs.tokenizer:
        tools = inputs.environment.tools if inputs.environment is not None else None
        prompts = open_stream(cfg_data, inputs.tokenizer, shuffle=None if path is None else False, tools=tools, **options)
        rows = prompts.rows
    else:
        rows = load_rows(cfg_data, is_blind=inputs.is_blind, **options)
        check_images(rows, at_most=FEW)
        if inputs.environment is not None:
            check_for_episodes(rows, flag)
    inputs.sets.append((flag, rows))
    return prompts


def name_part(name: str) -> str:
    """Return the name that stands for a held-out set in `left_out`."""
    return f"held-out set {name}"


def rewards(cfg: Config, inputs: ValidatedInputs) -> None:
    """Load the reward functions."""
    opening = SpecialTokens(inputs.tokenizer).render_opening(cfg.data.template_options) if inputs.tokenizer is not None else ""
    inputs.rewards = load_rewards(cfg, left_out=inputs.left_out, opening=opening)


# -- combinations -------------------------------------------------------------------------------------------------------------------------


def rows_for_model_and_rewards(cfg: Config, inputs: ValidatedInputs) -> Problems:
    """Return problems with the columns that rewards need, and with prompts that do not fit the model, for every set."""
    problems = Problems()
    inputs.notes = [*inputs.notes, *find_row_notes(cfg, inputs)]
    for flag, rows in inputs.sets:
        for reason in _blind(cfg) if rows.image_store is not None else ():
            from megatron_grpo.run.data.checks import check_without_images

            problems.attempt(partial(check_without_images, rows, flag, reason))
        if inputs.rewards:
            problems.attempt(partial(find_columns, cfg, inputs.rewards, rows, flag))
        if inputs.tokenizer is not None:
            problems.add(_lengths_of_data(cfg, inputs.shape, rows, flag))
    return problems


def find_row_notes(cfg: Config, inputs: ValidatedInputs) -> Iterator[str]:
    """Yield notes about the rows of every set: what does not change prompts, and held-out prompts that are trained."""
    if not inputs.sets or not launcher.read().is_logging_rank:
        return
    from megatron_grpo.core.images import ImageError
    from megatron_grpo.run.data.checks import find_notes, find_shared

    for flag, rows in inputs.sets:
        yield from find_notes(rows, cfg.data if rows is inputs.rows else choose_data_config(cfg, flag), flag)
        if rows is not inputs.rows and inputs.rows is not None:
            with suppress(ImageError):  # `plan` has looked at some images only
                yield from find_shared(inputs.rows, rows, flag)


def _blind(cfg: Config) -> Iterator[str]:
    """Yield reasons why settings exclude images."""
    if cfg.rollout.rollout_func is not None:
        yield "rollout_func does not support them: its return value cannot contain images"
    if cfg.rollout.partial_rollouts:
        yield "async_rollout_depth does not support them where it interrupts completions: these continue with text only"
    if flag := cfg.grpo.teacher_flag:
        yield f"{flag} does not support them: a teacher gets text only"


def find_columns(cfg: Config, rewards: list[RewardFunction], rows: PromptDataset, flag: str) -> None:
    """Check that the reward functions find their columns in the data set or in episodes.

    Rollout functions and agents may add columns, so their rewards are not checked.

    Raises:
        ConfigError: If a column is missing, or if a name is both a column of the data and one of episodes.
    """
    if cfg.rollout.rollout_func is not None:  # it may add columns
        return
    names = rows.column_names()
    episode_columns = (*_EPISODE_COLUMNS, *(("contexts", "agent_output") if cfg.turns.has_agent else ())) if cfg.turns.plays else ()
    if reserved := [name for name in names if name in episode_columns]:
        message = (
            f"{flag} has the column {', '.join(reserved)}, a name that is reserved for values of episodes in rewards. Rename the column."
        )
        raise config_error(flag, message)
    if cfg.turns.has_agent:  # its verdict may add columns
        return

    def without(names_needed: Sequence[str]) -> str:
        return "" if set(names_needed).intersection(episode_columns) else rows.without(names_needed)

    check_columns(rewards, (*names, *episode_columns), flag=flag, nested=rows.nested_names(), without=without)


def _lengths_of_data(cfg: Config, shape: ModelShape, rows: PromptDataset, flag: str) -> list[Problem]:
    """Return a problem if sequences are too long for the model and only the data determine their length.

    `run.check` checks lengths that the settings determine.
    """
    longest = longest_completion(cfg)
    is_known = cfg.data.max_prompt_length is not None or cfg.turns.has_agent
    if is_known or rows.longest_prompt is None or length_problems(shape, 1 + longest):
        return []
    return length_problems(shape, rows.longest_prompt + longest, flags=(flag, "max_completion_length"))


def servers(cfg: Config, inputs: ValidatedInputs) -> Iterable[Problem] | None:
    """Return problems with the rollout servers that already answer.

    Only rank 0, which will talk to them, checks: other ranks may have no route to them.
    """
    if cfg.rollout.vllm_mode != "server" or launcher.read().rank != 0:
        return ()
    return plug_ins.READERS["servers"].load()(cfg, inputs)


def services(cfg: Config, inputs: ValidatedInputs) -> Iterable[Problem]:
    """Return problems with tracking services that are unknown or not installed."""
    if set(cfg.run.report_to) <= {"none"}:
        return ()
    from megatron_grpo.run.metrics.reporters import report_to_problems

    return report_to_problems(cfg.run.report_to)


# -- the list -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputStep:
    """One step of reading inputs.

    Args:
        name: Name of the part, as in `left_out`.
        read: Called with the configuration and the inputs read so far. It stores the part in the inputs, and returns or raises
            (ConfigError) its problems.
        settings: Space-separated settings; the part is read if one of them is set. "": always.
        needs: Space-separated fields of `ValidatedInputs` that must have been read before.
    """

    name: str
    read: plug_ins.ReadPart | plug_ins.PlugIn[plug_ins.ReadPart]
    settings: str = ""
    needs: str = ""


PARTS = (
    InputStep("report_to", services, "report_to"),
    InputStep("model", model),
    InputStep("the architecture", architecture, needs="model_path"),
    InputStep("mcore_model", plug_ins.PlugIn("megatron_grpo.run.checkpoint.resume.initial_weights_problems"), "mcore_model"),
    InputStep("weights", weights, needs="shape"),
    InputStep("the grammar", grammar),
    InputStep("the bases of adapters", adapter_bases, "adapters ref_adapters", "shape"),
    InputStep("tokenizer", tokenizer, needs="shape"),
    InputStep("stop", stop_strings, "stop", "tokenizer"),
    InputStep("the options of the template", template_options, needs="tokenizer"),
    InputStep("ref_model", reference, "ref_model"),
    InputStep("teacher_model", teacher_model, "teacher_model"),
    InputStep("image processor", image_spec, needs="shape"),
    InputStep("environment", plug_ins.READERS["environment"], "environment tools agent agent_command"),
    InputStep("the template", plug_ins.READERS["the template"], needs="environment tokenizer"),
    InputStep("dataset", training_set),
    InputStep("the held-out sets", held_out_sets),
    InputStep("the end of answers", end_of_answers, needs="tokenizer"),
    InputStep("rewards", rewards),  # the user's code comes last: it may change the working directory
    InputStep("rollout_func", plug_ins.READERS["rollout_func"], "rollout_func"),
    InputStep("rows for model and rewards", rows_for_model_and_rewards),
    InputStep("servers", servers, needs="shape"),
    InputStep("teacher", plug_ins.READERS["teacher"], "teacher_model_server", "shape tokenizer"),
)


def read_inputs(cfg: Config, left_out: Collection[str] = (), parts: Sequence[InputStep] = PARTS) -> ValidatedInputs:
    """Read all parts in order and collect their problems.

    Raises:
        ConfigError: With the problems of all parts.
    """
    problems, inputs = Problems(), ValidatedInputs(left_out=left_out)
    values = {name: value for section in cfg.groups().values() for name, value in vars(section).items()}
    for part in parts:
        is_named = not part.settings or any(values[name] for name in part.settings.split())
        if part.name not in left_out and is_named and all(getattr(inputs, name) is not None for name in part.needs.split()):
            try:
                read = part.read.load() if isinstance(part.read, plug_ins.PlugIn) else part.read
                problems.add(read(cfg, inputs) or ())
            except ConfigError as error:
                problems.add(error.problems)
    if problems:
        close_rewards(inputs.rewards)
        raise ConfigError(problems)
    return inputs
