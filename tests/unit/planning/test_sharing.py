"""What `plan` says of prompts that are computed once: the decision with its reason, and tokens by hand."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.planning.check import check
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.planning.report import print_report

SMALL = ["--num_generations", "4", "--global_batch_size", "8"]


@pytest.fixture
def made(tmp_path):
    def make(lengths: str, *argv: object) -> Plan:
        (tmp_path / "lengths.txt").write_text(lengths)
        return make_plan(check([*SMALL, "--lengths", str(tmp_path / "lengths.txt"), *map(str, argv)]))

    return make


GROUPS = "100 11\n100 21\n100 31\n100 41\n" * 2  # 400 + 100 computed tokens a group, or 100 + 100


def test_tokens_groups_and_pieces_by_hand(made):
    found = made(GROUPS, "--max_tokens_per_micro_batch", 256).cost["sharing"]
    assert (found["setting"], found["shares"], found["groups"], found["pieces"]) == ("auto", True, 2, 2)
    assert (found["tokens_apart"], found["tokens_shared"]) == (1000, 400)
    assert (found["micro_batches_apart"], found["micro_batches_shared"]) == (4, 2)


def test_a_group_beyond_the_budget_and_one_dealt_over_ranks_is_in_pieces_with_a_prompt_each(made):
    found = made(GROUPS, "--max_tokens_per_micro_batch", 160).cost["sharing"]
    assert (found["pieces"], found["tokens_shared"]) == (4, 600)
    found = made(GROUPS, "--micro_batch_size", 2, "--world_size", 2).cost["sharing"]
    assert (found["pieces"], found["tokens_shared"], found["micro_batches_shared"]) == (4, 600, 4)


def test_packing_is_that_of_the_run(made):
    shared, apart = (made(GROUPS, "--max_tokens_per_micro_batch", 256, "--share_prompts", one).cost["packing"] for one in ("auto", "false"))
    assert (shared["micro_batches"], apart["micro_batches"]) == (2, 4)
    assert shared["max_tokens_per_micro_batch"] == 204  # a last token of each completion is counted with them, as everywhere in this object


@pytest.mark.parametrize(("lengths", "argv", "why"), [
    (GROUPS, ["--share_prompts", "false"], "share_prompts false"),
    (GROUPS, [], "micro_batch_size 1 puts no two completions together"),
    ("2 101\n" * 8, ["--micro_batch_size", 4], "1.5% of the tokens could be saved, less than 1/16"),
    (GROUPS, ["--micro_batch_size", 4, "--tuner_type", "lora", "--lora_dropout", "0.1"], "lora_dropout (0.1)"),
    (GROUPS, ["--micro_batch_size", 4, "--transformer_impl", "transformer_engine"], "Transformer Engine"),
])  # fmt: skip
def test_where_nothing_is_shared_the_reason_is_said(made, capsys, lengths, argv, why):
    plan = made(lengths, *argv)
    found = plan.cost["sharing"]
    assert not found["shares"] and why in found["why"] and found["tokens_shared"] == found["tokens_apart"]
    print_report(plan)
    assert "shared prompts  off" in capsys.readouterr().out


def test_true_shares_what_auto_leaves(made):
    assert made("2 101\n" * 8, "--micro_batch_size", 4, "--share_prompts", "true").cost["sharing"]["tokens_shared"] == 804


def test_the_object_holds_it_and_the_native_flags_say_it(made):
    written: list[str] = []
    plan = made(GROUPS, "--micro_batch_size", 4, "--share_prompts", "true")
    plan.write_json(written.append)
    found = json.loads("".join(written))
    assert found["cost"]["sharing"]["why"].startswith("share_prompts true") and "--share_prompts true" in found["native_flags"]
