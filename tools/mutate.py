"""Breaks one place of a module at a time, and asks whether the tests that mirror it notice.

    python tools/mutate.py quick [--sample 150] [--seed 0] [--only metrics/journal.py]
    python tools/mutate.py ranks --sample 25          # modules whose tests need real ranks: a minute a mutant

A mutation flips a comparison, swaps + and -, * and /, `and` and `or`, True and False, moves a whole number by 1, negates a condition, or
takes out a call, a `raise` or an `x += y`, in a copy of the tree. Killed: a test fails, or takes five times as long. Those that
change nothing anybody could see are in tools/equivalent_mutants.txt, each with its reason. Ends with 1 if any other survives.
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
METRICS = "tests/unit/metrics tests/unit/test_rollouts.py"
WHOLE_RUNS = "tests/end_to_end/test_many_steps.py"
STEP = "tests/distributed/test_train_step.py"
FOREIGN = "tests/unit/settings tests/unit/sizing"
# Module -> the tests that mirror it.
ROOMS: dict[str, dict[str, str]] = {
    "quick": {
        "clock.py": METRICS,
        **{f"metrics/{name}.py": METRICS for name in ("__init__", "drift", "journal", "records", "rollout", "schedule")},
        "rollouts.py": "tests/unit/test_rollouts.py",
        "policy/guard.py": "tests/unit/policy/test_guard.py",
        "grpo/metrics.py": "tests/unit/grpo/test_metrics.py tests/unit/grpo/test_against_trl.py",
        **{f"sizing/dialects/{name}.py": FOREIGN for name in ("__init__", "cs336", "explain", "features", "skyrl", "swift", "trl")},
        **{f"settings/{name}.py": FOREIGN for name in ("foreign", "script", "remedies")},
    },
    "ranks": {
        "policy/optimizer.py": STEP,
        "policy/policy.py": f"{STEP} tests/distributed/test_step_parity.py",
        "policy/reference.py": "tests/distributed/test_reference_model.py",
        "pending.py": f"{WHOLE_RUNS} -k 'straddle and float64'",
        "train.py": f"{WHOLE_RUNS} -k 'between_two_rollouts or was_that_long'",
    },
}  # fmt: skip
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(what is replaced, by which source) of this node alone."""
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
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def sites(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST, str]]:
    """(function, what is replaced, by which source) of a tree, without annotations, decorators and what errors say."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            is_named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            where = f"{inside}.{child.name}".strip(".") if is_named else inside
            yield from ((where, *change) for change in changes(child))
            yield from sites(child, where)


def mutants(path: Path) -> list[tuple[str, bytes]]:
    """(name, whole mutated source) of everything that can be changed in a module."""
    source = path.read_bytes()
    begins = [0, *(i + 1 for i, byte in enumerate(source) if byte == ord("\n"))]
    found = []
    for where, node, new in sites(ast.parse(source)):
        first, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(source[first:end].decode().split())
        found.append(
            (
                f"{path.relative_to(ROOT / 'megatron_grpo')} {where or 'module'}: {old} => {new}",
                source[:first] + new.encode() + source[end:],
            )
        )
    return found


def run_tests(tree: Path, arguments: str, limit: float) -> str:
    """`passed`, `failed` or `too slow`. Forked from this process, which has imported what takes long and nothing that is mutated."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        sys.path[:0] = [str(tree)]
        quiet = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        import pytest

        os._exit(int(pytest.main([*shlex.split(arguments), "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"])))
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if status == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path begins so")
    args = parser.parse_args()
    import torch, transformers  # noqa: E401, F401, I001 - takes seconds, and every mutant needs it

    sys.dont_write_bytecode = True  # two mutants of one second and one length would share it
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    table = {module: tests for module, tests in ROOMS[args.rooms].items() if module.startswith(args.only)}
    every = [(module, *mutant) for module in table for mutant in mutants(ROOT / "megatron_grpo" / module)]
    drawn = sorted(random.Random(args.seed).sample(every, min(args.sample, len(every))), key=lambda mutant: mutant[0])
    harmless = {line.partition("  # ")[0] for line in (ROOT / "tools" / "equivalent_mutants.txt").read_text().splitlines()}
    counts, limits = {"killed": 0, "equivalent": 0, "survived": 0}, {}
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for file in subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tree / file)
        for module, mutant, source in drawn:
            if module not in limits:
                began = time.monotonic()
                assert run_tests(tree, table[module], 600) == "passed", (tree / "log").read_text()[-3000:]
                limits[module] = 5 * (time.monotonic() - began) + 10
            place = tree / "megatron_grpo" / module
            place.write_bytes(source)
            outcome = (
                "equivalent"
                if mutant in harmless
                else "survived"
                if run_tests(tree, table[module], limits[module]) == "passed"
                else "killed"
            )
            shutil.copy(ROOT / "megatron_grpo" / module, place)
            counts[outcome] += 1
            if outcome == "survived":
                print(mutant, flush=True)
    print(
        f"{args.rooms}, seed {args.seed}: {len(drawn)} of {len(every)} mutants; " + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
