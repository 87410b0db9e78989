"""Report which names, arguments and methods that this package uses are missing in a wheel of vLLM, Megatron-Core or Transformer Engine.

    python -m pip download --no-deps vllm==0.33.0 -d wheels && unzip -q wheels/vllm-*.whl '*.py' -d vllm-0.33
    python tools/upstream.py vllm-0.33
    python tools/upstream.py te-2.9 --caller core-0.19/megatron/core     # what Megatron-Core uses of another package

The wheel's source is read and not executed. Three things are looked up: every name that the package imports or reads from a module, every
argument of a call by such a name, and every method that is reached through an object (`THROUGH_OBJECTS`, maintained by hand). Names defined
by C extensions and changes of behavior are not detected. The exit code is 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM = ("vllm", "megatron", "transformer_engine")

# Methods and attributes that the package reaches through objects: name in the wheel, keywords of the calls.
THROUGH_OBJECTS: dict[str, tuple[str, ...]] = {
    "vllm.LLM.generate": ("lora_request", "use_tqdm"),
    "vllm.LLM.collective_rpc": ("args", "kwargs"),
    "vllm.LLM.sleep": ("level",),
    "vllm.LLM.wake_up": ("tags",),
    "vllm.LLM.reset_prefix_cache": (),
    "vllm.LLM.get_tokenizer": (),
    "vllm.v1.engine.llm_engine.LLMEngine.step": (),
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request": ("internal",),
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": (),
    "vllm.v1.engine.async_llm.AsyncLLM.collective_rpc": (),
    "vllm.v1.engine.async_llm.AsyncLLM.reset_prefix_cache": (),
    "vllm.config.model.ModelConfig.get_vocab_size": (),
    "vllm.engine.arg_utils.EngineArgs": (
        "tensor_parallel_size", "max_model_len", "max_num_seqs", "enable_prefix_caching", "seed", "logprobs_mode", "disable_log_stats",
        "use_tqdm_on_load", "dtype", "distributed_executor_backend", "enforce_eager", "gpu_memory_utilization", "enable_sleep_mode",
        "kv_cache_memory_bytes", "block_size", "enable_chunked_prefill",
    ),
    "vllm.v1.worker.gpu_worker.Worker.sleep": (),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.get_model": (),  # runner V2
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.get_model": (),  # runner V1
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod.process_weights_after_loading": (),
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": (),
    "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed._init_cpu_shm": (),
    "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed.make_group_name": (),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.prepare_grads": (),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.get_grad_norm": (),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict": ("is_loading", "metadata"),
    "megatron.core.distributed.DistributedDataParallel.zero_grad_buffer": (),
    "megatron.core.distributed.DistributedDataParallel.no_sync": (),
    "megatron.core.distributed.DistributedDataParallel.start_grad_sync": (),
    "megatron.core.distributed.DistributedDataParallel.start_param_sync": (),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.step": ("increment",),
    "megatron.core.models.gpt.GPTModel.shared_embedding_or_output_weight": (),
    "megatron.core.models.gpt.GPTModel.sharded_state_dict": ("metadata",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function.

    Args:
        names: Names of all parameters.
        required: Names of parameters without a default.
        most: Largest number of positional arguments; None: any number.
        takes_more: Whether it has **kwargs.
    """

    names: frozenset[str]
    required: frozenset[str]
    most: int | None
    takes_more: bool


@dataclass(slots=True)
class Finding:
    """Something that is missing upstream.

    Args:
        where: "file:line" of the caller.
        what: Description.
    """

    where: str
    what: str


@dataclass(slots=True)
class Definition:
    """Definition of a name.

    Args:
        node: Syntax node; None for a module, or if the definition cannot be followed.
        module: Module that contains it.
    """

    node: ast.AST | None
    module: str


