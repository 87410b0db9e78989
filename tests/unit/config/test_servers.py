"""Server addresses from settings and files, and the server token."""

from __future__ import annotations

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.plugins.servers.addresses import Address, list_addresses, read_token
from megatron_grpo.plugins.servers.rules import ENGINE_SETTINGS
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table


def make_server_config(**settings):
    return RolloutConfig(vllm_mode="server", **{f"vllm_server_{name}": value for name, value in settings.items()})


def join_problems(**values):
    return " ".join(problem.message for problem in validate(Config().with_values({"vllm_mode": "server", **values})))


@pytest.mark.parametrize(
    ("settings", "urls"),
    [
        (dict(host=["a", "b"]), ["http://a:8000", "http://b:8000"]),
        (dict(host=["a", "b"], port=[1, 2]), ["http://a:1", "http://b:2"]),
        (dict(host=["a"], port=[1, 2]), ["http://a:1", "http://a:2"]),
        (dict(host=["a"], ca="c.pem"), ["https://a:8000"]),
        (dict(base_url=["https://a", "http://b/", "http://[::1]:9"]), ["https://a:443", "http://b:80", "http://[::1]:9"]),
        (dict(host=["a"], base_url=["http://a:8000", "http://b:8000"]), ["http://a:8000", "http://b:8000"]),
    ],
)
def test_server_addresses_from_hosts_and_ports_or_urls(settings, urls):
    assert [str(address) for address in list_addresses(make_server_config(**settings))] == urls


def test_server_address_files_are_reread_and_may_be_missing(tmp_path):
    named = make_server_config(host=[f"@{tmp_path}/one", f"@{tmp_path}/many"])
    assert list_addresses(named) == []
    (tmp_path / "one").write_text("http://a:1\n")
    assert list_addresses(named) == [Address("a", 1)]
    (tmp_path / "many").mkdir()
    for name, text in (("x", "http://b:2\n\nhttps://c:3\n"), (".half", "http://d:"), ("y", "http://a:1")):
        (tmp_path / "many" / name).write_text(text)
    assert list_addresses(named) == [Address("a", 1), Address("b", 2), Address("c", 3, is_https=True)]
    (tmp_path / "one").unlink()
    (tmp_path / "many" / "x").write_text("b:2")
    with pytest.raises(ValueError, match=r"many/x, line 1: 'b:2' is not a URL of the form http://host:8000"):
        list_addresses(named)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (dict(vllm_server_base_url=["http://a:8000/v1"]), "http://a:8000/v1|contains more than scheme, host and port"),
        (dict(vllm_server_host=["a:8000"]), "(a:8000) must be a host without a port. Set the port with vllm_server_port"),
        (dict(vllm_server_host=["http://a"]), "(http://a) must be a host without a port"),
        (dict(vllm_server_host=["a"], vllm_server_ca="/nowhere"), "vllm_server_ca (/nowhere) is not a file"),
        (dict(vllm_server_base_url=["http://a:1"], vllm_server_ca="/nowhere"), "http://a:1 does not use it. Use https://"),
        (dict(vllm_server_host=["a"], vllm_server_port=[0]), "vllm_server_port ([0]) must be at least 1 and at most 65535 each"),
    ],
)  # fmt: skip
def test_server_address_that_is_invalid_is_rejected(values, sentence):
    assert all(part in join_problems(**values) for part in sentence.split("|") if part != "http://a:8000/v1")


def test_engine_settings_belong_to_rollout_group():
    assert all(table()[name].group == "rollout" for name in ENGINE_SETTINGS)


def test_server_token_is_read_from_private_file_or_variable_and_not_printed(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret of the file\n")
    file.chmod(0o600)
    environment = {"MEGATRON_GRPO_TOKEN": " secret of the variable ", "XDG_CONFIG_HOME": str(tmp_path)}
    assert read_token(make_server_config(token_file=str(file)), environment) == "secret of the file"
    assert read_token(make_server_config(), environment) == "secret of the variable"
    del environment["MEGATRON_GRPO_TOKEN"]
    with pytest.raises(ConfigError, match="Set the variable MEGATRON_GRPO_TOKEN"):
        read_token(make_server_config(), environment)
    (tmp_path / "megatron-grpo").mkdir()
    made = tmp_path / "megatron-grpo" / "token"
    made.write_text("secret of a server")
    made.chmod(0o600)
    assert read_token(make_server_config(), environment) == "secret of a server"
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"is readable by other users \(mode {mode:o}\). Run `chmod 600") as error:
            read_token(make_server_config(token_file=str(file)), environment)
        assert "secret" not in str(error.value)
    for path, why in ((tmp_path / "none", "cannot be read"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=why):
            read_token(make_server_config(token_file=str(path)), environment)
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(make_server_config(token_file=str(file)), environment)


def test_server_address_file_that_is_endless_is_rejected():
    with pytest.raises(ValueError, match="@/dev/zero cannot be read: it has more than 64 million"):
        list_addresses(Config().with_values({"vllm_server_host": ["@/dev/zero"]}).rollout)
