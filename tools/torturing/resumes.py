"""Faults that change flags, the parallel layout or input files between a run and its resumption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

from tests.end_to_end.runs import write_inputs
from tools.torturing.promises import UNMOVED
from tools.torturing.target import BrokenPromiseError, Fault, Target


def resume_with(*flags: str, code: int, says: str = "", same: bool = False) -> Callable[[Target], None]:
    """Return a fault that resumes the run with other flags.

    Args:
        flags: Flags added to the command.
        code: Expected exit code; after 2, no file may have changed.
        says: Pattern that the output must contain.
        same: Whether the results must equal those of the undisturbed run.
    """

    def inject(target: Target) -> None:
        target.copy_half_done()
        before = target.compute_fingerprint()
        target.run(*flags).require(code if code == 0 else None, *([says] if says else []), *([r"exitcode +: 2"] if code == 2 else []))
        if code == 2:
            if target.compute_fingerprint() != before:  # unchanged files resume as they do for the other faults
                raise BrokenPromiseError("the run was refused, but files in output_dir changed")
        elif same:
            target.check_results()

    return inject


def change_input(what: str, code: int | None, says: str) -> Callable[[Target], None]:
    """Return a fault that changes an input file before the run is resumed.

    Args:
        what: Name of the change.
        code: Expected exit code; None: any except 0.
        says: Pattern that the output must contain.
    """

    def inject(target: Target) -> None:
        target.copy_half_done()
        data, reward = target.folder / "data.jsonl", target.folder / "reward.py"
        if what == "a row more":
            data.write_text(data.read_text() + json.dumps({"prompt": "5 6", "answer": "x"}) + "\n")
        elif what == "another order":
            data.write_text("".join(sorted(data.read_text().splitlines(keepends=True), reverse=True)))
        elif what == "data gone":
            data.unlink()
        elif what == "another model":
            shutil.rmtree(target.folder / "model")
            write_inputs(target.folder / "other", rows=10, seed=1)
            shutil.copytree(target.folder / "other" / "model", target.folder / "model")
        elif what == "another reward":
            reward.write_text(reward.read_text().replace("== 0", "== 1"))
        elif what == "a comment in the reward":
            reward.write_text(reward.read_text() + "\n# nothing\n")
        elif what == "reward gone":
            reward.unlink()
        target.run().require(code, says)

    return inject


def list_resumes() -> Iterator[Fault]:
    """Yield the faults that change something before the run is resumed."""
    tp, pp = ["--tensor_model_parallel_size", "2"], ["--pipeline_model_parallel_size", "2"]
    for name, flags, code, says, same in [
        ("lr 5e-4", ["--lr", "5e-4"], 0, "lr  0.001 -> 0.0005", False), ("tensor parallel", tp, 0, "", False),
        ("pipeline parallel", pp, 0, "", False), ("micro-batches of 4", ["--micro_batch_size", "4"], 0, "", False),
        ("another seed", ["--seed", "7"], 2, "seed", False), ("G 2", ["--num_generations", "2"], 2, "num_generations", False),
        ("bfloat16", ["--torch_dtype", "bfloat16"], 2, "torch_dtype", False),
        ("fewer steps", ["--max_steps", "5"], 0, "The run is complete", False),
        ("never", ["--resume", "never"], 2, "contains an earlier run", False),
        ("a missing path", ["--resume", "/nowhere"], 2, "has no checkpoint", False),
        ("a misspelled setting", ["--micro_batchsize", "2"], 2, "micro_batch_size", False),
        ("an impossible size", ["--global_batch_size", "15"], 2, "global_batch_size", False),
        ("saves at each step", ["--save_steps", "1"], 0, "", True),
    ]:  # fmt: skip
        promise = "refused; no file changes" if code == 2 else UNMOVED if same else "resumes and logs what changed"
        yield Fault(f"resume/{name}", promise, resume_with(*flags, code=code, says=says, same=same))
    for what, code, says in [("a row more", None, "data"), ("another order", None, "data"), ("data gone", None, "data.jsonl"),
                             ("another model", None, "model"), ("another reward", 0, "reward"), ("a comment in the reward", 0, "reward"),
                             ("reward gone", None, "reward.py")]:  # fmt: skip
        yield Fault(f"resume/{what}", "refused, or resumes and logs it", change_input(what, code, says))
