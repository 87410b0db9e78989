"""Files that a run finds other than it left them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.end_to_end.runs import records
from tools.torturing.promises import FALLS_BACK, UNMOVED
from tools.torturing.target import STEPS, Broken, Fault, Victim


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


OF_EACH_STEP = ("metrics.jsonl", "schedule.jsonl")
HARMS = {"a bit flipped": flip, "cut": cut, "empty": empty, "gone": gone}


def newest(victim: Victim) -> Path:
    return victim.out / "checkpoints" / "iter_0000007"


def one_of(directory: Path, pattern: str) -> Path:
    return max(directory.glob(pattern), key=lambda path: path.stat().st_size)


def damaged(pattern: str, harm: Callable[[Path], None]) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.half_done()
        harm(one_of(newest(victim), pattern))
        victim.continues(says=["iter_0000007", "WARNING", r"Resuming from \S+iter_0000006"])

    return hurt


def all_damaged(victim: Victim) -> None:
    victim.half_done()
    for directory in (victim.out / "checkpoints").glob("iter_*"):
        flip(one_of(directory, "*.distcp"))
    victim.run().must(None, "No usable checkpoint to resume from")
    if victim.checkpoints() != [6, 7]:
        raise Broken("the damaged checkpoints were touched")


def log_damaged(name: str, harm: Callable[[Path], None]) -> Callable[[Victim], None]:
    """What is lost of the records is gone; the run itself goes on."""

    def hurt(victim: Victim) -> None:
        victim.half_done()
        harm(victim.out / name)
        ended = victim.run()
        if ended.code == 0:
            if name in OF_EACH_STEP:
                ended.must(0, rf"{name} has no line of \d of the 7 optimizer steps")
            last = records(victim.out / "metrics.jsonl")[-1]
            if last["step"] != STEPS:
                raise Broken(f"the last line of metrics.jsonl is of step {last['step']}")
        else:
            ended.must(None, name.partition("/")[0])

    return hurt


def pointer(text: str | None) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.half_done()
        path = victim.out / "checkpoints" / "latest_checkpointed_iteration.txt"
        path.unlink() if text is None else path.write_text(text)
        ended = victim.run()
        if ended.code:
            ended.must(None, "latest_checkpointed_iteration")
            path.unlink()
            victim.run().must(0)
        victim.is_whole()

    return hurt


def leftovers(victim: Victim) -> None:
    victim.half_done()
    for name in ("iter_0000009", ".iter_0000008.new", "iter_0000008.tmp"):
        (victim.out / "checkpoints" / name).mkdir()
        (victim.out / "checkpoints" / name / "__0_0.distcp").write_bytes(b"x" * 1000)
    victim.continues()


def locked(victim: Victim) -> None:
    victim.half_done()
    (victim.out / "run.lock").write_text(json.dumps({"pid": 999999, "host": socket.gethostname()}))
    victim.continues()


def moved(victim: Victim) -> None:
    victim.half_done()
    victim.out = victim.out.rename(victim.folder / "elsewhere")
    victim.continues()


def damages() -> Iterator[Fault]:
    for name, pattern in {"manifest": "manifest.json", "shard": "*.distcp", "metadata": ".metadata", "common": "common.pt",
                          "progress": "grpo/progress.json", "prompts": "grpo/prompts.json"}.items():  # fmt: skip
        for how, harm in HARMS.items():
            yield Fault(f"damage/{name} {how}", FALLS_BACK, damaged(pattern, harm))
    yield Fault("damage/every checkpoint", "refused; no file changes", all_damaged)
    for how, text in {"gone": None, "garbage": "yes\n", "empty": "", "ahead": "99\n", "behind": "6\n"}.items():
        yield Fault(f"damage/pointer {how}", "resumes from the newest checkpoint, or an error", pointer(text))
    for name in ("metrics.jsonl", "schedule.jsonl", "evaluations.jsonl", "config.yaml", "plan.json"):
        for how in ("cut", "gone"):
            promise = "the run ends without error" + (" and logs which steps it lacks" if name in OF_EACH_STEP else "")
            yield Fault(f"damage/{name} {how}", promise, log_damaged(name, HARMS[how]))
    yield Fault("damage/leftovers of saves", UNMOVED, leftovers)
    yield Fault("damage/lock of a dead run", UNMOVED, locked)
    yield Fault("damage/output_dir moved", UNMOVED, moved)
