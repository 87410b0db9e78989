"""`--push_to_hub` with the Hub's own client against a local server."""

from __future__ import annotations

import shlex

import pytest

from megatron_grpo.run.config import parse
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from tests.ranks import run_ranks
from tests.small_hub import TOKEN, LocalHub, use


@pytest.fixture
def hub(monkeypatch):
    hub = LocalHub()
    use(monkeypatch, hub.address)
    yield hub
    hub.close()


@pytest.fixture
def folders(tmp_path):
    """What a run leaves in output_dir: an adapter, and the model that it makes."""
    for name in ("hf", "hf_merged"):
        folder = tmp_path / "countdown" / name
        folder.mkdir(parents=True)
        (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
        (folder / "model.safetensors").write_bytes(name.encode() * 1000)
    return [tmp_path / "countdown" / name for name in ("hf", "hf_merged")]


def open_and_push(out, folders, **settings):
    """{folder: repository}; or the kind of error and its sentence."""
    from megatron_grpo.core.base.errors import ConfigError, RunError
    from megatron_grpo.core.parallel import collectives
    from megatron_grpo.run import export
    from megatron_grpo.run.config.settings import Config

    cfg = Config().with_values({"output_dir": str(out), "push_to_hub": True, **settings})
    try:
        repositories = export.open_repositories(cfg, folders)
        if collectives.rank() == 0:
            export.push_to_hub(repositories)
    except (ConfigError, RunError) as error:
        return type(error).__name__, str(error)
    return {path.name: repository for path, repository in repositories.items()}


def test_push_to_hub_uploads_complete_exports(hub, folders):
    found = open_and_push(folders[0].parent, folders, hub_private_repo=True)
    assert found == {"hf": "me/countdown", "hf_merged": "me/countdown-merged"}
    for repository, folder in zip(("me/countdown", "me/countdown-merged"), folders, strict=True):
        there = hub.repositories[repository]
        assert there["files"] == {path.name: path.read_bytes() for path in folder.iterdir()} and there["visibility"] == "private"


def test_push_to_hub_check_runs_on_one_rank_and_result_is_shared(hub, folders):
    def body(rank, world, out, folders, address):
        with pytest.MonkeyPatch.context() as patch:
            use(patch, address)
            return open_and_push(out, folders), open_and_push(out, folders, hub_model_id="somebody/else")

    told = run_ranks(body, 2, folders[0].parent, folders[:1], hub.address)
    assert told[0] == told[1] and told[0][0] == {"hf": "me/countdown"} and told[0][1][0] == "ConfigError"
    assert sum("repos/create" in asked for asked in hub.asked) == 2


def test_push_to_hub_uses_existing_repository(hub, folders):
    for _ in range(2):
        found = open_and_push(folders[0].parent, folders[:1], hub_model_id="me/mine")
    assert found == {"hf": "me/mine"} and set(hub.repositories) == {"me/mine"}


def test_push_to_hub_failure_keeps_export_and_prints_upload_command(hub, folders):
    hub.refuses = 507
    kind, said = open_and_push(folders[0].parent, folders)
    assert kind == "RunError" and said.count("is complete on this disk") == 2 and "507" in said
    assert shlex.join(["hf", "upload", "me/countdown-merged", str(folders[1]), "."]) in said
    assert (folders[1] / "model.safetensors").exists() and TOKEN not in said


@pytest.mark.parametrize(
    ("settings", "environment", "sentence"),
    [
        ({}, {"HF_TOKEN": "", "HF_TOKEN_PATH": "/nowhere"}, "set HF_TOKEN"),
        ({}, {"HF_TOKEN": "hf_other"}, "can neither be created nor used: "),
        ({"hub_model_id": "somebody/else"}, {}, "somebody/else can neither be created nor used: 403"),
        ({"hub_model_id": "no name/at all/"}, {}, "can neither be created nor used: "),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "can neither be created nor used: "),
        ({}, {"HF_HUB_OFFLINE": "1"}, "can neither be created nor used: "),
    ],
)
def test_push_to_hub_without_access_is_rejected_before_training(hub, folders, monkeypatch, settings, environment, sentence):
    use(monkeypatch, **{"address": hub.address} | environment)
    kind, said = open_and_push(folders[0].parent, folders, **settings)
    assert kind == "ConfigError" and sentence in said and TOKEN not in said and hub.repositories == {}


def test_push_to_hub_false_makes_no_requests(hub, folders):
    assert open_and_push(folders[0].parent, folders, push_to_hub=False) == {}
    assert hub.asked == []


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hub_model_id": "a/b"}, "hub_model_id (a/b) has no effect without push_to_hub true"),
        ({"hub_private_repo": False}, "hub_private_repo (False) has no effect without push_to_hub true"),
        ({"push_to_hub": True, "export_hf": False}, "push_to_hub true requires export_hf true"),
    ],
)
def test_push_to_hub_settings_without_effect_are_rejected(values, sentence):
    assert any(sentence in problem.message for problem in validate(Config().with_values(values)))


@pytest.mark.parametrize("dialect", [[], ["--dialect", "trl"], ["--dialect", "swift"]])
def test_hub_token_as_setting_is_rejected(dialect):
    from megatron_grpo.commands.compat import DIALECTS

    problems = parse(["--hub_token", TOKEN, *dialect], dialects=lambda: DIALECTS).problems
    assert any("HF_TOKEN" in problem.message for problem in problems) and not any(TOKEN in problem.message for problem in problems)
