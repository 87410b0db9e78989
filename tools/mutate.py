"""Mutate modules one place at a time, and report the mutants that their tests do not detect.

    python tools/mutate.py quick [--sample 150] [--seed 0] [--only metrics/metrics_logger.py]      # or agents, ranks: a minute per mutant
    python tools/mutate.py partial_rollouts                                                        # all mistakes of a list

A mutation changes a comparison (< to <=, == to !=), swaps + and -, * and /, `and` and `or`, True and False, adds 1 to an integer, negates a
condition, or removes a call, a `raise` or an augmented assignment, in a copy of the tree. A mutant is killed if a test fails or takes five
times as long. Mutants that no test can detect are listed with their reasons in tools/equivalent_mutants.txt. The exit code is 1 if any
other mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_grpo"
STEP, RUNS = "tests/distributed/test_train_step.py", "tests/end_to_end/test_many_steps.py"
EPISODES = "tests/unit/environments"
# Group -> tests -> modules that these tests cover.
TEST_GROUPS = {
    "quick": {
        "tests/unit/metrics -k 'not tensorboard and not plots_are_drawn and not closed_stdout'": "core/base/activity "
        "run/metrics/summary run/metrics/metrics_logger run/metrics/records run/metrics/rollout",  # without slow tests
        "tests/unit/trainer/test_rollouts.py": "core/trainer/rollouts",
        "tests/unit/trainer/test_partial_rollouts.py": "plugins/partial_rollouts/trainer plugins/partial_rollouts/engine",
        "tests/unit/policy/test_gradient_check.py": "core/policy/gradient_check",
        "tests/unit/grpo/test_metrics.py": "core/grpo/metrics",
        "tests/unit/grpo/test_zero_gradient.py": "core/grpo/zero_gradient",
        "tests/unit/config tests/unit/compat": "run/config/parse commands/compat/*",
    },
    "agents": {  # token accounting of an agent's episode: half a minute per mutant
        f"{EPISODES}/test_trajectory.py {EPISODES}/test_agents.py -k 'not planted and not used_port and not wildcard and not slow'": (
            "plugins/environments/agent_session plugins/environments/trajectory"
        ),
    },
    "ranks": {
        STEP: "core/policy/optimizer",
        f"{STEP} tests/distributed/test_step_parity.py": "core/policy/policy",
        "tests/distributed/test_reference_model.py": "core/policy/reference",
        f"{RUNS} tests/distributed/test_sample_buffer.py -k 'straddle and float64 or test_sample_buffer'": "core/trainer/sample_buffer",
        f"{RUNS} -k 'between_two_rollouts or was_that_long'": "core/train",
    },
}
PARTS, ENGINE = "tests/unit/trainer/test_partial_rollouts.py", "tests/distributed/test_partial_rollouts.py -k 'each_token_is and whole'"
SYNC = "tests/unit/trainer/test_weight_sync.py"
# Plausible mistakes: (module, description, right source, wrong source, tests).
NAMED = {
    "partial_rollouts": [
        ("plugins/partial_rollouts/engine", "all parts have one seed", "if num_sampled == 0:", "if True:", PARTS),
        ("plugins/partial_rollouts/engine", "all tokens have the version of the end", "versions=(*partial.versions, part.version)",
         "versions=(*(part.version for _ in partial.versions), part.version)", PARTS),
        ("plugins/partial_rollouts/engine", "the length limit is not lowered", "max_tokens=limit - len(tokens)", "max_tokens=limit", PARTS),
        ("plugins/partial_rollouts/engine", "the last token of a part is dropped",
         "np.array(part.token_ids, dtype=np.int64), np.array(part.logprobs, dtype=np.float32)",
         "np.array(part.token_ids[:-1], dtype=np.int64), np.array(part.logprobs[:-1], dtype=np.float32)", PARTS),
        ("plugins/partial_rollouts/engine", "parts are joined in another order", "np.concatenate([partial.token_ids, tokens])",
         "np.concatenate([tokens, partial.token_ids])", PARTS),
        ("plugins/partial_rollouts/engine", "a clock interrupts", "if step % STEPS_BETWEEN_AGREEMENTS == 0:",
         "if __import__('time').monotonic_ns() % 3 == 0:", PARTS),
        ("plugins/partial_rollouts/trainer", "nothing is too old", "if completion.versions[0] >= oldest",
         "if completion.versions[0] >= -1 or oldest", PARTS),
        ("core/rollout/colocated", "the prefix cache is not reset", "        self._forget_prefixes()\n", "", ENGINE),
        ("core/rollout/turns", "requests and their cache are kept over a weight sync", "        self.abort()\n        return turns",
         "        return turns", ENGINE),
    ],
    "silent": [  # mistakes that no metric of a run shows
        ("trainer/rollouts", "a small advantage is not computed", "np.ravel(group_advantages.advantages) == 0.0",
         "abs(np.ravel(group_advantages.advantages)) < 0.05", "tests/unit/trainer/test_rollouts.py"),
        ("trainer/weight_sync", "a server that joins is not proven", "    self._is_proven = not self.verify\n", "    pass\n", SYNC),
        ("trainer/weight_sync", "a server that joins is proven where nothing is verified",
         "    self._is_proven = not self.verify\n", "    self._is_proven = False\n", SYNC),
        ("policy/model", "the padding token's row has a gradient", "gradient.masked_fill(is_padding, 0.0)", "gradient",
         f"{STEP} -k padding"),
    ],
}  # fmt: skip
PAIRS = "FloorDiv Mult, Mult Div, Add Sub, And Or, Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot".split(", ")
SWAPS = {getattr(ast, old): getattr(ast, new) for one, other in map(str.split, PAIRS) for old, new in ((one, other), (other, one))}


def iterate_changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node to replace, new source) of the mutations of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, ast.unparse(ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, repr(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "pass"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def iterate_sites(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (function, node to replace, new source) of the mutations of a tree, except in annotations, decorators and f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            where = f"{inside}.{child.name}".strip(".") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else inside
            yield from ((where, *change) for change in iterate_changes(child))
            yield from iterate_sites(child, where)


def iterate_mutants(path: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yield (path, description, mutated source) of all mutants of a module."""
    source, module = path.read_bytes(), path.relative_to(PACKAGE)
    begins = [0, *(i + 1 for i, byte in enumerate(source) if byte == ord("\n"))]
    for where, node, new in iterate_sites(ast.parse(source)):
        first, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        line, old = source.splitlines()[node.lineno - 1].decode().strip(), " ".join(source[first:end].decode().split())
        yield path, f"{module} {where or 'module'}: {line} | {old} => {new}", source[:first] + new.encode() + source[end:]


