"""Reader of a Python file that builds TRL's `GRPOConfig(...)`. The file is not run: only literals and constants assigned in it are read."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run.config.read import UNKNOWN, RawSetting

# Names in PEFT's LoraConfig -> names on TRL's command line.
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
         "modules_to_save": "lora_modules_to_save", "use_rslora": "use_rslora", "use_dora": "use_dora",
         "task_type": "lora_task_type", "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern",
         "exclude_modules": "exclude_modules"}  # fmt: skip
_WORDS = ("model_init_kwargs",)  # mappings whose keys become separate names
_TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "train_dataset": "dataset_name", "eval_dataset": "eval_dataset",
            "tools": "tools", "environment_factory": "environment_factory", "rollout_func": "rollout_func"}  # fmt: skip
# Other arguments of the two that are allowed with these values: the configuration, the model's tokenizer, PEFT's defaults.
_NOTHING = {"args": None, "processing_class": None, "peft_config": None, "bias": "none", "inference_mode": False, "init_lora_weights": True}


def read_python(text: str, *, source: str, path: str = "") -> tuple[list[RawSetting], list[Problem]]:
    """Return the arguments of GRPOConfig, LoraConfig and GRPOTrainer, under the names of TRL's command line.

    A computed value is marked as unknown. `parse` reports it, unless it is given on the command line or has no effect.

    Returns:
        (settings, problems).
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [], [_problem(f"{source} line {error.lineno} is not Python: {error.msg}.")]
    bound = Counter(_bound(tree))
    assigned = {name: value for line in ast.walk(tree) for name, value in _assigned(line) if bound[name] == 1}
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    configs = [call for call in calls if _name(call.func) == "GRPOConfig"]
    if len(configs) != 1:
        problem = f"{source} builds {len(configs) or 'no'} GRPOConfig"
        return [], [_problem(f"{problem}. Use a file that builds one, or pass its values as flags.")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    reader = _Reader(source, path or source, assigned, {node.name for node in ast.walk(tree) if isinstance(node, kinds)})
    reader.take(configs[0], None)
    adapters = [call for call in calls if _name(call.func) == "LoraConfig"]
    if len(adapters) > 1:
        reader.problems.append(_problem(f"{source} builds {len(adapters)} LoraConfig. Use a file that builds one."))
    for call in calls:
        if _name(call.func) == "GRPOTrainer":
            reader.take(call, _TRAINER)
        elif call in adapters:
            reader.entries.append(RawSetting(name="peft_config", raw=["LoraConfig"], source=source))
            reader.take(call, _LORA)
    trainer_args = {word.arg: word.value for call in calls if _name(call.func) == "GRPOTrainer" for word in call.keywords}
    if not adapters and reader.value(trainer_args.get("peft_config", ast.Constant(None))) is not None:
        peft_config = ast.unparse(trainer_args["peft_config"])
        reader.problems.append(
            _problem(f"{source}: GRPOTrainer's peft_config ({peft_config}) cannot be determined. Write a LoraConfig in the file.")
        )
    return reader.entries, reader.problems


class _Reader:
    """Reader of the calls in one file."""

    def __init__(self, source: str, path: str, assigned: Mapping[str, ast.expr], defined: set[str]):
        self.source, self.path, self.known, self.defined = source, path, assigned, defined
        self.entries: list[RawSetting] = []
        self.problems: list[Problem] = []

    def take(self, call: ast.Call, names: Mapping[str, str] | None) -> None:
        """Read the keyword arguments of a call. `names`: argument -> name here, for those to read; None reads all unchanged."""
        if names is None and (call.args or any(word.arg is None for word in call.keywords)):
            positional = ", ".join(ast.unparse(word) for word in [*call.args, *(word.value for word in call.keywords if word.arg is None)])
            self.problems.append(
                _problem(
                    f"{self.source}: GRPOConfig gets {positional}, which cannot be determined without running the file. Write keyword "
                    "arguments."
                )
            )
        for word in call.keywords:
            name = word.arg if names is None else names.get(word.arg or "")
            if names is not None and name is None:
                self._not_taken(call, word)
            elif name:
                raw = self.value(word.value)
                for key, value in raw.items() if isinstance(raw, dict) and name in _WORDS else [("", raw)]:
                    self.entries.append(RawSetting(name=f"{name}.{key}" if key else name, raw=value, source=self.source))

    def _not_taken(self, call: ast.Call, word: ast.keyword) -> None:
        """Report an argument that is not read here, unless its value asks for nothing."""
        value, without_effect = self.value(word.value), _NOTHING.get(word.arg or "", ())
        if value is not None and value != [] and without_effect is not None and value != without_effect:
            argument = f"{_name(call.func)}'s {word.arg or '**'} ({ast.unparse(word.value)})"
            self.problems.append(_problem(f"{self.source}: {argument} is not read here and may change the training. Remove it."))

    def value(self, node: ast.expr) -> Any:
        """Return a literal; file:name for a function or class of this file; the name or the file of load_dataset's data set."""
        if isinstance(node, ast.Name) and node.id in self.known:
            return _Reader(self.source, self.path, {n: v for n, v in self.known.items() if n != node.id}, self.defined).value(
                self.known[node.id]
            )
        if isinstance(node, ast.Name) and node.id in self.defined:
            return f"{self.path}:{node.id}"
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {key.value: self.value(value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Call) and _name(node.func) == "load_dataset" and len(node.args) == 1 and _is_train(node.keywords):
            name, files = self.value(node.args[0]), [self.value(word.value) for word in node.keywords if word.arg == "data_files"]
            if not files:
                return name
            if name in ("json", "parquet") and isinstance(files[0], str):
                return files[0]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.bfloat16", "torch.float32"):
            return node.attr
        if isinstance(node, ast.Name) and node.id in ("accuracy_reward", "get_soft_overlong_punishment"):
            return node.id
        try:
            return ast.literal_eval(node)
        except ValueError:
            return [f"{UNKNOWN}{ast.unparse(node)}"]


def _is_train(words: list[ast.keyword]) -> bool:
    """Return whether load_dataset's arguments ask for no rows other than the training split."""
    splits = [word.value for word in words if word.arg != "data_files"]
    known = all(word.arg in ("split", "data_files") for word in words)
    return known and all(isinstance(split, ast.Constant) and split.value == "train" for split in splits)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield a name for each place that assigns it. A name assigned more than once has no value that is known without running the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _assigned(line: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
        yield line.targets[0].id, line.value


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _problem(message: str) -> Problem:
    return Problem(flags=("config",), message=message)
