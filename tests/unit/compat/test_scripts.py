"""Launch scripts, read as a shell reads them; values that only a shell knows are reported."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.compat.script import read_script, read_shell
from megatron_grpo.run.config import parse


def read_flags(text: str) -> list[str]:
    script = read_shell(text, source="run.sh")
    assert not script.problems, script.problems
    return script.words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run --dataset name#10000 --lr 1", ["run", "--dataset", "name#10000", "--lr", "1"]),
        ("run --dataset 'name#10000' # --lr 1", ["run", "--dataset", "name#10000"]),
        ("run --a 1 #comment --b 2", ["run", "--a", "1"]),
        ("run --a 1 \\\n  --b 2 \\", ["run", "--a", "1", "--b", "2"]),
        ("run --a 1\\\n  --b 2\\\n", ["run", "--a", "1", "--b", "2"]),
        ("run --a on\\\ne", ["run", "--a", "one"]),
        ("run --a \"two\nlines\" --b 'x # y' --c a\\ b", ["run", "--a", "two\nlines", "--b", "x # y", "--c", "a b"]),
        ('run --system """You \\\\boxed{} it"""', ["run", "--system", "You \\boxed{} it"]),
        ("run --a 1 > out.log 2>&1 &", ["run", "--a", "1"]),
        ("run --a 1 2>&1 | tee log", ["run", "--a", "1"]),
        ("run --a 'b > c; d' --e f", ["run", "--a", "b > c; d", "--e", "f"]),
        ("X=3\nY=${X}4\nrun --a $X --b ${Y} --c ${Z:-5} --d 'it costs $5' --e \\$X", "run --a 3 --b 34 --c 5 --d|it costs $5|--e $X"),
        ('ARGS="--a 1 --b 2"\nrun $ARGS --c 3', ["run", "--a", "1", "--b", "2", "--c", "3"]),
        (': "${DIR:="/data"}"\nrun data.train=$DIR/x "$@"', ["run", "data.train=/data/x"]),
        ("serve --model x &\nuntil curl -s u > /dev/null 2>&1; do sleep 1; done\nrun --a 1", ["run", "--a", "1"]),
        ("export A=1\nA=2 run --a $A", ["run", "--a", "1"]),
        ("A=(--a 1 # one\n  --b '2 3'\n)\nrun \"${A[@]}\" --c 4", ["run", "--a", "1", "--b", "2 3", "--c", "4"]),
        ("A=(--a 1)\nA+=(--b 2)\nrun ${A[@]}", ["run", "--a", "1", "--b", "2"]),
        ("N=$((1024 * 2))\nrun --a $N --b $(((N + 1) * 3)) --c $((7 / 2))", ["run", "--a", "2048", "--b", "6147", "--c", "3"]),
        ("ray job submit --address=x \\\n -- python3 train.py --a 1", ["python3", "train.py", "--a", "1"]),
        ("run a.b=1 +c.d=2 ++e.f=3", ["run", "a.b=1", "+c.d=2", "++e.f=3"]),
        ("uv run --isolated --extra fsdp --with a -m b.main c.d=1", ["-m", "b.main", "c.d=1"]),
        ("uv run torchrun --nproc_per_node 2 t.py --a 1", ["t.py", "--a", "1"]),
        (
            'A=1 srun --overlap --nodes=1 -w "$NODE_0" apptainer run --nv i.sif python3 -m v.main c.d=1',
            ["python3", "-m", "v.main", "c.d=1"],
        ),
        ('run --a 1 ${@:2} ${@} "$*"', ["run", "--a", "1"]),
        ("python3 train.py --a 1\npkill -9 ray\nray stop --force", ["python3", "train.py", "--a", "1"]),
        ("M=org/Big-7B\nrun --a $(basename $M) --b ${M,,} --c $(dirname /x/y)", ["run", "--a", "Big-7B", "--b", "org/big-7b", "--c", "/x"]),
        ("$PYTHON_OF_NOBODY -m v.main --a 1", ["\x01$PYTHON_OF_NOBODY", "-m", "v.main", "--a", "1"]),
    ],
)
def test_script_words_are_split_as_by_a_shell(text, words):
    if isinstance(words, str):
        words = [word for part in zip(words.split("|"), (True, False, True)) for word in (part[0].split() if part[1] else [part[0]])]
    assert read_flags(text) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run --reward_funcs math \\ \n  --b 2\n", "a shell ends the command before --b"),
        ("run --seed 1 \\\n  # --b 2 \\\n  --c 3\n", "a shell ends the command before --c"),
        ("run --model $NOWHERE_SET_7", "$NOWHERE_SET_7 cannot be determined from the script"),
        ('run "${ARGS[@]}" --seed 1', "${ARGS[@]} cannot be determined"),
        ("run --seed 1 $ARGS_OF_NOBODY", "$ARGS_OF_NOBODY cannot be determined"),
        ("run --seed $(date +%s)", "seed $(date +%s) cannot be determined"),
        ("run --model '/a b'`hostname`", "`hostname` cannot be determined"),
        ("run --a 'x", "cannot be read as a shell script: No closing quotation"),
        ("N=1\nif true; then N=2; fi\nrun --seed $N", "seed $N cannot be determined"),
        ("for N in 1 2; do M=$N; done\nrun --seed $M", "seed $M cannot be determined"),
        ("run --seed $((1 + NOBODY_KNOWS))", "seed $((1 + NOBODY_KNOWS)) cannot be determined"),
        ("source nowhere.sh\nrun ${ARGS[@]} --seed 1", "because it sources nowhere.sh, which does not exist"),
    ],
)
def test_script_with_unknown_value_is_rejected_with_file_name(text, said, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(text)
    problem = parse(["--config", str(script)], dialects=lambda: DIALECTS).problems[0]
    assert said in problem.message and "run.sh" in problem.message


def test_script_with_unknown_value_is_accepted_if_overridden_or_unused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("run --seed $(date +%s) --lr 0.5")
    parsed = parse(["--config", str(script), "--seed", "7"], dialects=lambda: DIALECTS)
    assert not parsed.problems and (parsed.config.run.seed, parsed.config.optimizer.lr) == (7, 0.5)
    script.write_text("run --dataloader_num_workers $(nproc) --lr 0.5")
    parsed = parse(["--config", str(script), "--dialect", "swift"], dialects=lambda: DIALECTS)
    assert not parsed.problems and parsed.config.optimizer.lr == 0.5


def test_script_sourced_file_is_found_relative_to_script(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL=(\n  --seed 5  # five\n  --lr 0.5\n)\n")
    script = tmp_path / "run.sh"
    here = 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"'
    script.write_text(f'{here}\nsource "$HERE/models/small.sh"\nrun ${{MODEL[@]}}\n')
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert not parsed.problems and (parsed.config.run.seed, parsed.config.optimizer.lr) == (5, 0.5)
    monkeypatch.chdir(tmp_path.parent)  # and named from elsewhere
    assert parse(["--config", f"{tmp_path.name}/{script.name}"], dialects=lambda: DIALECTS).config.run.seed == 5


def test_script_flags_after_dataset_with_sample_suffix_are_read(tmp_path):
    """They were taken for a comment, and the run went on with the defaults."""
    script = tmp_path / "run.sh"
    script.write_text("megatron_grpo train --dataset 'rows#3' --eval_dataset rows#4 --lr 0.5 --seed 7 \\")
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert not parsed.problems
    cfg = parsed.config
    assert (cfg.data.dataset, cfg.eval.eval_dataset, cfg.optimizer.lr, cfg.run.seed) == ("rows#3", "rows#4", 0.5, 7)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 4 --nnodes=2 --master_port 1 -m megatron_grpo train --lr 0.5",
        "python -m torch.distributed.run --nproc-per-node=8 train.py --lr 0.5",
        "NNODES=2 accelerate launch --num_processes 4 train.py --lr 0.5",
    ],
)
def test_script_launcher_gives_world_size_and_no_settings(tmp_path, command):
    script = tmp_path / "run.sh"
    script.write_text(command)
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert not parsed.problems
    assert (parsed.config.parallel.world_size, parsed.config.optimizer.lr) == (8, 0.5)


def test_script_with_several_commands_reads_training_command_and_names_the_other(tmp_path):
    script = tmp_path / "both.sh"
    script.write_text("swift rollout --model /a --seed 1 &\nmegatron rlhf --model /b --lr 0.5\n")
    parsed = parse(["--config", str(script), "--dialect", "swift"], dialects=lambda: DIALECTS)
    assert not parsed.problems and parsed.config.model.model == "/b" and parsed.config.run.seed == 42
    assert parsed.notes == ["both.sh: the flags of its last command are read, not those of swift rollout (model, seed)."]


ROLLOUT = "CUDA_VISIBLE_DEVICES=0 swift rollout --model /a --multi_turn_scheduler {} --max_turns 3 &\n"
TRAIN = "{} rlhf --rlhf_type grpo --model /b --lr 0.5 --vllm_mode server --vllm_server_host h --reward_funcs accuracy &\n"


@pytest.mark.parametrize(("dialect", "program"), [("swift", "megatron"), ("ms-swift", "swift")])
@pytest.mark.parametrize("is_server_last", [False, True])
def test_script_with_swift_rollout_server_uses_its_environment(tmp_path, dialect, program, is_server_last):
    """`swift rollout` decides what an episode is: its environment is taken, one that is registered there is refused or named."""

    def parsed(scheduler: str, *flags: str):
        script = tmp_path / "both.sh"
        commands = [ROLLOUT.format(scheduler), TRAIN.format(program)]
        script.write_text("".join(reversed(commands) if is_server_last else commands))
        return parse(["--config", str(script), "--dialect", dialect, *flags], dialects=lambda: DIALECTS)

    (problem,) = parsed("tip_trick").problems
    assert "multi_turn_scheduler (both.sh: swift rollout) (tip_trick) is a scheduler registered" in problem.message
    assert "--environment path/to/file.py:Class (docs/turns.md)" in problem.message and "examples/agent" in problem.message
    taken = parsed("env.py:Guess")
    assert not taken.problems
    turns = taken.config.turns
    assert (turns.environment, turns.max_turns, taken.config.optimizer.lr, taken.config.model.model) == ("env.py:Guess", 3, 0.5, "/b")
    replaced = parsed("tip_trick", "--environment", "mine.py:Own")
    assert (replaced.problems, replaced.config.turns.environment, replaced.config.turns.max_turns) == ([], "mine.py:Own", 3)
    assert any(note.startswith("What differs: multi_turn_scheduler (tip_trick) is a scheduler") for note in replaced.notes)


@pytest.mark.parametrize(
    ("command", "dialect", "instead"),
    [
        ("swift rlhf", "swift", "ms-swift"),
        ("NPROC_PER_NODE=8 torchrun swift/cli/rlhf.py", "swift-megatron", "ms-swift"),
        ("megatron rlhf", "ms-swift", "swift-megatron"),
        ("torchrun --nproc_per_node 8 $DIR/swift/cli/_megatron/rlhf.py", "ms-swift", "swift-megatron"),
        ("python3 -m verl.trainer.main_ppo", "skyrl", "verl"),
        ("uv run --isolated -m skyrl.train.entrypoints.main_base", "verl", "skyrl"),
        ("uvx --with datasets trl grpo", "slime", "trl"),
    ],
)
def test_script_of_another_framework_names_the_right_dialect(tmp_path, monkeypatch, command, dialect, instead):
    """Nothing else is said of it, because its names mean something else."""
    monkeypatch.setenv("DIR", "/opt")
    (tmp_path / "a.sh").write_text(f"{command} --lr 0.5 --nobody_knows 1 a.b=c\n")
    found = parse(["--config", str(tmp_path / "a.sh"), "--dialect", dialect], dialects=lambda: DIALECTS)
    assert [problem.message for problem in found.problems if "--dialect" in problem.message] == [
        problem.message for problem in found.problems
    ]
    assert found.problems[0].message.endswith(f"whose names are those of --dialect {instead}."), found.problems
    right = parse(["--config", str(tmp_path / "a.sh"), "--dialect", instead], dialects=lambda: DIALECTS)
    assert not any("whose names are those of" in problem.message for problem in right.problems)


@pytest.mark.parametrize("call", ["bash examples/base.sh", "./examples/base.sh", "uv run bash examples/base.sh"])
def test_script_that_calls_another_script_appends_its_own_arguments(tmp_path, call):
    """They were read as the whole run, and all that the other script says was left out."""
    (tmp_path / "examples" / "more").mkdir(parents=True)
    (tmp_path / "examples" / "base.sh").write_text('SEED=$1\nshift\npython3 t.py --seed $SEED --lr 0.5 --micro_batch_size 2 \\\n  "$@"\n')
    script = tmp_path / "examples" / "more" / "run.sh"  # its paths are from where it is started: two folders above it
    script.write_text(f'{call} 7 \\\n  --lr 0.25 "$@"\n')
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert not parsed.problems
    cfg = parsed.config
    assert (cfg.run.seed, cfg.optimizer.lr, cfg.batch.micro_batch_size) == (7, 0.25, 2)
    assert parsed.repeated == ["lr is set twice in run.sh: the last value is used."]
    script.write_text("bash nowhere.sh --lr 0.25")
    problem = parse(["--config", str(script)], dialects=lambda: DIALECTS).problems[0]
    assert "run.sh: it starts nowhere.sh, which does not exist" in problem.message
    script.write_text("bash run.sh --lr 0.25")
    assert "it starts run.sh, which does not exist" in parse(["--config", str(script)], dialects=lambda: DIALECTS).problems[0].message


def test_script_config_file_is_read_before_its_flags(tmp_path):
    (tmp_path / "values.yaml").write_text("lr: 0.5\nseed: 7\n")
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file zero3.yaml t.py --config values.yaml --seed 8")
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert not parsed.problems and (parsed.config.optimizer.lr, parsed.config.run.seed) == (0.5, 8)
    script.write_text("t.py --config nowhere.yaml --seed 8")
    assert "config nowhere.yaml does not exist" in parse(["--config", str(script)], dialects=lambda: DIALECTS).problems[0].message


def test_script_without_flags_is_rejected(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("echo nothing\ncd /tmp\n")
    assert [problem.message for problem in parse(["--config", str(script)], dialects=lambda: DIALECTS).problems] == [
        "run.sh contains no command with flags that can be read."
    ]


def test_script_with_unknown_run_name_omits_it(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("run --run_name a-$(date +%s) --lr 0.5 --seed $(x) --model $NOWHERE_7")
    parsed = parse(["--config", str(script)], dialects=lambda: DIALECTS)
    assert parsed.config.run.run_name is None and parsed.notes == [
        "run.sh: run_name a-$(date +%s) cannot be determined from the script and is ignored."
    ]
    assert [problem.message for problem in parsed.problems] == [
        "run.sh: seed $(x), model $NOWHERE_7 cannot be determined from the script. Pass them on the command line."
    ]


@pytest.mark.parametrize(
    "start",
    [
        "uv run --with datasets python train.py",
        "uv run --isolated --with skyrl-gym skyrl-train",
        "uvx --with datasets --python 3.11 trl grpo",
        "exec uv run --with trl -m main",
        "srun --nodes 2 python train.py",
    ],
)
def test_script_launcher_options_are_not_settings(start):
    entries, problems = read_script(f"{start} --learning_rate 1e-6", source="run.sh")
    assert ([entry.name for entry in entries if entry.name != "$command"], problems) == (["learning_rate"], [])


DOUBLING = "A0=ab\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(1, 60))  # 2**60 characters


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.py", f"x = {'-' * 100_000}1\n", "run.py cannot be read: it is nested too deeply"),
        ("run.py", f"x = 1{' + 1' * 50_000}\n", "run.py cannot be read: it is nested too deeply"),
        ("run.sh", ". ./run.sh\nrun --lr 1\n", "run.sh cannot be read: it is nested too deeply, or includes itself"),
        ("run.sh", DOUBLING + "run --model $A59\n", "model .* cannot be determined"),
    ],
)  # fmt: skip
def test_script_that_nests_without_end_is_rejected(tmp_path, monkeypatch, name, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert any(re.search(says, problem.message) for problem in parse(["--config", name], dialects=lambda: DIALECTS).problems)
