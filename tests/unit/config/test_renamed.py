"""Names of earlier versions are read wherever names are read, with one note a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_grpo.cli import COMMANDS, FORMER_COMMANDS, main
from megatron_grpo.compat import DIALECTS
from megatron_grpo.config import names, parse, resolve, table
from megatron_grpo.config.table import former_names, in_current_names

# Former name -> (current name, a word that is not the default, its value).
RENAMED = {
    "audit": ("check_replicas", "true", True),
    "audit_steps": ("check_replicas_interval", "7", 7),
    "audit_action": ("check_replicas_action", "warn", "warn"),
    "same_bits": ("bitwise_parity", "true", True),
    "capsules": ("debug_dump_steps", "5", 5),
    "capsule_weights_gb": ("debug_dump_weights_gb", "1.5", 1.5),
    "exclude_dead_groups": ("exclude_zero_std_groups", "true", True),
    "share_prompts": ("share_prefix", "false", "false"),
    "logp_difference_warn": ("logprob_diff_warn", "0.5", 0.5),
    "verify_weight_push": ("verify_weight_sync", "false", False),
}


def value_of(cfg, name):
    return getattr(getattr(cfg, table()[name].group), name)


def test_every_renamed_setting_is_tried_here():
    assert dict(former_names()) == {former: current for former, (current, *_) in RENAMED.items()}
    aliases = {alias for setting in table().values() for alias in setting.aliases}
    assert not former_names().keys() & (table().keys() | aliases)


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_name_is_read_on_the_command_line_and_in_files(former, tmp_path):
    current, word, value = RENAMED[former]
    flat, sections = tmp_path / "flat.yaml", tmp_path / "sections.yaml"
    flat.write_text(f"{former}: {word}\n")
    sections.write_text(f"{table()[current].group}:\n  {former}: {word}\n")
    script = tmp_path / "run.sh"
    script.write_text(f"megatron-grpo train --{former} {word}\n")
    ways = [
        [f"--{former}", word],
        [f"--{former.replace('_', '-')}={word}"],
        *(["--config", str(file)] for file in (flat, sections, script)),
    ]
    for argv in ways:
        parsed = parse(argv, dialects=DIALECTS)
        assert not parsed.problems and value_of(parsed.config, current) == value, argv
        assert parsed.renamed == {former: current}
    assert parse([f"--{current}", word]).renamed == {}


def test_a_former_name_is_a_key_of_its_map_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("debug_kwargs:\n  audit: true\n  audit_steps: 3\n")
    assert resolve(["--debug_kwargs", "audit=true", "audit_steps=3"]).run == resolve(["--config", str(file)]).run
    assert resolve(["--debug_kwargs.audit_steps", "3"]).run.check_replicas_interval == 3


def test_no_before_a_former_name_is_false():
    parsed = parse(["--no_same_bits"])
    assert parsed.config.rollout.bitwise_parity is False and parsed.renamed == {"same_bits": "bitwise_parity"}


def test_two_names_of_one_setting_must_not_have_two_values():
    (problem,) = parse(["--capsules", "1", "--debug_dump_steps", "2"]).problems
    assert problem.message == "capsules (1) and debug_dump_steps (2) set the same setting. Use one of them."


def test_a_note_is_printed_once_a_run(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("same_bits: true\ncapsules: 3\n")
    for _ in range(2):
        assert main(["train", "--config", str(file), "--same_bits", "true", "--print_config"]) == 0
        told = capsys.readouterr()
        assert told.err == "Note: --same_bits is now --bitwise_parity.\nNote: --capsules is now --debug_dump_steps.\n"
        assert "bitwise_parity" in told.out and "same_bits" not in told.out


def test_one_rank_prints_the_note():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    program = "from megatron_grpo.cli import main; import sys; sys.exit(main(['train', '--same_bits', 'true', '--print_config']))"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_explains_a_former_name_and_lists_current_ones_only(capsys):
    assert main(["train", "--help", "audit_steps"]) == 0
    assert "\n  --check_replicas_interval N\n" in capsys.readouterr().out
    assert main(["train", "--help", "all"]) == 0
    told = capsys.readouterr().out
    assert not any(f"--{former} " in told or f"--{former}," in told for former in RENAMED)


def test_a_typing_error_is_answered_with_a_current_name():
    (problem,) = parse(["--capsule_weights_g", "1"], dialects=DIALECTS).problems
    assert "capsule_weights_gb" not in problem.message
    assert all(names()[former] is table()[current] for former, (current, *_) in RENAMED.items())


def test_saved_settings_get_current_names():
    saved = {former: value for former, (_, _, value) in RENAMED.items()} | {"lr": 1.0}
    assert in_current_names(saved) == {current: value for current, _, value in RENAMED.values()} | {"lr": 1.0}


def test_the_second_word_of_dataset_is_a_hidden_setting(capsys):
    assert resolve(["--further_datasets", "b.jsonl", "--dataset", "a.jsonl"]).data.further_datasets == ["b.jsonl"]
    assert main(["train", "--help", "all"]) == 0
    assert "further_datasets" not in capsys.readouterr().out


@pytest.mark.parametrize("former, current", FORMER_COMMANDS.items())
def test_a_former_command_is_the_current_one_with_a_note(former, current, capsys):
    assert main([current, "--help"]) == 0
    told = capsys.readouterr()
    assert main([former, "--help"]) == 0
    assert capsys.readouterr() == (told.out, f"Note: {former} is now {current}.\n") and not told.err
    assert former not in COMMANDS and current in COMMANDS
    assert main(["--help"]) == 0
    assert f"  {former} " not in capsys.readouterr().out


def test_the_former_flag_of_variants_is_read_with_a_note(capsys, tmp_path):
    asked = [["--try", "beta=0.1", "--try=beta=0.2", "--variant", "beta=0.3"], ["--variant", "beta=0.3"]]
    for argv in asked:
        assert main(["compare-losses", str(tmp_path), *argv]) == 2  # nothing is recorded there
        told = capsys.readouterr().err
        assert told.count("Note: --try is now --variant.\n") == ("--try" in argv) and "has no checkpoint with recorded rows" in told
