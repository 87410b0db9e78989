"""Write repair tasks: modules with one changed operator or number, which the hidden tests of the module detect.

python examples/agent_swe/make_data.py      # writes data/train.jsonl and data/test.jsonl
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatron_grpo import run_program

ASK = "The file {module} has a bug: {hint}. Find and mend it; change nothing else. Check your work by running Python."
MODULES = {
    "intervals.py": ("some results of merge() or overlap() are wrong", '''
def overlap(a, b):
    """Length of what two intervals (begin, end) share."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))

def merge(intervals):
    """Intervals that touch become one."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
''', '''
assert overlap((0, 5), (3, 9)) == 2 and overlap((0, 1), (2, 3)) == 0 and overlap((2, 4), (1, 8)) == 2
assert merge([(5, 8), (1, 3), (3, 4)]) == [(1, 4), (5, 8)] and merge([(1, 9), (2, 3)]) == [(1, 9)] and merge([]) == []
'''),
    "roman.py": ("some numbers are written or read wrongly", '''
PAIRS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"),
         (4, "IV"), (1, "I")]

def write(number):
    text = ""
    for value, letters in PAIRS:
        while number >= value:
            text += letters
            number -= value
    return text

def read(text):
    number = place = 0
    for value, letters in PAIRS:
        while text[place:place + len(letters)] == letters:
            number += value
            place += len(letters)
    return number
''', '''
for number, text in ((1994, "MCMXCIV"), (3888, "MMMDCCCLXXXVIII"), (444, "CDXLIV"), (9, "IX"), (40, "XL"), (1, "I")):
    assert write(number) == text and read(text) == number
assert all(read(write(number)) == number for number in range(1, 400))
'''),
    "ledger.py": ("balances are wrong after some bookings", '''
class Ledger:
    def __init__(self, fee=1):
        self.fee, self.accounts = fee, {}

    def deposit(self, name, amount):
        if amount <= 0:
            raise ValueError("amount")
        self.accounts[name] = self.accounts.get(name, 0) + amount

    def transfer(self, source, target, amount):
        total = amount + self.fee
        if amount <= 0 or self.accounts.get(source, 0) < total:
            return False
        self.accounts[source] -= total
        self.accounts[target] = self.accounts.get(target, 0) + amount
        return True
''', '''
book = Ledger(fee=2)
book.deposit("a", 10); book.deposit("a", 5)
assert book.transfer("a", "b", 13) and book.accounts == {"a": 0, "b": 13}
assert not book.transfer("b", "a", 12) and not book.transfer("b", "a", 0) and book.transfer("b", "a", 11)
assert book.accounts == {"a": 11, "b": 0} and Ledger().fee == 1
for amount in (0, -1):
    try:
        book.deposit("a", amount)
    except ValueError:
        continue
    raise AssertionError(amount)
'''),
    "binary_search.py": ("it misses or misplaces some values", '''
def first_at_least(values, wanted):
    """Index of the first value that is not below `wanted`, in a sorted list."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low

def count(values, wanted):
    return first_at_least(values, wanted + 1) - first_at_least(values, wanted)
''', '''
values = [1, 3, 3, 3, 7, 9]
assert [first_at_least(values, wanted) for wanted in range(11)] == [0, 0, 1, 1, 4, 4, 4, 4, 5, 5, 6]
assert [count(values, wanted) for wanted in (0, 1, 3, 9)] == [0, 1, 3, 1] and first_at_least([], 1) == 0
'''),
}  # fmt: skip
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
         ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip


def make_bugs(source: str) -> Iterator[str]:
    """Yield the module with one operator or number changed, for each that can be."""
    tree = ast.parse(source)
    for number in range(len(list(ast.walk(tree)))):
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[number]
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPS:
            node.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            node.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        yield ast.unparse(ast.fix_missing_locations(changed)) + "\n"


def is_detected(source: str, tests: str) -> bool:
    """Return whether the tests of a module fail or time out."""
    return not run_program(f"{source}\n{tests}", seconds=2.0, memory_mb=512, as_main=False).clean


def main() -> None:
    """Write the tasks into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write train.jsonl and test.jsonl to")
    parser.add_argument("--max_bugs", type=int, help="maximum number of bugs per module")
    args = parser.parse_args()
    rows = []
    for module, (hint, source, tests) in MODULES.items():
        assert not is_detected(source, tests), module
        for changed in islice((bug for bug in make_bugs(source) if is_detected(bug, tests)), args.max_bugs):
            task = [{"role": "user", "content": ASK.format(module=module, hint=hint)}]
            rows.append({"prompt": task, "module": module, "files": {module: changed}, "tests": tests})
    random.Random(0).shuffle(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = max(1, len(rows) // 5)
    for name, part in (("test", rows[:held_out]), ("train", rows[held_out:])):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{args.out / name}.jsonl: {len(part)} tasks")


if __name__ == "__main__":
    main()
