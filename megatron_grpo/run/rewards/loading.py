"""Load reward functions from `--reward_funcs`: built-in names, `path/to/file.py:function`, `package.module:function`.

A file may have been written for another framework. Files that start training when they are imported are rejected; plugins of ms-swift are
loaded.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, describe_value, one_line
from megatron_grpo.run import python_objects
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.process_isolation import ExitRequestedError, IsolatedCall
from megatron_grpo.run.rewards.protocol import ReadsOpening, RewardFunction, accepted_names, positional_names, read_text

_LOG = logging.getLogger(__name__)

# Name -> module with `build_<name>(config) -> function`. The function's attribute `needs` lists its required columns, as alternatives.
BUILT_IN = {
    "math": "math",
    **dict.fromkeys(("accuracy", "format", "length", "soft_overlong", "cosine", "repetition"), "rule_based"),
    "code": "code",
    "reward_model": "reward_model",
    "llm_judge": "llm_judge",
    "environment": "rule_based",
}
_REGISTRIES = ("orms", "prms", "rm_plugins", "multi_turns", "envs")  # registries of ms-swift
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MARGIN = 15.0  # seconds beyond reward_timeout after which a built-in that keeps its own deadline is stopped


def load_rewards(config: Config, *, left_out: Collection[str] = (), opening: str = "") -> list[RewardFunction]:
    """Load the reward functions of a run, in the order of `--reward_funcs`.

    Args:
        left_out: Entries of `--reward_funcs` to skip. They are not checked.
        opening: A chat as the model's chat template renders it before an answer.

    Raises:
        ConfigError: If any function cannot be loaded; lists the problems of all functions.
    """
    specs = config.rewards.reward_funcs
    problems: list[Problem] = []
    if not specs and not config.grpo.teacher_flag:  # training on a teacher needs no reward
        problems.append(_problem(f"reward_funcs is empty. Built-in: {', '.join(BUILT_IN)}; or use your own path/to/file.py:function."))
    twice = sorted({spec for spec in specs if specs.count(spec) > 1})
    if twice:
        problems.append(_problem(f"reward_funcs names {', '.join(twice)} more than once. Use a larger weight in reward_weights instead."))
    loaded: dict[str, RewardFunction] = {}
    directory = Path.cwd()
    names = dict(zip(specs, _names(specs)))
    requested = [spec for spec in names if spec not in left_out]
    for spec in sorted(requested, key=lambda spec: spec not in BUILT_IN):  # the user's files last: one may change directory or sys.path
        try:
            loaded[spec] = _load(spec, names[spec], config, directory)
        except ConfigError as error:
            problems += error.problems
    if problems:
        close_rewards(list(loaded.values()))
        raise ConfigError(problems)
    for function in loaded.values():
        if isinstance(function.function, ReadsOpening):
            function.function.opening = opening
    return [loaded[spec] for spec in specs if spec in loaded]


def may_exist(spec: str) -> bool:
    """Return False for a file or package that does not exist on this machine. Loads nothing.

    Args:
        spec: An entry of `--reward_funcs`.
    """
    module, colon, _ = spec.rpartition(":")
    if not colon or python_objects.is_given(spec):
        return True  # a built-in name, or a typing error; or an object of the program
    return Path(module).expanduser().is_file() if module.endswith(".py") else importlib.util.find_spec(module.partition(".")[0]) is not None


def close_rewards(functions: Sequence[RewardFunction]) -> None:
    """Stop the processes that reward functions keep."""
    for function in functions:
        function.close()


def check_columns(
    functions: Sequence[RewardFunction],
    columns: Sequence[str],
    *,
    flag: str = "dataset",
    nested: Sequence[str] = (),
    without: Callable[[Sequence[str]], str] = lambda _: "",
) -> None:
    """Check that the data set has the columns that the reward functions need.

    Args:
        nested: Values inside columns, such as `reward_model.ground_truth`, that `columns` can name.
        without: Maps alternative column names to a description of the rows that have none of them; "" if every row has one.

    Raises:
        ConfigError: If the data set, or a row of it, lacks a needed column.
    """
    problems, subject = [], "the data set" if flag == "dataset" else f"a set of {flag}"
    for function in functions:
        for names in function.needs():
            needs = f"Reward `{function.name}` needs the column {' or '.join(f'`{name}`' for name in names)}"
            if not set(names).intersection(columns):
                inner = sorted(nested, key=lambda name: (name not in names, not name.endswith(("ground_truth", "answer", "solution"))))
                column = names[0].rpartition(".")[2]
                advice = f" Use --columns {column}={inner[0]} for a value inside a column." if inner else ""
                has = f"has {', '.join(f'`{column}`' for column in columns)}" if columns else "has none besides the prompt"
                problems.append(Problem(flags=("reward_funcs", flag), message=f"{needs}; {subject} {has}.{advice}"))
            elif rows_without := without(names):
                message = f"{needs}, but {rows_without} lack it. Add it to these rows, as null where it does not apply."
                problems.append(Problem(flags=("reward_funcs", flag), message=message))
    if problems:
        raise ConfigError(problems)


def _problem(message: str, nearest: Sequence[str] = ()) -> Problem:
    return Problem(flags=("reward_funcs",), message=message, nearest={"reward_funcs": list(nearest)} if nearest else {})


def _fail(message: str, nearest: Sequence[str] = ()) -> ConfigError:
    return ConfigError([_problem(message, nearest)])


def _names(specs: Sequence[str]) -> list[str]:
    """Return a unique metric name per function: its own name, prefixed with the file or module if two would be equal."""
    short = [spec.rpartition(":")[2] for spec in specs]
    modules = [Path(spec.rpartition(":")[0]).stem or "built_in" for spec in specs]
    return [name if short.count(name) == 1 else f"{module}.{name}" for name, module in zip(short, modules)]


def _load(spec: str, name: str, config: Config, directory: Path) -> RewardFunction:
    settings = config.rewards
    if spec in BUILT_IN:
        module = importlib.import_module(f"megatron_grpo.plugins.rewards.{BUILT_IN[spec]}")
        build = getattr(module, f"build_{spec}")
        timeout = settings.reward_timeout + _MARGIN
        return RewardFunction(name=name, function=build(config), timeout=timeout, on_error=settings.reward_on_error, keeps_deadline=True)
    if ":" not in spec:
        nearest = difflib.get_close_matches(spec, BUILT_IN, n=1)
        guess = f" Did you mean {nearest[0]}?" if nearest else ""
        if spec.endswith(".py"):
            guess = f" For a function of that file: {spec}:function."
        raise _fail(f"Unknown built-in reward {spec!r}.{guess} Built-in: {', '.join(BUILT_IN)}.", nearest)
    function = _named(spec, directory)
    if inspect.isclass(function):
        function = _instance(function, spec)
    try:
        inspect.signature(function)
    except ValueError as error:  # some functions written in C
        raise _fail(f"{spec} has no inspectable signature: {one_line(error)}. Wrap it in a function.") from error
    if unusable := positional_names(function):
        raise _fail(f"{spec} takes {', '.join(unusable)} by position only; rewards are called with arguments by name. Remove the `/`.")
    if accepted_names(function) == frozenset():
        raise _fail(f"{spec} takes no arguments. A reward function takes `completions` and other columns that it needs by name.")
    return RewardFunction(name=name, function=function, timeout=settings.reward_timeout, on_error=settings.reward_on_error)


def _named(spec: str, directory: Path) -> Any:
    """Return the callable that `path/to/file.py:name`, `package.module:name` or `python:name` refers to. Raises ConfigError."""
    if python_objects.is_given(spec):
        value = python_objects.get(spec, "reward_funcs")
        if not callable(value):
            raise _fail(f"{spec} is {describe_value(value)}, which cannot be called. Pass a function.")
        return value
    module_name, _, attribute = spec.rpartition(":")
    module = _module_of_file(Path(module_name), directory) if module_name.endswith(".py") else _module_of_package(module_name, directory)
    value = getattr(module, attribute, None)
    if value is None or not callable(value):
        raise _fail(_no_such_function(module_name, module, attribute))
    return value


def user_object(spec: str, *, flag: str) -> Any:
    """Load a callable of the user's code that another setting names as `--reward_funcs` does.

    Args:
        spec: `path/to/file.py:name` or `package.module:name`.

    Raises:
        ConfigError: If the callable cannot be loaded.
    """
    if ":" not in spec:
        message = f"{flag} ({spec}) must have the form path/to/file.py:name or package.module:name."
        raise ConfigError([Problem(flags=(flag,), message=message)])
    try:
        return _named(spec, Path.cwd())
    except ConfigError as error:
        raise ConfigError([Problem(flags=(flag,), message=f"{flag}: {problem.message}") for problem in error.problems]) from error


def _instance(cls: type, spec: str) -> Callable[..., Any]:
    """Return an instance of a class with `__call__`, as Megatron-SWIFT's plugins are."""
    if not any("__call__" in vars(base) for base in cls.__mro__):  # every class is callable itself: that makes an instance
        raise _fail(f"{spec} is a class without `__call__`.")
    return _run_user_code(adapt_swift_reward(cls), f"{spec} is a class that cannot be instantiated without arguments")


