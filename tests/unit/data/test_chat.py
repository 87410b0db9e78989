"""Tokens of prompts, against what the tokenizer itself and TRL make of them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_grpo.base.errors import ConfigError
from megatron_grpo.config.config import DataConfig
from megatron_grpo.data.chat import PromptEncoder, as_completion, load_tokenizer
from megatron_grpo.data.prompts import open_stream
from tests.tiny_models import write_tiny

WORDS = ["<unk>", "<s>", "</s>", "[system]", "[user]", "[assistant]", "[think]", "be", "brief", "hello", "there", "well", "short"]
TEMPLATE = """{% for m in messages %}[{{ m.role }}] {{ m.content }} \
{% if not loop.last or m.role != 'assistant' %}</s> {% endif %}{% endfor %}\
{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and enable_thinking %}[think] {% endif %}{% endif %}"""
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def tokenizer():
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = TEMPLATE
    return made


def words(token_ids):
    return " ".join(WORDS[token_id] for token_id in token_ids)


def test_a_string_gets_the_special_tokens_that_the_tokenizer_adds(tokenizer):
    assert words(PromptEncoder(tokenizer)("hello there")) == "<s> hello there"


def test_a_string_has_no_place_for_a_system_message(tokenizer):
    assert words(PromptEncoder(tokenizer, system="be brief")("hello there")) == "<s> hello there"


def test_messages_go_through_the_chat_template_up_to_the_answer(tokenizer):
    assert words(PromptEncoder(tokenizer)(HELLO)) == "[user] hello there </s> [assistant]"


def test_system_is_put_before_messages_that_have_none(tokenizer):
    assert words(PromptEncoder(tokenizer, system="be brief")(HELLO)) == "[system] be brief </s> [user] hello there </s> [assistant]"
    own = [{"role": "system", "content": "well"}, *HELLO]
    assert words(PromptEncoder(tokenizer, system="be brief")(own)).startswith("[system] well </s> [user]")


def test_what_the_template_never_names_is_refused(tokenizer):
    from megatron_grpo.data.chat import unread_options

    [problem] = unread_options(tokenizer, {"enable_thinking": True, "enable_thinkin": True})
    assert problem.message == "chat_template_kwargs: the model's chat template has no variable enable_thinkin."


def test_enable_thinking_reaches_the_template_only_when_set(tokenizer):
    assert words(PromptEncoder(tokenizer, options={"enable_thinking": True})(HELLO)).endswith("[assistant] [think]")
    assert words(PromptEncoder(tokenizer)(HELLO)).endswith("[assistant]")


def test_a_begun_answer_is_continued(tokenizer):
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    assert words(PromptEncoder(tokenizer)(begun)) == "[user] hello there </s> [assistant] well"


def test_completions_have_trls_shapes():
    assert as_completion("hello", "well") == "well"
    assert as_completion(HELLO, "well") == [{"role": "assistant", "content": "well"}]


def test_prompts_of_a_stream_equal_what_trl_would_tokenize(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("hello", HELLO)))
    prompts = open_stream(DataConfig(dataset=str(tmp_path / "a.jsonl")), tokenizer, seed=0, shuffle=False).take(2)
    # The two calls of TRL's GRPO trainer, for a prompt that is a string and one that is a conversation.
    assert list(prompts[0].token_ids) == tokenizer(text=["hello"])["input_ids"][0]
    chat = tokenizer.apply_chat_template(conversation=[HELLO], add_generation_prompt=True, tokenize=True, return_dict=True)
    assert list(prompts[1].token_ids) == chat["input_ids"][0]


def test_left_truncation_keeps_the_end(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": HELLO}))
    source = open_stream(DataConfig(dataset=str(tmp_path / "a.jsonl"), max_prompt_length=3, truncation_strategy="left"), tokenizer, seed=0)
    assert words(source.take(1)[0].token_ids) == "there </s> [assistant]"
    assert source.rows.longest_prompt == 3


def test_chats_for_a_model_without_template_are_refused_before_anything_loads(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"prompt": HELLO}))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="1 of 2 rows are chats, but the model's tokenizer has no chat template.*a.jsonl line 2"):
        open_stream(DataConfig(dataset=str(tmp_path / "a.jsonl")), bare, seed=0)


def test_a_directory_without_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_saved_tokenizer_is_loaded_as_it_was(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert PromptEncoder(load_tokenizer(str(tmp_path)))(HELLO) == PromptEncoder(tokenizer)(HELLO)


def test_content_in_text_parts_reads_as_one_string(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}]
    assert PromptEncoder(tokenizer)(parts) == PromptEncoder(tokenizer)(HELLO)


def test_a_config_that_transformers_refuses_is_not_called_a_missing_tokenizer(tmp_path):
    write_tiny(tmp_path / "model", "qwen3")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(config["layer_types"]) + 1}))
    with pytest.raises(ConfigError, match="transformers cannot load its config.json: .*num_hidden_layers.*layer_types") as error:
        load_tokenizer(str(tmp_path / "model"))
    assert "no tokenizer" not in str(error.value)
