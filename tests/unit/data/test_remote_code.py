"""trust_remote_code, with a tokenizer whose code leaves a file when it runs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_grpo.cli import main
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.run.config.remote_code import files_named, files_that_run, find_code_problem, make_code_warning
from megatron_grpo.run.data.chat import load_tokenizer
from megatron_grpo.run.data.tokens import tokenizer_fingerprint
from megatron_grpo.run.hf_writer import HfWriter
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from .helper_of_mine import mark

mark("tokenizer")

class Mine(PreTrainedTokenizerFast):
    def __call__(self, text, **options):
        return {"input_ids": [7, *super().__call__(text, **options)["input_ids"]]}
"""
CONFIGURATION = """
from transformers import Qwen3Config
from .helper_of_mine import mark

mark("configuration")

class MyConfig(Qwen3Config):
    model_type = "qwen3"
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plain"), layers=1)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def model(plain, tmp_path, mark, monkeypatch) -> Path:
    """A folder with a tokenizer of its own, and a configuration that transformers knows too."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    (folder / "tokenization_mine.py").write_text(CODE)
    (folder / "configuration_mine.py").write_text(CONFIGURATION)
    (folder / "modeling_mine.py").write_text("raise SystemExit('never')\n")
    (folder / "helper_of_mine.py").write_text(
        f"def mark(who):\n    with open({str(mark)!r}, 'a') as file:\n        print(who, file=file)\n"
    )
    change_json(folder / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["tokenization_mine.Mine", None]})
    maps = {"AutoConfig": "configuration_mine.MyConfig", "AutoModelForCausalLM": "modeling_mine.Model"}
    change_json(folder / "config.json", auto_map=maps)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:  # of a test before
        monkeypatch.delitem(sys.modules, name)
    return folder


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def find_code_error(folder: Path, *, is_trusted: bool) -> str:
    problem = find_code_problem(folder, is_trusted=is_trusted)
    return problem.message if problem else ""


def test_remote_code_tokenizer_without_trust_is_rejected_and_not_executed(model, mark, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(model))
    [problem] = caught.value.problems
    assert problem.message == (
        f"model: the tokenizer of {model} is custom code (tokenization_mine.py, configuration_mine.py and helper_of_mine.py), which is "
        "not run. Read them; if you trust them, use trust_remote_code true."
    )
    assert not mark.exists()


def test_remote_code_with_trust_is_executed_after_a_warning(model, plain, mark, caplog):
    with caplog.at_level(logging.WARNING):
        mine = load_tokenizer(str(model), trust_remote_code=True)
    assert mine("8 9")["input_ids"] == [7, *load_tokenizer(str(plain))("8 9")["input_ids"]] == [7, 8, 9]
    assert sorted(set(mark.read_text().split())) == ["configuration", "tokenizer"]
    [told] = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_grpo")]
    assert told == (
        f"trust_remote_code: tokenization_mine.py, configuration_mine.py and helper_of_mine.py of {model} run with your permissions. Read "
        "them first."
    )


@pytest.mark.parametrize("known", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast"])
def test_remote_code_tokenizer_known_to_transformers_runs_no_code(model, mark, known):
    change_json(model / "tokenizer_config.json", tokenizer_class=known)
    assert find_code_error(model, is_trusted=False) == ""
    load_tokenizer(str(model))
    assert not mark.exists()


def test_remote_code_config_unknown_to_vllm_is_rejected(model):
    change_json(model / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    change_json(model / "config.json", model_type="kimi_k2")  # transformers has none, vLLM has
    assert find_code_error(model, is_trusted=False) == ""
    change_json(model / "config.json", model_type="mine")
    assert find_code_error(model, is_trusted=False).startswith(f"model: the configuration of {model} is custom code")


def test_remote_code_in_other_repository_or_missing_is_rejected_without_download(model, mark):
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["somebody/else--tokenization_mine.Mine", None]})
    where = "refers to code in another place .somebody/else--tokenization_mine.Mine., which is not downloaded. "
    with pytest.raises(ConfigError, match=where + "Copy its file into the folder, and write tokenization_mine.Mine there."):
        load_tokenizer(str(model), trust_remote_code=True)
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["/tmp/tokenization_mine.Mine", None]})
    assert "refers to code in another place" in find_code_error(model, is_trusted=True)
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_lost.Mine", None]})
    assert "refers to tokenization_lost.py, which is missing" in find_code_error(model, is_trusted=True)
    assert not mark.exists()