def _run_user_code(call: Callable[[], Any], action: str) -> Any:
    """Run `call()`, which executes the user's code.

    Raises:
        ConfigError: If the call raises anything; the message begins with `action`.
    """
    side_effects: list[str] = []
    try:
        with IsolatedCall(side_effects):
            return call()
    except ExitRequestedError as error:
        raise _fail(f"{action}: it tried to end the process with {one_line(error)}.") from error
    except KeyboardInterrupt:  # Ctrl-C: the code's own is an ExitRequestedError
        raise
    except BaseException as error:
        raise _fail(f"{action}: {type(error).__name__}: {one_line(error)}.") from error
    finally:
        for effect in side_effects:
            _LOG.warning("%s %s when it was loaded; it was reopened.", action.partition(" ")[0], effect)


def _module_of_file(path: Path, directory: Path) -> Any:
    path = path.expanduser()
    if not (directory / path).is_file():
        raise _fail(f"File {str(path)!r} does not exist in {directory}.")
    path = (directory / path).resolve()
    # One module per file for all settings that name it. Files next to it can be imported, after all installed packages.
    name = f"megatron_grpo_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    program = parsed(path)
    if line := trains_at_import(program):
        raise _fail(
            f"{path} starts training when it is imported (line {line}), so it is not loaded. Put the training code under "
            'if __name__ == "__main__":, or move the function to another file.'
        )
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, so that dataclasses and pickles in it find their module
    try:
        with with_swift(program):
            _run_user_code(lambda: loader.exec_module(module), f"{path} cannot be loaded")
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def _module_of_package(name: str, directory: Path) -> Any:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # as `python -m` would have it; the console command does not
    if not name or name.startswith("."):
        raise _fail(f"{name!r} before the colon is neither a file nor a module. Use path/to/file.py:function or package.module:function.")
    return _run_user_code(lambda: importlib.import_module(name), f"module {name!r} cannot be imported")


