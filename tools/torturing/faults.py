"""The faults of tools/torture.py: a name, a promise, and what is done to a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.end_to_end.runs import REWARD, records, write_inputs
from tools.torturing.judges import judges
from tools.torturing.victim import STEPS, Broken, Fault, NotHere, Victim

TRAIN_STEP = "megatron_grpo.policy.policy:Policy.train_step"

# Moments of a run: where, and which call of it.
MOMENTS = {
    "reading the data set": ("megatron_grpo.data.prompts:open_stream", 1),
    "joining the other ranks": ("megatron_grpo.parallel.state:start", 1),
    "building the model": ("megatron_grpo.run.life:build_run", 1),
    "first push": ("megatron_grpo.sync:push", 1),
    "push between steps": ("megatron_grpo.sync:push", 3),
    "first rollout": ("megatron_grpo.rollout.scripted:ScriptedEngine.generate", 1),
    "sampling": ("megatron_grpo.rollout.scripted:ScriptedEngine.generate", 3),
    "judging": ("megatron_grpo.judge:Judge.__call__", 3),
    "old log-probs": ("megatron_grpo.pending:Pending.anchored", 4),
    "training, first step": (TRAIN_STEP, 1),
    "training": (TRAIN_STEP, 5),
    "after the optimizer": ("megatron_grpo.pending:Pending.after", 5),
    "writing metrics": ("megatron_grpo.metrics.journal:Journal.step", 5),
    "evaluating": ("megatron_grpo.evaluate:Evaluator.run", 2),
    "writing the first checkpoint": ("megatron_grpo.checkpoint.distributed:_write", 1),
    "writing a checkpoint": ("megatron_grpo.checkpoint.distributed:_write", 2),
    "describing a checkpoint": ("megatron_grpo.checkpoint.saving:Checkpoints._others", 2),
    "exporting": ("megatron_grpo.run.life:export_model", 1),
}  # fmt: skip
MOMENTS_OF_RANK_0 = {
    "beginning a checkpoint": ("megatron_grpo.checkpoint.folder:Folder.begin", 2),
    "publishing the first checkpoint": ("megatron_grpo.checkpoint.folder:Folder.commit", 1),
    "publishing a checkpoint": ("megatron_grpo.checkpoint.folder:Folder.commit", 2),
    "removing an old checkpoint": ("megatron_grpo.checkpoint.folder:Folder.retain", 3),
}  # fmt: skip
ASYNC = ("--async_save", "true")
# Moments from which a stop can be heard.
POLITE = ["building the model", "first rollout", "sampling", "judging", "old log-probs", "training", "evaluating", "writing a checkpoint"]


def at(moment: str, do: str, rank: int | None = 0) -> dict:
    where, call = {**MOMENTS, **MOMENTS_OF_RANK_0}[moment]
    return dict(where=where, call=call, do=do, rank=rank)


# ---- kills and signals -----------------------------------------------------------------------------------------------------------------


def killed(moment: str, do: str, rank: int, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(*flags, inject=at(moment, do, rank)).must(None)
        victim.continues(*flags)

    return hurt


def stopped(moment: str, do: str, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        ended = victim.run(*flags, inject=at(moment, do))
        trained = max((line["step"] for line in victim.lines() if line["what"] == "trained"), default=0)
        saved = max(victim.checkpoints(), default=0)
        if ended.code == 0 or saved < trained:
            raise Broken(f"exit code {ended.code}, step {trained} was trained, and {saved} is saved: {ended.said[-1000:]}")
        victim.continues(*flags)

    return hurt


def twice_stopped(victim: Victim) -> None:
    process = victim.begin()
    victim.until(process, lambda: victim.lines() and victim.lines()[-1]["what"] == "trained")
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
    victim.end(process).must(None)
    victim.continues()


def killed_again_and_again(victim: Victim) -> None:
    for call in (2, 1, 3, 1):
        victim.run(inject=dict(where=TRAIN_STEP, call=call, do="SIGKILL", rank=call % 2)).must(None)
    victim.continues()


def killed_stopped_and_damaged(victim: Victim) -> None:
    """Saves after steps 3 and 6; the second launch begins after step 3, so its second step is the fifth."""
    victim.run(inject=at("writing a checkpoint", "SIGKILL", 1)).must(None)
    victim.run(inject=dict(where=TRAIN_STEP, call=2, do="launcher SIGTERM")).must(None, r"saved after optimizer step 5")
    if victim.checkpoints() != [3, 5]:
        raise Broken(f"checkpoints {victim.checkpoints()} are left, not 3 and 5")
    flip(one_of(victim.out / "checkpoints" / "iter_0000005", "*.distcp"))
    victim.continues(says=["iter_0000005", "WARNING", r"Resuming from \S+iter_0000003"])


def launcher_killed(victim: Victim) -> None:
    victim.run(inject=at("training", "launcher SIGKILL")).must(None)
    victim.continues()


def launcher_killed_while_ranks_import(victim: Victim) -> None:
    process = victim.begin(cold=True)
    victim.until(process, lambda: len(victim.left(process)) >= 2)
    process.kill()
    victim.end(process)
    victim.continues()


def frozen_for_a_while(victim: Victim) -> None:
    """A machine that sleeps, or a debugger: 5 s in which one rank stands still."""
    process = victim.begin()
    victim.until(process, lambda: any(line["what"] == "trained" for line in victim.lines()))
    pid = victim.left(process)[-1]
    os.kill(pid, signal.SIGSTOP)
    subprocess.run(["sleep", "5"], check=True)
    os.kill(pid, signal.SIGCONT)
    victim.end(process).must(0)
    victim.is_whole()


# ---- damaged files ---------------------------------------------------------------------------------------------------------------------


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


# ---- disks and limits ------------------------------------------------------------------------------------------------------------------


def on_small_disk(size: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.out.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(victim.out)], capture_output=True).returncode:
            raise NotHere("this user may not mount a file system")
        try:
            victim.run().must(None, r"[Nn]o space")
            subprocess.run(["mount", "-o", "remount,size=200m", str(victim.out)], check=True)
            victim.continues()
        finally:
            subprocess.run(["umount", str(victim.out)], check=False)

    return hurt


def read_only(victim: Victim) -> None:
    victim.half_done()
    if subprocess.run(["mount", "--bind", str(victim.out), str(victim.out)], capture_output=True).returncode:
        raise NotHere("this user may not mount a file system")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(victim.out)], check=True)
        victim.run().must(None, "[Rr]ead-only")
    finally:
        subprocess.run(["umount", str(victim.out)], check=False)
    victim.continues()


def not_allowed(victim: Victim) -> None:
    """Permission bits are nothing to root, so root runs as somebody else."""
    victim.half_done()
    for folder in (victim.folder.parent, victim.folder):
        folder.chmod(0o755)
    victim.log.chmod(0o777)
    become = 'exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0" "$@"' if os.geteuid() == 0 else f"chmod -R a-w {victim.out}"
    victim.run(before=become).must(None, "[Pp]ermission")
    subprocess.run(["chmod", "-R", "u+w", str(victim.folder)], check=True)
    victim.continues()


def limited(limit: str, *says: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(before=limit).must(None, *says)
        victim.continues()

    return hurt


def environment(env: dict[str, str], code: int = 0) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(env=env).must(code)
        victim.is_whole()

    return hurt


def raised(moment: str, what: str, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(*flags, inject=at(moment, f"raise {what}")).must(None, "made up by tools/torture.py|memory")
        victim.continues(*flags)

    return hurt


def starved(moment: str) -> Callable[[Victim], None]:
    """From then on a rank gets no more memory than it has; what it has may do."""

    def hurt(victim: Victim) -> None:
        ended = victim.run(inject=at(moment, "starve", 1))
        if ended.code:
            ended.must(None, "memory")
            victim.continues()
        else:
            victim.is_whole()

    return hurt


def clock(seconds: int) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(inject=at("training", f"clock {seconds}", None)).must(0)
        victim.is_whole()

    return hurt


# ---- rewards ---------------------------------------------------------------------------------------------------------------------------

THIRD_CALL = """
import os, sys, time, signal, random, threading, subprocess
calls = [0]
def even(completion_ids, **columns):
    calls[0] += 1
    scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    if calls[0] == 3 and os.environ.get("TORTURE_ATTEMPT") == "1":
        {body}
    return scores
