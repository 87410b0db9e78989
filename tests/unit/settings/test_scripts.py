"""A launch script is read as a shell reads it; what a shell would pass on and a reader cannot know is said, never left out."""

from __future__ import annotations

import pytest

from megatron_grpo.settings import parse
from megatron_grpo.settings.script import read_shell
from megatron_grpo.sizing.dialects import DIALECTS


def flags(text: str) -> list[str]:
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
    ],
)
def test_words_are_those_of_a_shell(text, words):
    if isinstance(words, str):
        words = [word for part in zip(words.split("|"), (True, False, True)) for word in (part[0].split() if part[1] else [part[0]])]
    assert flags(text) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run --a 1 \\ \n  --b 2\n", "a shell ends the command before --b"),
        ("run --a 1 \\\n  # --b 2 \\\n  --c 3\n", "a shell ends the command before --c"),
        ("run --model $NOWHERE_SET_7", "$NOWHERE_SET_7 cannot be known from the script"),
        ('run "${ARGS[@]}" --a 1', "${ARGS[@]} cannot be known"),
        ("run --seed $(date +%s)", "$(date cannot be known"),
        ("run --a 'x", "cannot be read as a shell script: No closing quotation"),
    ],
)
def test_what_cannot_be_known_is_said(text, said):
    (problem,) = read_shell(text, source="run.sh").problems
    assert said in problem.message and "run.sh" in problem.message


def test_the_flags_after_a_sample_of_a_data_set_count(tmp_path):
    """They were taken for a comment, and the run went on with the defaults."""
    script = tmp_path / "run.sh"
    script.write_text("megatron_grpo train --dataset 'rows#3' --eval_dataset rows#4 --lr 0.5 --seed 7 \\")
    parsed = parse(["--config", str(script)])
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
def test_a_launcher_gives_the_number_of_ranks_and_none_of_its_flags(tmp_path, command):
    script = tmp_path / "run.sh"
    script.write_text(command)
    parsed = parse(["--config", str(script)])
    assert not parsed.problems
    assert (parsed.config.parallel.world_size, parsed.config.optimizer.lr) == (8, 0.5)


def test_the_command_that_trains_is_read_and_the_other_one_named(tmp_path):
    script = tmp_path / "both.sh"
    script.write_text("swift rollout --model /a --seed 1 &\nmegatron rlhf --model /b --lr 0.5\n")
    parsed = parse(["--config", str(script), "--dialect", "swift"], dialects=DIALECTS)
    assert not parsed.problems and parsed.config.model.model == "/b" and parsed.config.run.seed == 42
    assert parsed.notes == ["both.sh: the flags of its last command are read, not those of swift rollout."]