def _no_such_function(module_name: str, module: Any, attribute: str) -> str:
    functions = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    if not functions:
        return f"{module_name} has no function {attribute!r}; it has no functions."
    nearest = difflib.get_close_matches(attribute, functions, n=1)
    guess = f"Did you mean {nearest[0]}? " if nearest else ""
    return f"{module_name} has no function {attribute!r}. {guess}It has {', '.join(functions)}."


# ---- files that were written for another system


def parsed(path: Path) -> ast.Module:
    """Parse a Python file. Return an empty module if it is not valid Python; importing it then reports the error."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def trains_at_import(program: ast.Module) -> int | None:
    """Return the line that starts training when the file is imported, or None.

    Such a line creates a GRPOTrainer or calls `.train()`, directly or through a function of the file, and is not inside an
    `if __name__ == "__main__":` block.
    """
    defined = {line.name: _names_used(line) for line in program.body if isinstance(line, _DEFINES)}
    trains, num_before = {"GRPOTrainer", ".train"}, 0
    while num_before < len(trains):
        num_before = len(trains)
        trains |= {name for name, used in defined.items() if used & trains}
    runs = (line for line in program.body if not isinstance(line, _DEFINES) and "__name__" not in _names_used(getattr(line, "test", line)))
    return next((line.lineno for line in runs if _names_used(line) & trains), None)


def _names_used(node: ast.AST) -> set[str]:
    """Return the names used in a node, and the methods it calls, prefixed with a dot."""
    called = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    methods = {f".{function.attr}" for function in called if isinstance(function, ast.Attribute)}
    return methods | {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


@contextmanager
def with_swift(program: ast.Module) -> Iterator[None]:
    """Stub the package `swift` while a plugin of ms-swift is loaded on a machine without ms-swift.

    The registries that the plugin imports become dicts, which accept its entries; other imported classes become classes that do nothing.
    """
    lines = [line for line in ast.walk(program) if isinstance(line, ast.ImportFrom) and (line.module or "").split(".")[0] == "swift"]
    modules: dict[str, ModuleType] = {}
    for line in lines if lines and find_spec("swift") is None else ():
        names = list(accumulate(str(line.module).split("."), "{}.{}".format))
        modules |= {name: ModuleType(name) for name in names if name not in modules}
        for word in line.names:
            idle = type(word.name, (), {"__init__": lambda self, args=None, **words: None, "__module__": line.module})
            setattr(
                modules[names[-1]], word.name, {} if word.name in _REGISTRIES else logging.getLogger if word.name == "get_logger" else idle
            )
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def adapt_swift_reward(cls: type) -> type:
    """Adapt a reward class of ms-swift to chat completions; return other classes unchanged.

    Reward classes of ms-swift expect text, but completions of a chat are messages here. The adapted class converts each completion to
    text.
    """
    if not any(base.__module__.partition(".")[0] == "swift" for base in cls.__mro__):
        return cls
    inner: Callable[..., Any] = cls.__call__

    def call(self: Any, completions: Any, **columns: Any) -> Any:
        return inner(self, completions=[read_text(completion) for completion in completions], **columns)

    async def call_later(self: Any, completions: Any, **columns: Any) -> Any:
        return await call(self, completions, **columns)

    wrapped = functools.wraps(inner)(call_later if inspect.iscoroutinefunction(inner) else call)
    return type(cls.__name__, (cls,), {"__call__": wrapped, "__module__": cls.__module__})
