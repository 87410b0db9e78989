"""What is said of a rank that hangs, by the watchdog of the ranks or by the parent of one that is alone. No torch."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.base import launcher
from megatron_grpo.checkpoint.manifest import Folder
from megatron_grpo.run import stacks
from megatron_grpo.run.failures import PREFIX, tell
from megatron_grpo.run.page import Page

FOLDER = "watchdog"  # in output_dir
NAMED = 8  # culprits that are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is found of a rank after an alarm, by itself or by a neighbour. waits: in which collective, "" if in none."""

    words: str
    step: int
    age: float
    is_silent: bool = False
    is_stuck: bool = False
    waits: str = ""
    state: str = ""
    where: str = ""


def culprits(accounts: Mapping[int, Account]) -> list[int]:
    """Whom the others wait for: who is silent; or stuck alone; or waits in no collective; or is behind; [] if all wait for each other."""
    for is_one in (lambda one: one.is_silent, lambda one: one.is_stuck, lambda one: not one.waits):
        if found := [rank for rank, account in accounts.items() if is_one(account)]:
            first = min(accounts[rank].step for rank in found)
            return [rank for rank in found if accounts[rank].is_silent or accounts[rank].step == first]
    first, last = min(one.step for one in accounts.values()), max(one.step for one in accounts.values())
    return [rank for rank, one in accounts.items() if one.step == first] if first < last else []


def verdict(accounts: Mapping[int, Account], hosts: Mapping[int, str], timeout: float) -> str:
    """The sentences that name the culprits, and say what the others do."""
    named = culprits(accounts)
    lines = [_of_culprit(rank, hosts[rank], accounts[rank]) for rank in named[:NAMED]]
    if len(named) > NAMED:
        lines.append(f"So do {len(named) - NAMED} more ranks: {', '.join(map(str, named[NAMED : NAMED + 32]))}.")
    others = Counter(_of_other(accounts[rank]) for rank in accounts.keys() - set(named))
    doing = "; ".join(f"{count} {words}" for words, count in others.most_common(NAMED))
    if not named:
        lines.append("all ranks wait for each other, and none of them is behind: they are in different collectives, or the network fails "
                     f"({doing}).")  # fmt: skip
    elif others:
        lines.append(f"The others wait for {'it' if len(named) == 1 else 'them'} ({doing}).")
    return "\n  ".join([*lines, f"That has lasted for rank_heartbeat_timeout ({timeout:g} s), so the run ends."])


def _of_culprit(rank: int, host: str, one: Account) -> str:
    doing = f", {one.words}" if one.words else ""
    place = f", at {one.where}" if one.where else ""
    how = one.state or f"it has made no progress for {one.age:.0f} s"
    return f"rank {rank} on {host} hangs in optimizer step {one.step + 1}{doing}{place}: {how}."


def _of_other(one: Account) -> str:
    return f"{one.words}, in {one.waits}" if one.waits else one.words


def where_to_look(output_dir: Path) -> str:
    steps = Folder(output_dir / "checkpoints").steps()
    saved = f"The newest checkpoint is that of optimizer step {steps[-1]}; the same command resumes from it." if steps else (
        "There is no checkpoint yet: the same command begins again.")  # fmt: skip
    return f"  Stacks of all ranks: {output_dir / FOLDER}/rank_*.txt. {saved}"


def keep(output_dir: Path, name: str, text: str) -> str:
    """Writes a file of the report, and returns the text. Without a disk the run still ends with its sentence."""
    with suppress(OSError):
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        (output_dir / FOLDER / name).write_text(text)
    return text


def end_hung_child(child: int, page: Page, seconds: float) -> None:
    """What its parent does with a process that gives no sign of life: says where it is, and kills it."""
    output_dir, rank = Path(page.note().get("output_dir", "output")), launcher.read().rank
    state, (step, words), text = stacks.state_of(child), stacks.phase_of(child), stacks.collect(child)
    keep(output_dir, f"rank_{rank:05d}.txt", text or f"{state}; it could not say where it is\n")
    account = Account(words=words, step=step, age=seconds, is_silent=True, state=state, where=stacks.innermost(text))
    said = verdict({rank: account}, {rank: os.uname().nodename}, seconds)
    tell(f"{PREFIX}{keep(output_dir, 'report.txt', said)}\n{where_to_look(output_dir)}")
    os.kill(child, signal.SIGKILL)