class Source:
    """Source of an unpacked wheel.

    Args:
        root: Folder that contains the packages.
    """

    def __init__(self, root: Path):
        self.root, self._trees, self._names = root, dict[str, ast.Module | None](), dict[str, dict[str, ast.AST]]()

    def has_package(self, name: str) -> bool:
        """Return whether the wheel has a top-level package."""
        return (self.root / name).is_dir()

    def find_file(self, module: str) -> Path | None:
        """Return the file of a module; None if there is none."""
        base = self.root.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)

    def is_module(self, module: str) -> bool:
        """Return whether a dotted name is a module or a namespace package."""
        return self.find_file(module) is not None or self.root.joinpath(*module.split(".")).is_dir()  # a namespace package

    def read_names(self, module: str) -> dict[str, ast.AST]:
        """Return the names at the top level of a module, also under `if` and `try`. Star imports have the key "*" with a line number."""
        if module not in self._names:
            path = self.find_file(module)
            tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
            self._names[module] = dict(_iterate_top_level(tree.body))
        return self._names[module]

    def find(self, dotted: str, depth: int = 0) -> Definition | None:
        """Return the definition of a dotted name, following re-exports and base classes; None if it does not exist."""
        if self.is_module(dotted):
            return Definition(None, dotted)
        owner, _, name = dotted.rpartition(".")
        if not owner or depth > 12:
            return None
        found = self.find(owner, depth + 1)
        if found is None:
            return None
        if found.node is None:
            return self._find_in_module(found.module, name, depth)
        return self._find_in_class(found, name, depth) if isinstance(found.node, ast.ClassDef) else Definition(None, "")

    def _find_in_module(self, module: str, name: str, depth: int) -> Definition | None:
        node = self.read_names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            return self._follow(module, node, next(a.name for a in node.names if (a.asname or a.name) == name), depth)
        if isinstance(node, ast.Import):
            return Definition(None, node.names[0].name if self.is_module(node.names[0].name) else "")
        if node is not None:
            return Definition(node, module)
        if lazy := self._find_lazy_name(module, name):
            return self.find(lazy, depth + 1)
        stars = (node for key, node in self.read_names(module).items() if key.startswith("*"))
        return next((hit for star in stars if (hit := self._follow(module, star, name, depth))), None)

    def _follow(self, module: str, node: ast.ImportFrom, name: str, depth: int) -> Definition | None:
        base = module.split(".")
        if node.level:
            is_package = (path := self.find_file(module)) is not None and path.name == "__init__.py"
            base = base[: len(base) - node.level + is_package]
            source = ".".join([*base, *filter(None, [node.module])])
        else:
            source = node.module or ""
        if not self.is_module(source):
            return Definition(None, "")  # of another package
        return self.find(f"{source}.{name}", depth + 1)

    def _find_lazy_name(self, module: str, name: str) -> str:
        """Return the dotted name that vLLM's `__getattr__` imports for a name, from its table; empty if there is none."""
        table = self.read_names(module).get("MODULE_ATTRS")
        if not isinstance(table, ast.Dict):
            return ""
        values = {k.value: v.value for k, v in zip(table.keys, table.values) if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)}
        where = values.get(name, "")
        return f"{module}{where.replace(':', '.')}" if where else ""

    def _find_in_class(self, found: Definition, name: str, depth: int) -> Definition | None:
        assert isinstance(found.node, ast.ClassDef)
        for statement in ast.walk(found.node):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                return Definition(statement, found.module)
            if isinstance(statement, ast.Attribute) and statement.attr == name and isinstance(statement.ctx, ast.Store):
                return Definition(None, "")
        fields = dict(_iterate_top_level(found.node.body))
        if name in fields:
            return Definition(fields[name], found.module)
        for base in self._iterate_bases(found, depth):
            hit = self._find_in_class(base, name, depth + 1) if isinstance(base.node, ast.ClassDef) else Definition(None, "")
            if hit is not None:
                return hit
        return None

    def _iterate_bases(self, found: Definition, depth: int) -> Iterator[Definition]:
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            hit = self._find_in_module(found.module, name, depth + 1) if isinstance(base, ast.Name) else None
            if hit is not None and hit.node is not found.node:
                yield hit

    def read_signature(self, found: Definition, depth: int = 0) -> Signature | None:
        """Return the signature of a function or class; None if the source does not show it."""
        node = found.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _read_function_signature(node, is_bound=any(ast.unparse(d) == "classmethod" for d in node.decorator_list))
        if not isinstance(node, ast.ClassDef) or depth > 6:
            return None
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return _read_function_signature(statement, is_bound=True)
        has_fields = any("dataclass" in ast.unparse(d) or "config" in ast.unparse(d) for d in node.decorator_list)
        bases = list(self._iterate_bases(found, depth))
        inherited = [self.read_signature(base, depth + 1) for base in bases]
        is_struct = any("Struct" in ast.unparse(base) for base in node.bases)
        if not (has_fields or is_struct):
            return inherited[0] if inherited else None
        own = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
        names = own.union(*(s.names for s in inherited if s))
        return Signature(frozenset(names), frozenset(), None, False)


