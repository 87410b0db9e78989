"""`megatron-grpo completion` in a real bash, and in a real zsh where installed; suggestions are accepted by the parser."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from megatron_grpo.cli import COMMANDS
from megatron_grpo.commands.start.completion import completion_script, run_completion
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.table import MAPS, read_value, table
from tests.terminal import Terminal

ANSWER = 'megatron-grpo() { echo "<$*>"; }\n'  # stands for the program, and shows the line that the shell has completed
TYPED = {  # typed before the TAB: arguments that the program receives
    "trai": "train",
    "train --max-completion-le": "train --max_completion_length",
    "train --learning_ra": "train --learning_rate",
    "train --loss_type dr": "train --loss_type dr_grpo",
    "train --loss_type=dap": "train --loss_type=dapo",
    "train --sequence_parallel t": "train --sequence_parallel true",
    "train --lora_kwargs use_rs": "train --lora_kwargs use_rslora=",
    "train --lora_kwargs use_rslora=t": "train --lora_kwargs use_rslora=true",
    "train --reward_funcs math repe": "train --reward_funcs math repetition",
    "train --reward_funcs my_re": "train --reward_funcs my_rewards.py",
    "train --help roll": "train --help rollout",
    "plan --config my_re": "plan --config my_rewards.py",
    "doctor --js": "doctor --json",
    "dry-run --row": "dry-run --rows",
    "completion z": "completion zsh",
}


def read_completions(terminal):
    """What the program receives after each line of `TYPED` and a TAB."""
    return {typed: terminal.say(f"megatron-grpo {typed}\t\n", r"<(.*?) ?>\r\n")[1] for typed in TYPED}


def test_completion_in_bash_completes_commands_settings_values_and_files(tmp_path):
    (tmp_path / "completion.bash").write_text(completion_script("bash") + ANSWER)
    (tmp_path / "my_rewards.py").touch()
    terminal = Terminal(["bash", "--norc", "-i"], tmp_path)
    try:
        terminal.say("source completion.bash; complete -p megatron-grpo\n", r"complete -o default -F _megatron_grpo megatron-grpo\r\n")
        assert read_completions(terminal) == TYPED
    finally:
        terminal.close()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_completion_in_zsh_equals_bash(tmp_path):
    (tmp_path / "completion.zsh").write_text(completion_script("zsh") + ANSWER)
    (tmp_path / "my_rewards.py").touch()
    (tmp_path / ".zshrc").touch()
    terminal = Terminal(["zsh", "-d", "-i"], tmp_path)
    try:
        terminal.say("autoload -U compinit; compinit -u -D; source completion.zsh; print $_comps[megatron-grpo]:\n", r"_megatron_grpo:\r\n")
        assert read_completions(terminal) == TYPED
    finally:
        terminal.close()


def list_offers(tmp_path, *words):
    """What bash offers for the last word."""
    script = tmp_path / "completion.bash"
    script.write_text(completion_script("bash"))
    line = ["megatron-grpo", *words]
    program = f"""source {script}; COMP_WORDS=({" ".join(f"'{word}'" for word in line)}); COMP_CWORD={len(line) - 1}
_megatron_grpo 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_completion_offers_all_commands_settings_and_aliases(tmp_path):
    assert list_offers(tmp_path, "") == [*COMMANDS, "--help", "--version"]
    visible = [setting for setting in table().values() if not setting.is_hidden]
    expected = {name for setting in visible for name in (setting.name, *setting.aliases)} | {*MAPS}
    found = {flag.removeprefix("--") for flag in list_offers(tmp_path, "train", "--")}
    assert found == expected | {"config", "print_config", "help", "help_search"}
    assert list_offers(tmp_path, "train", "") == list_offers(tmp_path, "train", "--")
    assert list_offers(tmp_path, "doctor", "--") == ["--json", "--help"]
    assert list_offers(tmp_path, "report", "runs", "-") == ["--output", "--help"]
    assert list_offers(tmp_path, "completion", "") == ["bash", "zsh"]


def test_completion_values_are_accepted_by_the_parser(tmp_path):
    checked = 0
    for setting in table().values():
        if setting.choices or setting.kind == "bool":
            words = (
                list_offers(tmp_path, "train", f"--{setting.name}", "") if checked % 10 == 0 else [*setting.choices] or ["true", "false"]
            )
            assert words == ([*setting.choices] or ["true", "false"])
            assert all(read_value(setting, word) is not None or word == "none" for word in words)
            checked += 1
    assert checked > 90
    assert list_offers(tmp_path, "train", "--lora_kwargs", "")[0] == "lora_dropout="
    assert not parse(["--reward_funcs", *list_offers(tmp_path, "train", "--reward_funcs", "")]).problems
    assert {"grpo", "lora_kwargs", "lr"} <= {*list_offers(tmp_path, "train", "--help", "")}


def test_after_the_value_of_a_setting_come_settings_and_after_a_number_no_files(tmp_path):
    assert "--seed" in list_offers(tmp_path, "train", "--lr", "1e-6", "")
    assert list_offers(tmp_path, "train", "--lr", "") == []
    assert "code" in list_offers(tmp_path, "train", "--reward_funcs", "math", "format", "")


def test_scripts_have_the_syntax_of_their_shells(tmp_path):
    for shell, script in (("bash", completion_script("bash")), ("zsh", completion_script("zsh"))):
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_completion_for_unsupported_shell_is_rejected():
    for words in ([], ["fish"], ["bash", "zsh"]):
        with pytest.raises(ConfigError, match="`megatron-grpo completion bash` or `megatron-grpo completion zsh`"):
            run_completion(words)


def test_completion_imports_no_torch():
    code = (
        "import sys; from megatron_grpo.cli import main; main(['completion', 'bash']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'megatron', 'vllm')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0 and "complete -o default -F _megatron_grpo megatron-grpo" in ended.stdout