def test_remote_code_that_fails_raises_config_error(model):
    (model / "tokenization_mine.py").write_text("import a_library_that_nobody_has\nclass Mine: pass\n")
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded: ImportError: .*a_library_that_nobody_has"):
        load_tokenizer(str(model), trust_remote_code=True)


def test_remote_code_setting_has_no_effect_on_model_without_code(plain):
    assert find_code_error(plain, is_trusted=False) == find_code_error(plain, is_trusted=True) == "" and make_code_warning(plain) is None
    assert load_tokenizer(str(plain), trust_remote_code=True).get_vocab() == load_tokenizer(str(plain)).get_vocab()


def test_remote_code_of_layers_is_copied_and_not_executed(model, mark):
    assert set(files_named(model)) - set(files_that_run(model)) == {"modeling_mine.py"}
    reader = HfReader(model)
    with HfWriter(model.parent / "out", model) as write:
        for name in reader.names:
            write(name, reader(name))
    assert {path.name for path in (model.parent / "out").glob("*.py")} == set(files_named(model)) and not mark.exists()
    assert load_tokenizer(str(model.parent / "out"), trust_remote_code=True)("8")["input_ids"] == [7, 8]


def test_remote_code_of_image_processor_is_listed_for_vision_models(model):
    (model / "images_mine.py").write_text("")
    (model / "preprocessor_config.json").write_text(json.dumps({"auto_map": {"AutoImageProcessor": "images_mine.X"}}))
    assert "images_mine.py" not in files_that_run(model)
    change_json(model / "config.json", vision_config={})
    assert "images_mine.py" in files_that_run(model)


def test_tokenizer_fingerprint_changes_with_remote_code(model):
    names = [tokenizer_fingerprint(load_tokenizer(str(model), trust_remote_code=True))]
    (model / "tokenization_mine.py").write_text(CODE.replace("[7,", "[8,"))
    names.append(tokenizer_fingerprint(load_tokenizer(str(model), trust_remote_code=True)))
    assert len(set(names)) == 2


def run_plan(model: Path, capsys, *words: str) -> tuple[int, dict]:
    rows = model.parent / "rows.jsonl"
    rows.write_text('{"prompt": "8 9"}\n')
    code = main(
        ["plan", "--json", "--model", str(model), "--dataset", str(rows), "--max_steps", "1", "--max_completion_length", "8", *words]
    )
    return code, json.loads(capsys.readouterr().out)


