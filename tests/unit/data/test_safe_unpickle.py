"""Malicious data sets, chat templates and model folders."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.chat import load_tokenizer
from megatron_grpo.run.data.checks import tokenised
from megatron_grpo.run.data.files import LONGEST_LINE, _table, read_rows
from megatron_grpo.run.data.prompts import open_stream
from tests.unit.data.test_chat import tokenizer as tokenizer  # the fixture
from tests.unit.data.test_prompts import write_and_load_rows

CHAT = [{"role": "user", "content": "a b"}]


def test_read_rows_rejects_line_above_64_mib(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(100 * LONGEST_LINE)
    with pytest.raises(ConfigError, match="a.jsonl line 1 is longer than the maximum of 64 MiB"):
        read_rows(str(tmp_path / "a.jsonl"))


def test_read_rows_rejects_parquet_file_above_memory_limit(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "bomb.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40_000), pyarrow.array(["x" * 1000]))
    parquet.write_table(pyarrow.table({"prompt": text.cast(pyarrow.string())}), path)
    assert path.stat().st_size < 40_000
    with pytest.raises(ConfigError, match="has 40,000 rows; the first 4,096 already fill the memory limit for one file"):
        _table(parquet, path, path.name, "dataset", 4 << 20)
    assert len(read_rows(str(path))) == 40_000  # 40 MB: there is room for it


def test_chat_template_that_does_not_end_is_rejected_with_row(tmp_path):
    release = threading.Event()

    def encode(raw):
        return release.wait(60) if raw == "c" else [1]

    rows = write_and_load_rows(tmp_path, [{"prompt": prompt} for prompt in "abcd"])
    try:
        with pytest.raises(ConfigError, match="did not finish within 0.2 s for data.jsonl line 3"):
            tokenised(rows, encode, "dataset", seconds=0.2)
    finally:
        release.set()


def test_process_exits_while_a_chat_template_still_runs():
    program = """
import numpy as np
from megatron_grpo.run.data.files import ConcatRows
from megatron_grpo.run.data.checks import PromptDataset, tokenised
def encode(raw):
    while True: pass
rows = ConcatRows([([{"prompt": "a"}], lambda index: "a.jsonl line 1")])
tokenised(PromptDataset(rows=rows, keep=np.arange(1), longest_prompt=None), encode, "dataset", seconds=0.2)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "a.jsonl line 1" in ended.stderr


def test_keyboard_interrupt_in_tokenization_is_reraised(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tokenised(write_and_load_rows(tmp_path, [{"prompt": "a"}]), lambda raw: (_ for _ in ()).throw(KeyboardInterrupt), "dataset")


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
     "{% for a in range(10 ** 9) %}{% endfor %}", "{% include '/etc/passwd' %}", "{% do messages.clear() %}{{ messages.clear() }}"],
)  # fmt: skip
def test_chat_template_is_sandboxed(tokenizer, tmp_path, template):
    tokenizer.chat_template = template
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": CHAT}))
    with pytest.raises(ConfigError, match="raise an error in the model's tokenizer or chat template"):
        open_stream(DataConfig(dataset=str(tmp_path / "a.jsonl")), tokenizer, seed=0)


@pytest.mark.parametrize("standard", [True, False])
def test_model_folder_code_is_not_executed(tokenizer, tmp_path, standard):
    tokenizer.save_pretrained(tmp_path)
    proof = tmp_path / "it ran"
    (tmp_path / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: pass\nclass EvilConfig: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}} | ({} if standard else {"tokenizer_class": "Evil"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}))
    what = "the configuration" if standard else "the tokenizer and the configuration"
    with pytest.raises(ConfigError, match=rf"{what} of .* custom code \(evil.py\), which is not run"):
        load_tokenizer(str(tmp_path))
    assert not proof.exists()
