"""Compare two checkouts byte by byte: help, plans, error messages, translations, imports, and the files of small runs.

    python tools/same_as_before.py OLD NEW                       # folders, or git revisions, which are checked out for the comparison
    python tools/same_as_before.py ed38954 . --only plan help    # some kinds: help, plan, sentences, translations, imports, runs
    python tools/same_as_before.py ed38954 --keep /tmp/before    # save one side's answers; the folder can then be used as OLD

The tool checks a refactoring. It prints one line per kind (`plan: 71 of 71 the same`) and the first difference of each case that differs.
The exit code is 1 if anything differs, or if a case compares nothing because both sides fail in the same way. The tool uses the command
line and file formats only. Lists of cases and scripted samplers come from each side's own tests, and a name that an input imports
(`@StepOutput`) is looked up in each side's files, so the folders of the two sides may differ.

Each side runs in its own processes, both at the same time, with the packages of this environment except editable installs of this package.
Times, paths and process IDs are masked. Checkpoints after the first step contain its gradients (`exp_avg`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import pickle
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
Results = Iterator[tuple[str, str]]  # (name, text) of each case
ENVIRONMENT = {"COLUMNS": "140", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "",
               "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1",
               "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # fmt: skip
ASKED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MASKED = [re.compile(pattern) for pattern in (
    rf"{tempfile.gettempdir()}/[\w./-]+", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?", r"\b\d+(\.\d+)? s\b",
    r"(?<=pid )\d+|(?<=process )\d+|(?<=127\.0\.0\.1:)\d+", r"0x[0-9a-f]{6,}", r"(?m) \d\.\d{3}$",
    r"megatron_grpo/[\w/]+\.py:\d+", r'(?<=File "TREE/)[^"]*", line \d+', r'"seconds\w*": [\d.]+',
)]  # fmt: skip
TIMED = re.compile(r"^time/|seconds|tokens_per_second")  # metrics whose values depend on the time
# Output of a case that failed in itself. `sentences` has imports that fail on purpose, but not of modules of this package.
OURS = "'(megatron_grpo|tests)"
BROKEN = {"sentences": rf"Traceback \(most recent|cannot import name .* from {OURS}\b|No module named {OURS}\b",
          "runs": r"(?m)Traceback \(most recent|^exit code (?!0$)"}  # fmt: skip
ANY_BROKEN = r"Traceback \(most recent|ImportError|ModuleNotFoundError|cannot import name|No module named"
# Executed at the start of a side's process: an editable install of another checkout would provide modules that the tree lacks.
OWN_TREE = """import site, sys
for folder in {folders!r}:
    site.addsitedir(folder)
sys.meta_path[:] = [f for f in sys.meta_path if "megatron_grpo" not in getattr(sys.modules.get(f.__module__), "MAPPING", ())]
"""
PLAIN_RUN = """import json, sys
from tests.end_to_end import scripted

