"""Reward files written for another framework: programs are not run, and plugins of ms-swift provide their rewards."""

from __future__ import annotations

import ast
import asyncio
import sys

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import load_rewards, trains_at_import

MAIN = "def main():\n    trainer = GRPOTrainer(model='m')\n    trainer.train()\ndef other(): main()\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trainer = GRPOTrainer(model='m')\n", 1),
        ("trainer = build()\ntrainer.train()\n", 2),
        ("import trl\nif True:\n    trl.GRPOTrainer(m).train()\n", 2),
        (f"{MAIN}other()\n", 5),
        (f"{MAIN}fire.Fire(main)\n", 5),
        (f"{MAIN}if __name__ == '__main__':\n    main()\n", None),
        (MAIN, None),
        ("args = GRPOConfig(output_dir='o')\ndef right(completions): return [1.0]\n", None),
        ("class Mine(GRPOTrainer): pass\nmodel.train = None\n", None),
        ("def f(:", None),  # whoever imports it says so
    ],
)
def test_trains_at_import_returns_line_of_training_call(text, line):
    try:
        program = ast.parse(text)
    except SyntaxError:
        program = ast.Module(body=[], type_ignores=[])
    assert trains_at_import(program) == line


def test_reward_file_that_trains_at_import_is_rejected_and_not_run(tmp_path):
    file, mark = tmp_path / "program.py", tmp_path / "ran"
    file.write_text(f"open({str(mark)!r}, 'w')\ndef right(completions): return [1.0]\n{MAIN}main()\n")
    with pytest.raises(ConfigError, match=r"starts training when it is imported \(line 7\).*another file"):
        load_rewards(Config().with_values({"reward_funcs": [f"{file}:right"]}))
    assert not mark.exists()


PLUGIN = """
from swift.infer_engine.protocol import Answer
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rollout.multi_turn import Scheduler, multi_turns
from swift.utils import get_logger
logger = get_logger()

class Starts(ORM):
    def __call__(self, completions, answer, **kwargs):
        return [float(text.startswith(right)) for text, right in zip(completions, answer)]

class Long(AsyncORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)
        self.longest = 3
    async def __call__(self, completions, **kwargs) -> list[Answer]:
        return [float(len(text) > self.longest) for text in completions]

class Turns(Scheduler):
    pass

orms['starts'] = Starts
orms["long"] = Long
multi_turns['turns'] = Turns
"""


@pytest.mark.parametrize("dialect", ["swift", "ms-swift"])
def test_rewards_of_a_plugin_are_loaded_by_their_names_and_judge_text(tmp_path, dialect):
    """In a chat completions are messages here, and text in ms-swift, whose own package is not installed."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    words = ["--dialect", dialect, "--reward_funcs", "starts", "format", "long", "--external_plugins", f"{tmp_path}/plugin.py"]
    parsed = parse([*words, "--per_device_train_batch_size", "8"] if dialect == "ms-swift" else words, dialects=lambda: DIALECTS)
    assert parsed.problems == []
    assert parsed.config.rewards.reward_funcs == [f"{tmp_path}/plugin.py:Starts", "format", f"{tmp_path}/plugin.py:Long"]
    starts, _, long = load_rewards(parsed.config)
    chat = [[{"role": "assistant", "content": text}] for text in ("12 is it", "no")]
    assert starts.function(completions=chat, answer=["12", "12"]) == [1.0, 0.0]
    assert starts.needs() == [("answer",)], "its signature is its own"
    assert (long.is_async, asyncio.run(long.function(completions=chat))) == (True, [1.0, 0.0])
    assert not [name for name in sys.modules if name.partition(".")[0] == "swift"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--reward_funcs unheard --external_plugins plugin.py",
            "no file of external_plugins (plugin.py) that can be read registers",
        ),
        ("--reward_funcs plugin.py:Starts --external_plugins plugin.py", None),
        ("--reward_funcs accuracy --external_plugins plugin.py", "only reward functions are loaded from plugin files"),
    ],
)
def test_swift_plugin_with_several_rounds_is_rejected(words, said):
    problems = [problem.message for problem in parse(["--dialect", "swift", *words.split()], dialects=lambda: DIALECTS).problems]
    assert len(problems) == (said is not None), problems
    assert said is None or said in problems[0]