def test_plan_with_remote_code_names_files_and_executes_nothing(model, mark, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, found = run_plan(model, capsys)
    assert code == 2 and [error["message"] for error in found["errors"]] == [find_code_error(model, is_trusted=False)]
    code, found = run_plan(model, capsys, "--trust_remote_code", "true")
    assert code == 0 and make_code_warning(model) in found["warnings"]
    change_json(model / "config.json", architectures=["MineForCausalLM"])
    code, found = run_plan(model, capsys, "--trust_remote_code", "true")
    assert code == 2 and "the architecture MineForCausalLM is not supported" in found["errors"][0]["message"]
    assert not mark.exists()


def test_trust_remote_code_is_not_taken_from_a_checkpoint(monkeypatch):
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.open_checkpoint import settings_over

    assert settings_over(Config(), {"trust_remote_code": True, "seed": 5}).model.trust_remote_code is False
    assert settings_over(Config(), {"trust_remote_code": True, "seed": 5}).run.seed == 5


def test_remote_code_tokenizer_loads_on_all_ranks(model):
    modules = model.parent / "modules"

    def body(rank, world_size):
        import transformers.dynamic_module_utils as theirs

        from megatron_grpo.core.rollout.colocated import ColocatedEngine
        from megatron_grpo.core.settings import RolloutConfig
        from megatron_grpo.run.data.chat import load_tokenizer

        theirs.HF_MODULES_CACHE = str(modules)
        ids = load_tokenizer(str(model), trust_remote_code=True)("8")["input_ids"]
        cfg = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=4)
        engine = ColocatedEngine.build(
            cfg, model_path=model, dtype="float32", max_model_len=32, seed=0, rank=rank, world_size=world_size, trust_remote_code=True
        )
        return ids, engine._llm.get_tokenizer()("8")["input_ids"]

    assert run_ranks(body, 2) == [([7, 8], [7, 8])] * 2


def test_mismatch_with_remote_code_requires_trust(model, mark):
    modules = model.parent / "modules"

    def body(rank, world_size, *words):
        import contextlib
        import io

        import transformers.dynamic_module_utils as theirs

        theirs.HF_MODULES_CACHE = str(modules)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(["mismatch", str(model), "--rows", "1", "--torch_dtype", "float32", "--output_dir", str(modules), *words])
        return code, " ".join((out.getvalue() + said.getvalue()).split())

    [(code, said)] = run_ranks(body, 1)
    assert code == 2 and "is custom code (tokenization_mine.py" in said and "trust_remote_code true" in said and not mark.exists()
    [(code, said)] = run_ranks(body, 1, "--trust_remote_code", "true", timeout=200)
    assert code == 0 and "tokenizer" in mark.read_text().split(), said


def test_model_card_of_remote_code_model_passes_trust_remote_code(model, plain):
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.metrics.model_card import ModelCard, render_card

    for source, trusts in ((model, True), (plain, False)):
        text = render_card(ModelCard(kind="model", cfg=Config(), source=source), [], name="out", has_curves=False)
        assert ('AutoTokenizer.from_pretrained("out", trust_remote_code=True)' in text) == trusts


def test_run_fingerprint_changes_with_remote_code(model):
    from megatron_grpo.core.settings import ModelConfig
    from megatron_grpo.run.checkpoint.fingerprints import compute_fingerprints
    from megatron_grpo.run.config.settings import Config

    name, cfg = "the model's own code", Config(model=ModelConfig(trust_remote_code=True))
    before = compute_fingerprints(cfg, model_path=model)
    (model / "helper_of_mine.py").write_text("def mark(who): pass\n")
    after = compute_fingerprints(cfg, model_path=model)
    assert {what for what in before if before[what] != after[what]} == {name}
    assert name not in compute_fingerprints(Config(), model_path=model)


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face Hub that a download needs; the client is the real one."""

    files: ClassVar[dict[str, bytes]] = {}
    sha = "a" * 40

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/"):
            tree = [{"type": "file", "path": name, "size": len(body), "oid": "b" * 40} for name, body in self.files.items()]
            body = json.dumps(tree if "/tree/" in path else {"id": "me/own", "sha": self.sha, "siblings": []}).encode()
        else:
            body = self.files[path.rpartition("/")[2]]
        self.send_response(200)
        for name, value in {"Content-Length": len(body), "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": self.sha}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def test_remote_code_is_downloaded_only_with_trust(model, tmp_path):
    Hub.files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".py", ".json")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = """
from megatron_grpo.run.models import find_model
for with_code in (False, True):
    print(*sorted(path.name for path in find_model('me/own', with_code=with_code).glob('*.py')))
"""
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    try:
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    assert done.stdout.splitlines() == ["", " ".join(sorted(name for name in Hub.files if name.endswith(".py")))], done.stderr