def _iterate_top_level(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value or node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname or alias.name.split(".")[0]), ast.Import([alias])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield (f"*{node.lineno}" if alias.name == "*" else alias.asname or alias.name), node
        elif isinstance(node, ast.Try):
            for part in (
                *(handler.body for handler in node.handlers),
                node.orelse,
                node.finalbody,
                node.body,
            ):  # the last definition counts
                yield from _iterate_top_level(part)
        elif isinstance(node, (ast.If, ast.With)):
            yield from _iterate_top_level([*getattr(node, "orelse", []), *node.body])


def _read_function_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_bound: bool) -> Signature:
    a = node.args
    positional = [*a.posonlyargs, *a.args][1 if is_bound else 0 :]
    needed = positional[: len(positional) - len(a.defaults)] if a.defaults else positional
    alone = [arg.arg for arg, default in zip(a.kwonlyargs, a.kw_defaults) if default is None]
    names = frozenset(arg.arg for arg in (*positional, *a.kwonlyargs))
    return Signature(names, frozenset([*(arg.arg for arg in needed), *alone]), None if a.vararg else len(positional), a.kwarg is not None)


@dataclass(slots=True)
class Caller:
    """One file of this package and the upstream names that it uses.

    Args:
        path: The file.
        source: Source of the wheel.
        known: Dotted upstream name of each local name.
        dicts: Keys that each dict receives, for calls with **name.
        findings: What is missing.
        checked: Number of lookups.
    """

    path: Path
    source: Source
    known: dict[str, str] = field(default_factory=dict)
    dicts: dict[str, set[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checked: int = 0

    def check_file(self) -> None:
        """Look up everything that the file uses."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        hits: dict[str, tuple[bool, int]] = {}
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and "Import" in "".join(map(ast.unparse, node.handlers))]
        tried = {id(one) for node in tries for statement in node.body for one in ast.walk(statement)}
        instead = {id(one) for node in tries for handler in node.handlers for one in ast.walk(handler)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._check_import(node, id(node) in tried | instead, hits)
        for node in ast.walk(tree):  # a name imported from two modules must be in one of them; a name with a fallback may be missing
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) in instead:
                for alias in node.names:
                    has, line = hits.get(alias.asname or alias.name, (True, 0))
                    if not has:
                        self._add_finding(line, f"{alias.name} is in none of the modules that it is imported from")
        self._collect_aliases(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.known:
                self._check_name(node.lineno, f"{self.known[node.value.id]}.{node.attr}")
            if isinstance(node, ast.Call):
                self._check_call(node)

    def _add_finding(self, line: int, what: str) -> None:
        self.findings.append(Finding(f"{self.path.name}:{line}", what))

    def _check_name(self, line: int, dotted: str) -> bool:
        self.checked += 1
        if self.source.find(dotted) is None:
            self._add_finding(line, f"there is no {dotted}")
            return False
        return True

    def _check_import(self, node: ast.Import | ast.ImportFrom, is_optional: bool, hits: dict[str, tuple[bool, int]]) -> None:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            dotted = f"{module}.{alias.name}" if module else alias.name
            if dotted.split(".")[0] not in UPSTREAM or not self.source.has_package(dotted.split(".")[0]) or getattr(node, "level", 0):
                continue
            local = alias.asname or (alias.name if module else alias.name.split(".")[0])
            if is_optional:
                self.checked += 1
                has = self.source.find(dotted) is not None
                hits[local] = (has or hits.get(local, (False, 0))[0], node.lineno)
            else:
                has = self._check_name(node.lineno, dotted)
            if has:
                self.known[local] = dotted if alias.asname or module else local

    def _collect_aliases(self, tree: ast.AST) -> None:
        """Record aliases of upstream names (`kind = TransformerConfig`) and keys of dicts (`more = dict(key=...)`) used in calls."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            target, value = node.targets[0], node.value
            pairs = zip(target.elts, value.elts) if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [(target, value)]
            for to, what in pairs:
                if not isinstance(to, ast.Name):
                    continue
                if isinstance(what, ast.Name) and what.id in self.known:
                    self.known[to.id] = self.known[what.id]  # of several, the innermost, a class with more arguments
                if isinstance(what, ast.Call) and isinstance(what.func, ast.Name) and what.func.id == "dict":
                    self.dicts.setdefault(to.id, set()).update(k.arg for k in what.keywords if k.arg)

    def _check_call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            dotted = self.known.get(function.id)
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in self.known:
            dotted = f"{self.known[function.value.id]}.{function.attr}"
        else:
            return
        found = self.source.find(dotted) if dotted else None
        signature = self.source.read_signature(found) if found else None
        if signature is None:
            return
        self.checked += 1
        given = {keyword.arg for keyword in node.keywords if keyword.arg}
        for starred in (keyword.value for keyword in node.keywords if keyword.arg is None):
            given |= self.dicts.get(starred.id, set()) if isinstance(starred, ast.Name) else set()
        if unknown := sorted(given - signature.names) if not signature.takes_more else []:
            self._add_finding(node.lineno, f"{dotted} takes no {', '.join(unknown)}")
        positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if signature.most is not None and len(positional) > signature.most:
            self._add_finding(node.lineno, f"{dotted} takes {signature.most} positional arguments, not {len(positional)}")
        is_open = any(keyword.arg is None for keyword in node.keywords) or len(positional) < len(node.args)
        if not is_open and len(signature.required - given) > len(positional):
            self._add_finding(node.lineno, f"{dotted} also requires {', '.join(sorted(signature.required - given))}")


def check(unpacked: Path, callers: Sequence[Path], *, through_objects: bool = True) -> tuple[int, list[Finding]]:
    """Return (number of lookups, findings) of some files or folders.

    Args:
        unpacked: Folder of the unpacked wheel.
        callers: Files or folders to check.
        through_objects: Whether to look up THROUGH_OBJECTS too.
    """
    source, checked, findings = Source(unpacked), 0, list[Finding]()
    for path in sorted(file for caller in callers for file in ([caller] if caller.is_file() else caller.rglob("*.py"))):
        caller = Caller(path, source)
        caller.check_file()
        checked, findings = checked + caller.checked, findings + caller.findings
    for dotted, keywords in THROUGH_OBJECTS.items() if through_objects else ():
        if not source.has_package(dotted.split(".")[0]):
            continue
        checked += 1
        found = source.find(dotted)
        signature = source.read_signature(found) if found else None
        if found is None:
            findings.append(Finding("through an object", f"there is no {dotted}"))
        elif signature and not signature.takes_more and (unknown := sorted(set(keywords) - signature.names)):
            findings.append(Finding("through an object", f"{dotted} takes no {', '.join(unknown)}"))
    return checked, findings


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="folder that contains the wheel's package, such as site-packages")
    parser.add_argument("--caller", type=Path, nargs="*", help="files or folders to check (default: megatron_grpo)")
    args = parser.parse_args(argv)
    if not any(Source(args.unpacked).has_package(name) for name in UPSTREAM):
        parser.error(f"{args.unpacked} contains none of {', '.join(UPSTREAM)}: pass the folder into which the wheel was unpacked")
    checked, findings = check(args.unpacked, args.caller or [ROOT / "megatron_grpo"], through_objects=not args.caller)
    for finding in findings:
        print(f"{finding.where}: {finding.what}")
    print(f"{checked} lookups, {len(findings)} missing")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