code = scripted.train(0, 1, sys.argv[1:])
files = [name for name, module in sys.modules.items() if name.split(".")[0] == "megatron_grpo" and getattr(module, "__file__", None)]
print(json.dumps([code, files]))
"""


def write_inputs() -> None:
    """Write the models, data and rewards that both sides read into the working folder, with this tool's own tree."""
    from tests.chat_models import DROPS, write_chat
    from tests.seeing import as_bytes, picture, write_seeing
    from tests.tiny_models import FAMILIES, write_tiny
    from tests.unit.test_composition import COMMON, MODELS

    for architecture, shape in MODELS.items():
        Path(f"{architecture}.json").write_text(json.dumps({"architectures": [architecture], **COMMON, **shape, "num_experts": 16}))
    for family in FAMILIES:
        write_tiny(family, family)
    for seed, name in enumerate(("small", "other")):
        write_tiny(name, tied=True, std=0.1, seed=seed)
    write_chat("chat", template=DROPS, ends=10.5, layers=1)
    write_seeing(Path("seeing"))
    for name in ("0.png", "1.png"):
        Path(name).write_bytes(as_bytes(picture(60, 70, seed=int(name[0]))))
    seen = [{"messages": [{"role": "user", "content": f"{'<image>' * (i % 2)}How many {i}?"}], "images": [f"{i // 2}.png"] * (i % 2)}
            for i in range(4)]  # fmt: skip
    rows = [{"prompt": " ".join(str(4 + (7 * i + j) % 100) for j in range(3 + i % 4)), "answer": str(i)} for i in range(16)]
    chats = [{"prompt": [{"role": "user", "content": f"q {i}"}], "answer": i} for i in range(6)]
    for name, lines in (("rows", rows), ("seen", seen), ("chats", chats)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("lengths.txt").write_text("".join(f"{n} {3 * n}\n" for n in range(10, 900, 7)))


def write_own_files(tree: Path) -> None:
    """Write the files of same_as_before.yaml, with `@Name` replaced by the module of the tree that defines the class Name."""
    sources = {file: file.read_text() for file in sorted((tree / "megatron_grpo").rglob("*.py"))}

    def find_module(found: re.Match[str]) -> str:
        at = [file for file, source in sources.items() if re.search(rf"^class {found[1]}\b", source, re.MULTILINE)]
        if len(at) != 1:
            raise SystemExit(f"the class {found[1]} of an input is defined in {len(at)} files: {', '.join(map(str, at))}")
        return make_module_name(at[0], tree)

    for name, text in ASKED["files"].items():
        Path(name).write_text(re.sub(r"(?<=from )@(\w+)", find_module, text))


def make_module_name(file: Path, tree: Path) -> str:
    """Return the dotted name of a file's module."""
    return ".".join(file.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")


# ---- one side ----------------------------------------------------------------------------------------------------------------------------


def run_command(*words: str) -> str:
    """Run a command in this process and return its exit code, output and errors."""
    from megatron_grpo import cli

    out, err = io.StringIO(), io.StringIO()
    before, listener = dict(os.environ), logging.StreamHandler(err)
    logging.getLogger().addHandler(listener)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(list(words))
    except SystemExit as error:
        code = error.code
    finally:
        logging.getLogger().removeHandler(listener)
        os.environ.clear()
        os.environ.update(before)
    return f"exit code {code}\n{out.getvalue()}\n{err.getvalue()}"


def iterate_help(tree: Path) -> Results:
    """Yield the help of the program and of each command."""
    commands = re.findall(r"^  ([a-z][\w-]*) {2,}\S", run_command("--help"), re.MULTILINE)
    if not commands:
        raise SystemExit(f"`--help` lists no command:\n{run_command('--help')}")
    for words in ((), ("--help",), ("--version",), *((command, "--help") for command in commands)):
        yield " ".join(words), run_command(*words)


def iterate_plans(tree: Path) -> Results:
    """Yield the plans of all models with their settings, and of the configuration files of examples and recipes."""
    common = ASKED["plan_with"].split()
    families = [path.parent.name for path in sorted(Path().glob("*/config.json")) if path.parent.name not in ("chat", *ASKED["plans"])]
    tiny = {family: ["--tensor_model_parallel_size 2 --sequence_parallel true"] for family in families}
    for model, rows in {**ASKED["plans"], **tiny}.items():
        for words in rows:
            yield f"{model} {words}", run_command("plan", "--json", *common, "--model", model, *words.split())
    for file in sorted([*tree.glob("examples/qwen3_*/config.yaml"), *tree.glob("docs/recipes/*.yaml")]):
        more = "--world_size 64" if file.parent.name == "recipes" else ASKED["example_with"]
        yield f"{file.relative_to(tree)}", run_command("plan", "--json", "--config", str(file), *more.split())


def iterate_sentences(tree: Path) -> Results:
    """Yield the error messages for all bad inputs."""
    bad_inputs = importlib.import_module("tests.bad_inputs")
    good, here = bad_inputs.write_good(Path("good").absolute()), Path("cases").absolute()
    for number, case in enumerate(bad_inputs.make_all_cases()):
        at = here / str(number)
        at.mkdir(parents=True)
        words = bad_inputs.split_words(case, at, good)
        for command in case.commands if number % 10 == 0 else case.commands[-1:]:  # `plan` and `train` print the same errors, as CI checks
            outcome = bad_inputs.run(command, words, case.environ, at)
            yield f"{command}: {case.name}", f"exit code {outcome.code}\n{outcome.stdout}\n{outcome.stderr}"
        shutil.rmtree(at)


def iterate_translations(tree: Path) -> Results:
    """Yield the translation of every argument in the lists of other systems, with a value other than its default, and of the test cases."""
    for file in sorted((ROOT / "tools/theirs").glob("*.tsv")):
        for line in file.read_text().splitlines()[1:]:
            name, _, default = line.partition("\t")
            other = {"true": "false", "false": "true", "none": "2"}.get(default, "2" if re.fullmatch(r"[-.\de]+", default) else default)
            yield f"{file.stem} {name}={other}", run_command("plan", "--json", "--dialect", file.stem, f"--{name}={other}")
    for words in iterate_dialect_cases(tree):
        yield " ".join(words), run_command("plan", "--print_config", "true", "--dialect", *words)


def iterate_dialect_cases(tree: Path) -> Iterator[list[str]]:
    """Yield the command lines of tests parametrized with `dialect` and `words`."""
    for file in sorted(tree.glob("tests/unit/*/test_*.py")):
        if '("dialect", "words"' not in file.read_text():
            continue
        module = importlib.import_module(".".join(file.relative_to(tree).with_suffix("").parts))
        for mark in itertools.chain.from_iterable(getattr(test, "pytestmark", ()) for test in vars(module).values() if callable(test)):
            if mark.name == "parametrize" and {"dialect", "words"} <= set(mark.args[0]):
                for row in mark.args[1]:
                    dialect, words = (getattr(row, "values", row)[mark.args[0].index(name)] for name in ("dialect", "words"))
                    yield [dialect, *(words.split() if isinstance(words, str) else words)]


def iterate_imports(tree: Path) -> Results:
    """Yield the package files that a plain run imports, and whether each module can be imported first.

    A file is identified by its base name and a number, so that a moved file is not a difference.
    """
    flags = ["--model", "small", "--output_dir", "plain", *ASKED["run_with"].split(), *ASKED["plain_run"].split()]
    ended = subprocess.run([sys.executable, "-c", PLAIN_RUN, *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode or not ended.stdout.strip().endswith("]"):
        raise SystemExit(f"the plain run ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    code, files = json.loads(ended.stdout.splitlines()[-1])
    yield "a plain run ends", f"exit code {code}"
    yield "files that a plain run imports", str(len(files))
    for short, _ in iterate_short_names(files):
        yield f"a plain run imports {short}", "yes"
    for name in importlib.import_module("tests.zygote").MODULES:  # imported once for all forks
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    modules = [make_module_name(file, tree) for file in sorted((tree / "megatron_grpo").rglob("*.py")) if file.stem != "__main__"]
    for short, name in iterate_short_names(modules):
        yield f"{short} alone", try_import(name)


def iterate_short_names(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (base name with a number if it is not unique, name) of each dotted name."""
    seen: Counter[str] = Counter()
    for name in sorted(names):
        short = name.rpartition(".")[2]
        seen[short] += 1
        yield (f"{short} ({seen[short]})" if seen[short] > 1 else short), name


def try_import(name: str) -> str:
    """Return the result of importing a module in a fork that has imported no other module of the package."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
            text = "can be imported"
        except BaseException as error:  # noqa: BLE001 - the result is whatever the import raises
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    return text or f"the import ended the process with status {status}"


def iterate_runs(tree: Path) -> Results:
    """Yield the output of small training runs, of commands on their results, and the values of their files."""
    from tests.end_to_end import runs, scripted, test_images
    from tests.ranks import run_ranks
    from tests.servers import ASKS, Server

    def split_flags(words: str) -> list[str]:
        return [word.replace("@", f"{os.getcwd()}/runs/", 1) if word.startswith("@") else word for word in words.split()]

    def run_rank(rank: int, world_size: int, by: str, flags: list[str]) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = {"images": test_images, "vllm": runs}.get(by, scripted).train(rank, world_size, flags)
        return f"exit code {code}\n{err.getvalue() if code else ''}"

    server = Server(Path("serving").absolute(), Path("small").absolute())
    try:
        for name, run in ASKED["runs"].items():
            flags = split_flags(f"--model {run.get('model', 'small')} --output_dir @{name} {ASKED['run_with']} {run['flags']}")
            if "SERVER" in flags:
                flags[flags.index("SERVER")] = f"@{server.wait().address_file}"
            yield name, "".join(run_ranks(run_rank, run["ranks"], run.get("by", "a table"), flags, timeout=300, env=ASKS))
    finally:
        server.close()
    for words in ASKED["after"]:
        dumps = [
            path for name in ("capsules", "debug_dump") for path in Path("runs/dense").glob(f"{name}/step_*")
        ]  # names in old and new versions
        dump = "/".join(dumps[0].parts[-2:]) if dumps else "none"
        yield words, run_ranks(lambda _, __, *argv: run_command(*argv), 1, *split_flags(words.replace("DUMP", dump)), timeout=300)[0]
    files = sorted(path for path in Path("runs").rglob("*") if path.is_file())
    yield "files", "\n".join(map(str, files))
    for file in files:
        yield from iterate_values(file)


def iterate_values(file: Path) -> Results:
    """Yield the values of a run's file except those that depend on the time."""
    if file.name.endswith(".jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        yield str(file), "\n".join(f"{name}: {value!r}" for line in lines for name, value in line.items() if not TIMED.search(name))
    elif file.suffix in (".safetensors", ".npz"):
        for name, tensor in sorted((load_file if file.suffix == ".safetensors" else np.load)(file).items()):
            if file.name == "rng.npz" and name.startswith(("python/", "numpy/")):
                continue  # unseeded generators that nothing draws from
            yield f"{file} {name}", f"{tensor.dtype} {tensor.shape} {hashlib.sha256(tensor.tobytes()).hexdigest()}"
    elif file.name == ".metadata":
        for index, part in pickle.loads(file.read_bytes()).storage_data.items():
            with (file.parent / part.relative_path).open("rb") as stream:
                stream.seek(part.offset)
                yield f"{file.parent} {index.fqn} {index.offset}", hashlib.sha256(stream.read(part.length)).hexdigest()
    elif file.name in ("config.json", "generation_config.json", "adapter_config.json", "config.yaml"):
        yield str(file), file.read_text()


KINDS: dict[str, Callable[[Path], Results]] = {
    "help": iterate_help,
    "plan": iterate_plans,
    "sentences": iterate_sentences,
    "translations": iterate_translations,
    "imports": iterate_imports,
    "runs": iterate_runs,
}


WITH_INPUTS = ("plan", "imports", "runs")


def write_answers(tree: Path, folder: Path, kind: str) -> None:
    """Write results.jsonl of one kind with all side-specific and time-dependent text masked.

    The process must have `tree` first on its path.

    Args:
        tree: Checkout of the side.
        folder: Working folder with the inputs.
        kind: Key of KINDS.
    """
    os.chdir(folder)
    if kind in WITH_INPUTS:
        write_own_files(tree)
    with open("results.jsonl", "w") as out:
        for name, text in KINDS[kind](tree):
            print(json.dumps([mask(name, tree, folder), mask(text, tree, folder)]), file=out, flush=True)
    files = {name: Path(module.__file__) for name, module in sys.modules.items() if getattr(module, "__file__", None)}
    own = {name: file for name, file in files.items() if name.split(".")[0] in ("megatron_grpo", "tests")}
    if foreign := [f"{name} from {file}" for name, file in own.items() if not file.resolve().is_relative_to(tree.resolve())]:
        raise SystemExit(f"the process of {tree} imported modules of another tree: {', '.join(foreign)}")


def mask(text: Any, tree: Path, folder: Path) -> str:
    """Return a text with paths, times and process IDs masked."""
    text = str(text).replace(str(folder), "HERE").replace(str(tree), "TREE")
    for pattern in MASKED:
        text = pattern.sub("...", text)
    return text


# ---- comparing ---------------------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Compare the two sides and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a folder, a git revision, or a folder that --keep wrote")
    parser.add_argument("new", nargs="?", help="a folder or a git revision")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="compare only these kinds")
    parser.add_argument("--keep", metavar="FOLDER", help="save the answers of OLD there and exit")
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)  # internal: working folder, and a kind or `inputs`
    asked = parser.parse_args()
    if asked.ask:
        folder, kind = Path(asked.ask[0]), asked.ask[1]
        sys.path[0] = asked.new
        if kind != "inputs":
            write_answers(Path(asked.new), folder, kind)
        else:
            os.chdir(folder)
            write_inputs()
        return 0
    with tempfile.TemporaryDirectory(prefix="same_as_before_") as folder, contextlib.ExitStack() as stack:
        named = {"old": asked.old, **({"new": asked.new} if asked.new else {})}
        trees = {side: stack.enter_context(checkout(name, Path(folder) / f"{side}_tree")) for side, name in named.items()}
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        write_python(Path(folder) / "python")
        if set(WITH_INPUTS) & set(asked.only):
            run_side(ROOT, inputs, "inputs")
        if not asked.keep:
            return 0 if all([compare_kind(kind, trees, Path(folder)) for kind in asked.only]) else 1
        Path(asked.keep).mkdir(parents=True, exist_ok=True)
        for kind in asked.only:
            shutil.copyfile(get_answers(kind, "old", trees["old"], Path(folder)), Path(asked.keep) / f"{kind}.jsonl")
    return 0


@contextlib.contextmanager
def checkout(name: str, at: Path) -> Iterator[Path]:
    """Yield a folder, or a git revision checked out into a temporary worktree."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(at), name], check=True)
    try:
        yield at
    finally:
        subprocess.run([*git, "remove", "--force", str(at)], check=True)


def write_python(at: Path, folders: Sequence[str] | None = None) -> None:
    """Write an environment with the packages of this one, without editable installs of this package.

    The processes that a side starts (ranks, servers) use this Python too.

    Args:
        at: Folder of the environment.
        folders: Folders of packages; None: those of this environment.
    """
    venv.create(at, symlinks=True, with_pip=False)
    [packages] = at.glob("lib/python*/site-packages")
    folders = folders or [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    (packages / "own_tree.py").write_text(OWN_TREE.format(folders=folders))
    (packages / "own_tree.pth").write_text("import own_tree\n")


def run_side(tree: Path, folder: Path, kind: str) -> None:
    """Run one side's process, which writes the inputs or the answers of one kind."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    command = [str(folder.parent / "python/bin/python"), str(Path(__file__).resolve()), str(tree), str(tree), "--ask", str(folder), kind]
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if ended.returncode:
        raise SystemExit(f"{kind} of {tree} ended early with {ended.returncode}:\n{ended.stderr[-6000:]}")


def get_answers(kind: str, side: str, tree: Path, folder: Path) -> Path:
    """Return the file with one side's answers; if `tree` was written by --keep, the file there."""
    if (tree / f"{kind}.jsonl").is_file():
        return tree / f"{kind}.jsonl"
    side_folder = folder / f"{side}_{kind}"  # same length on both sides, so that lines wrap equally
    shutil.copytree(folder / "inputs", side_folder)
    run_side(tree, side_folder, kind)
    return side_folder / "results.jsonl"


def compare_kind(kind: str, trees: dict[str, Path], folder: Path) -> bool:
    """Ask both sides, print the differences, the cases that compare nothing and a summary; return whether all is equal."""
    with ThreadPoolExecutor(2) as both:
        files = both.map(lambda side: get_answers(kind, side, trees[side], folder), trees)
    old, new = (dict(map(json.loads, file.open())) for file in files)
    differ = [name for name in (*old, *(new.keys() - old.keys())) if old.get(name) != new.get(name)]
    for name in differ[:40]:
        print(f"{kind}: {name!r}\n" + find_first_difference(old.get(name), new.get(name)))
    nothing = {name: line for name in old if name not in differ and (line := find_error(kind, old[name]))}
    for name, line in itertools.islice(nothing.items(), 40):
        print(f"{kind}: {name!r} compares nothing, both sides fail:\n  = {line}")
    total = len(old.keys() | new.keys())
    print(f"{kind}: {total - len(differ)} of {total} the same" + (f", and {len(nothing)} compare nothing" if nothing else ""), flush=True)
    return not differ and not nothing and total > 0


def find_error(kind: str, text: str) -> str | None:
    """Return the line that shows that a case failed in itself; None if it did not."""
    found = re.search(BROKEN.get(kind, ANY_BROKEN), text)
    return found and text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0][:200]


def find_first_difference(old: str | None, new: str | None) -> str:
    """Return the first line that differs between two texts."""
    if old is None or new is None:
        return f"  only {'new' if old is None else 'old'} has it"
    pairs = itertools.zip_longest(old.splitlines(), new.splitlines())
    number, (one, other) = next((number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    at = next((i for i, (a, b) in enumerate(zip(one or "", other or "")) if a != b), 0)
    shown = [line if line is None else ("..." if at > 60 else "") + line[max(0, at - 60) : at + 100] for line in (one, other)]
    return f"  line {number}\n  - {shown[0]}\n  + {shown[1]}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a library prints pages of leak reports at a regular exit