"""
# What a reward does at its third call -> what must be said, None where the run must not notice.
REWARDS = {
    "raises": ('raise KeyError("lost")', "even"),
    "returns too few": ("return scores[:-1]", "even"),
    "returns None": ("return None", "even"),
    "returns NaN": ('return [float("nan")] * len(scores)', "even"),
    "returns infinity": ('return [float("inf")] * len(scores)', "even"),
    "returns words": ('return ["good"] * len(scores)', "even"),
    "calls sys.exit(0)": ("sys.exit(0)", "exit"),
    "calls os._exit(0)": ("os._exit(0)", "exit code 0"),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", None),
    "kills its process": ("os.kill(os.getpid(), signal.SIGKILL)", "without a word|Signal"),
    "crashes the interpreter": ("import ctypes; ctypes.string_at(0)", "without a word|Signal"),
    "recurses for ever": ("even.__globals__['f'] = lambda: f(); f()", "even"),
}
HARMLESS = {
    "prints 5 MB": 'print("x" * 5_000_000, file=sys.stderr)',
    "seeds the generators": "random.seed(0); import numpy, torch; numpy.random.seed(0); torch.manual_seed(0)",
    "empties what it is given": "[ids.clear() if hasattr(ids, 'clear') else None for ids in completion_ids]",
    "takes the signals": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]",
    "changes the directory": 'os.chdir("/")',
    "changes the environment": "os.environ.clear()",
    "changes the umask": "os.umask(0o777) and None",
    "starts a thread": "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
    "starts a process": 'subprocess.run(["true"])',
    "forks": "pid = os.fork()\n        if pid == 0: os._exit(0)\n        os.waitpid(pid, 0)",
    "takes 6 s": "time.sleep(6)",
    "sets a locale": 'import locale; locale.setlocale(locale.LC_ALL, "C")',
    "turns gradients off": "import torch; torch.set_grad_enabled(False)",
    "changes the default dtype": "import torch; torch.set_default_dtype(torch.float64)",
}


def write_reward(victim: Victim, body: str) -> None:
    (victim.folder / "reward.py").write_text(THIRD_CALL.replace("{body}", body))


def reward_fails(body: str, says: str | None) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        write_reward(victim, body)
        victim.run().must(None, *([says] if says else []))
        (victim.folder / "reward.py").write_text(REWARD)
        victim.continues()

    return hurt


def reward_is_rude(body: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        write_reward(victim, body)
        victim.run().must(0)
        victim.is_whole()

    return hurt


# ---- resumes with something else -------------------------------------------------------------------------------------------------------


def resumed_with(*flags: str, code: int, says: str = "", same: bool = False) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.half_done()
        before = victim.fingerprint()
        victim.run(*flags).must(code if code == 0 else None, *([says] if says else []), *([r"exitcode +: 2"] if code == 2 else []))
        if code == 2:
            if victim.fingerprint() != before:  # the same bytes go on as they did for every other fault
                raise Broken("refused, and output_dir changed")
        elif same:
            victim.is_whole()

    return hurt


def rewritten(what: str, code: int | None, says: str) -> Callable[[Victim], None]:
    """Between two runs somebody changes an input."""

    def hurt(victim: Victim) -> None:
        victim.half_done()
        data, reward = victim.folder / "data.jsonl", victim.folder / "reward.py"
        if what == "a row more":
            data.write_text(data.read_text() + json.dumps({"prompt": "5 6", "answer": "x"}) + "\n")
        elif what == "another order":
            data.write_text("".join(sorted(data.read_text().splitlines(keepends=True), reverse=True)))
        elif what == "data gone":
            data.unlink()
        elif what == "another model":
            shutil.rmtree(victim.folder / "model")
            write_inputs(victim.folder / "other", rows=10, seed=1)
            shutil.copytree(victim.folder / "other" / "model", victim.folder / "model")
        elif what == "another reward":
            reward.write_text(reward.read_text().replace("== 0", "== 1"))
        elif what == "a comment in the reward":
            reward.write_text(reward.read_text() + "\n# nothing\n")
        elif what == "reward gone":
            reward.unlink()
        victim.run().must(code, says)

    return hurt


def second_run(victim: Victim) -> None:
    process = victim.begin()
    victim.until(process, lambda: any(line["what"] == "trained" for line in victim.lines()))
    first, victim.said = victim.said, victim.folder / "second"
    second = victim.begin("--overwrite_output_dir", "true")
    victim.said = victim.folder / f"said_{victim.attempt}"
    code = second.wait(victim.bench.patience)
    if code == 0 or "in use by another run" not in victim.said.read_text():
        raise Broken(f"the second run ended with {code}: {victim.said.read_text()[-1000:]}")
    victim.said = first
    victim.end(process).must(0)
    victim.is_whole()


def closed_output(victim: Victim) -> None:
    """`torchrun ... | head -1`"""
    process = victim.begin(before="exec > >(head -c 10 > /dev/null)")
    ended = victim.end(process)
    if ended.code == 0:
        victim.is_whole()
    else:
        victim.continues()


# ---- all of them -----------------------------------------------------------------------------------------------------------------------

RESUMES = "the same command again is the undisturbed run, bit for bit"
SAVES = "the step ends, all of it is saved, and the same command goes on"
FALLS_BACK = "a warning, the checkpoint before it, the undisturbed run"
UNMOVED = "the undisturbed run"
SENTENCE = "a sentence that names it; resumed with it mended, the undisturbed run"


def kills_and_signals() -> Iterator[Fault]:
    for moment in MOMENTS:
        for rank in (0, 1):
            yield Fault(f"kill/rank {rank}, {moment}", RESUMES, killed(moment, "SIGKILL", rank))
    for moment in MOMENTS_OF_RANK_0:
        yield Fault(f"kill/rank 0, {moment}", RESUMES, killed(moment, "SIGKILL", 0))
    yield Fault("kill/launcher, training", RESUMES, launcher_killed)
    yield Fault("kill/launcher, ranks import", RESUMES, launcher_killed_while_ranks_import)
    yield Fault("chain/killed, stopped, damaged", RESUMES, killed_stopped_and_damaged)
    yield Fault("kill/four times in a row", RESUMES, killed_again_and_again)
    yield Fault("kill/segmentation fault, training", RESUMES, killed("training", "SIGSEGV", 1))
    for moment in POLITE:
        yield Fault(f"stop/SIGTERM, {moment}", SAVES, stopped(moment, "launcher SIGTERM"))
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        for moment in ("sampling", "training", "evaluating"):
            to = "launcher " if name == "SIGINT" else ""
            yield Fault(f"stop/{name}, {moment}", SAVES, stopped(moment, f"{to}{name}"))
    yield Fault("stop/Ctrl-C twice", RESUMES, twice_stopped)
    yield Fault("stop/a rank stands still for 5 s", UNMOVED, frozen_for_a_while)


def beside_the_steps() -> Iterator[Fault]:
    """With --async_save the writing moments are those of a thread."""
    for moment in ("writing the first checkpoint", "writing a checkpoint", "describing a checkpoint", "training"):
        for rank in (0, 1):
            yield Fault(f"async/rank {rank}, {moment}", RESUMES, killed(moment, "SIGKILL", rank, *ASYNC))
    yield Fault("async/rank 0, publishing a checkpoint", RESUMES, killed("publishing a checkpoint", "SIGKILL", 0, *ASYNC))
    for moment in ("sampling", "writing a checkpoint"):
        yield Fault(f"async/SIGTERM, {moment}", SAVES, stopped(moment, "launcher SIGTERM", *ASYNC))
    yield Fault("async/input or output error, writing a checkpoint", SENTENCE, raised("writing a checkpoint", "OSError", *ASYNC))


def damages() -> Iterator[Fault]:
    for name, pattern in {"manifest": "manifest.json", "shard": "*.distcp", "metadata": ".metadata", "common": "common.pt",
                          "progress": "grpo/progress.json", "prompts": "grpo/prompts.json"}.items():  # fmt: skip
        for how, harm in HARMS.items():
            yield Fault(f"damage/{name} {how}", FALLS_BACK, damaged(pattern, harm))
    yield Fault("damage/every checkpoint", "refused, and nothing is touched", all_damaged)
    for how, text in {"gone": None, "garbage": "yes\n", "empty": "", "ahead": "99\n", "behind": "6\n"}.items():
        yield Fault(f"damage/pointer {how}", "the newest checkpoint, or a sentence", pointer(text))
    for name in ("metrics.jsonl", "schedule.jsonl", "evaluations.jsonl", "config.yaml", "plan.json"):
        for how in ("cut", "gone"):
            yield Fault(f"damage/{name} {how}", "the run ends well, or says which file", log_damaged(name, HARMS[how]))
    yield Fault("damage/leftovers of saves", UNMOVED, leftovers)
    yield Fault("damage/lock of a dead run", UNMOVED, locked)
    yield Fault("damage/output_dir moved", UNMOVED, moved)


def of_the_machine() -> Iterator[Fault]:
    for size in ("100k", "900k", "2m"):
        yield Fault(f"disk/full at {size}", SENTENCE, on_small_disk(size))
    yield Fault("disk/read-only", SENTENCE, read_only)
    yield Fault("disk/no right to write", SENTENCE, not_allowed)
    yield Fault("disk/files of at most 200 kB", SENTENCE, limited("ulimit -f 200"))
    yield Fault("disk/64 open files", SENTENCE, limited("ulimit -n 64"))
    yield Fault("memory/2 GB of addresses", SENTENCE, limited("ulimit -v 2000000", "no memory, or no thread"))
    for moment in ("building the model", "sampling", "training", "writing a checkpoint"):
        yield Fault(f"memory/no more, {moment}", "a sentence that names it, or the undisturbed run", starved(moment))
    for moment in ("building the model", "training", "writing a checkpoint"):
        yield Fault(f"memory/none, {moment}", SENTENCE, raised(moment, "MemoryError"))
        yield Fault(f"disk/input or output error, {moment}", SENTENCE, raised(moment, "OSError"))


def of_rewards() -> Iterator[Fault]:
    for name, (body, says) in REWARDS.items():
        yield Fault(f"reward/{name}", SENTENCE, reward_fails(body, says))
    for name, body in HARMLESS.items():
        yield Fault(f"reward/{name}", UNMOVED, reward_is_rude(body))


def of_surroundings() -> Iterator[Fault]:
    yield Fault("clock/an hour back", UNMOVED, clock(-3600))
    yield Fault("clock/a day on", UNMOVED, clock(86400))
    for name, env in {"no HOME": {"HOME": "/nowhere"}, "locale C": {"LC_ALL": "C"}, "no terminal": {"TERM": "dumb"},
                      "four threads": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4"}}.items():  # fmt: skip
        yield Fault(f"environment/{name}", UNMOVED, environment(env))
    yield Fault("environment/output is closed", "ends well, or resumes", closed_output)
    yield Fault("environment/a second run in output_dir", "refused; the first one goes on", second_run)


def resumes() -> Iterator[Fault]:
    tp, pp = ["--tensor_model_parallel_size", "2"], ["--pipeline_model_parallel_size", "2"]
    for name, flags, code, says, same in [
        ("lr 5e-4", ["--lr", "5e-4"], 0, "lr  0.001 -> 0.0005", False), ("tensor parallel", tp, 0, "", False),
        ("pipeline parallel", pp, 0, "", False), ("micro-batches of 4", ["--micro_batch_size", "4"], 0, "", False),
        ("another seed", ["--seed", "7"], 2, "seed", False), ("G 2", ["--num_generations", "2"], 2, "num_generations", False),
        ("bfloat16", ["--torch_dtype", "bfloat16"], 2, "torch_dtype", False),
        ("fewer steps", ["--max_steps", "5"], 0, "Nothing is left", False),
        ("never", ["--resume", "never"], 2, "holds an earlier run", False),
        ("a path that is not there", ["--resume", "/nowhere"], 2, "holds no checkpoint", False),
        ("a typing error", ["--micro_batchsize", "2"], 2, "micro_batch_size", False),
        ("an impossible size", ["--global_batch_size", "15"], 2, "global_batch_size", False),
        ("saves at each step", ["--save_steps", "1"], 0, "", True),
    ]:  # fmt: skip
        promise = "refused, nothing is touched" if code == 2 else UNMOVED if same else "goes on, and says what changed"
        yield Fault(f"resume/{name}", promise, resumed_with(*flags, code=code, says=says, same=same))
    for what, code, says in [("a row more", None, "data"), ("another order", None, "data"), ("data gone", None, "data.jsonl"),
                             ("another model", None, "model"), ("another reward", 0, "reward"), ("a comment in the reward", 0, "reward"),
                             ("reward gone", None, "reward.py")]:  # fmt: skip
        yield Fault(f"resume/{what}", "refused, or goes on and says it", rewritten(what, code, says))


FAULTS = [
    *kills_and_signals(),
    *beside_the_steps(),
    *damages(),
    *of_the_machine(),
    *of_rewards(),
    *judges(),
    *of_surroundings(),
    *resumes(),
]
SHORT = {"chain/killed, stopped, damaged"}