def make_named_mutants(name: str) -> tuple[list[tuple[Path, str, bytes]], dict[Path, str]]:
    """Return (mutants, tests of each module) of a list of mistakes."""
    drawn, tests = [], {}
    for module, what, right, wrong, module_tests in NAMED[name]:
        path = PACKAGE / f"{module}.py"
        source = path.read_text()
        assert source.count(right) == 1, f"{module}: {right}"
        drawn.append((path, f"{module}: {what}", source.replace(right, wrong).encode()))
        tests[path] = module_tests
    return drawn, tests


def run_tests(tree: Path, tests: str, limit: float) -> bool:
    """Run tests in a fork and return whether they pass.

    The fork has all slow imports, and none of the mutated modules.

    Args:
        tree: Copy of the repository.
        tests: Arguments of pytest.
        limit: Limit in seconds.
    """
    child = os.fork()
    if not child:
        signal.alarm(int(limit))
        os.chdir(tree)
        sys.path[:0] = [str(tree)]
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        import pytest

        os._exit(int(pytest.main([*shlex.split(tests), "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"])))
    return os.waitpid(child, 0)[1] == 0


def iterate_outcomes(drawn: list[tuple[Path, str, bytes]], tests: dict[Path, str]) -> Iterator[tuple[str, str]]:
    """Yield (description, "killed", "equivalent" or "survived") of each mutant, tested in a copy of the tree.

    Args:
        drawn: Mutants.
        tests: Tests of each module.
    """
    harmless = {line.partition("  # ")[0] for line in (ROOT / "tools" / "equivalent_mutants.txt").read_text().splitlines()}
    limits: dict[Path, float] = {}
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for file in subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tree / file)
        for path, mutant, source in drawn:
            copy, began = tree / path.relative_to(ROOT), time.monotonic()
            if path not in limits:  # time of the unchanged module
                assert run_tests(tree, tests[path], 600), (tree / "log").read_text()[-3000:]
                limits[path] = 5 * (time.monotonic() - began) + 10
            whole = copy.read_bytes()
            copy.write_bytes(source)
            yield mutant, "equivalent" if mutant in harmless else "survived" if run_tests(tree, tests[path], limits[path]) else "killed"
            copy.write_bytes(whole)


def main() -> int:
    """Test the selected mutants, print the survivors and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=[*TEST_GROUPS, *NAMED], help="group of tests, or list of mistakes")
    parser.add_argument("--sample", type=int, default=150, help="number of mutants drawn from a group")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--only", default="*", metavar="MODULES", help="pattern of modules, such as metrics/metrics_logger.py or dialects/*.py"
    )
    args = parser.parse_args()
    import torch, transformers  # noqa: E401, F401, I001 - imported once, because it takes seconds

    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True  # two mutants of equal length written within a second would share a .pyc file
    if args.group in NAMED:
        drawn, tests = make_named_mutants(args.group)
        every = drawn
    else:
        globs = {glob: tests for tests, globs in TEST_GROUPS[args.group].items() for glob in globs.split()}
        tests = {path: tests for glob, tests in globs.items() for path in sorted(PACKAGE.glob(f"{glob}.py")) if path.match(args.only)}
        every = [mutant for path in tests for mutant in iterate_mutants(path)]
        drawn = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    counts = {"killed": 0, "equivalent": 0, "survived": 0}
    for mutant, outcome in iterate_outcomes(sorted(drawn, key=lambda mutant: mutant[0]), tests):
        counts[outcome] += 1
        if outcome == "survived":
            print(mutant, flush=True)
    print(f"{args.group}, seed {args.seed}: {len(drawn)} of {len(every)} mutants:", ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
