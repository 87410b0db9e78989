"""Tokens of prompts, against the tokenizer itself and against TRL."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.chat import PromptEncoder, SpecialTokens, as_completion, encode_text, find_opened_tag, load_tokenizer
from megatron_grpo.run.data.prompts import open_stream
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


def decode_words(token_ids):
    return " ".join(WORDS[token_id] for token_id in token_ids)


def test_a_string_gets_the_special_tokens_that_the_tokenizer_adds(tokenizer):
    assert decode_words(PromptEncoder(tokenizer)("hello there")) == "<s> hello there"


def make_tokenizer_with_processor(single, *more):
    """A tokenizer whose post-processor adds what `single` says; `more` are special tokens besides."""
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*WORDS, *more])}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": list(more)})
    return made


@pytest.mark.parametrize(
    ("single", "text", "tokens"),
    [
        ("<s> $A", "hello", "<s> hello"),
        ("<s> $A", "<s> hello", "<s> hello"),  # rendered by a chat template before
        ("<s> $A", "<s> <s> hello", "<s> <s> hello"),  # as the row has it
        ("<s> $A </s>", "hello", "<s> hello"),  # add_eos_token
        ("<s> $A </s>", "<s> hello </s>", "<s> hello </s>"),  # the row's own
        ("$A </s>", "hello </s> there", "hello </s> there"),
        ("<s> </s> $A", "<s> </s> well", "<s> </s> well"),
        ("<s> </s> $A", "<s> well", "<s> </s> <s> well"),
        ("$A", "<s> hello", "<s> hello"),
    ],
)
def test_prompt_encoder_text_has_one_bos_and_no_eos(single, text, tokens):
    assert decode_words(PromptEncoder(make_tokenizer_with_processor(single))(text)) == tokens


def test_prompt_encoder_keeps_eos_of_complete_text():
    assert decode_words(encode_text(make_tokenizer_with_processor("<s> $A </s>"), "<s> hello", is_open=False)) == "<s> hello </s>"


def test_stop_strings_that_are_special_tokens_become_token_ids_and_mixtures_are_refused():
    tokens = SpecialTokens(make_tokenizer_with_processor("$A", "<|end|>", "<|im_end|>"))
    assert tokens.split_stop(["</s>", "well", "<|im_end|>"]) == (["well"], [2, len(WORDS) + 1])
    assert list(tokens.stop_problems(["</s>", "well", "<|im_end|>"])) == []
    [problem] = tokens.stop_problems(["well <|im_end|>"])
    assert "stop 'well <|im_end|>' contains the special token '<|im_end|>'" in problem.message
    assert "Use --stop '<|im_end|>' alone" in problem.message


def test_chat_template_end_token_that_does_not_stop_is_noted():
    tokenizer = make_tokenizer_with_processor("$A", "<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|> {% endfor %}"
    tokens, end = SpecialTokens(tokenizer), len(WORDS)
    assert f"Use --stop_token_ids {end}." in tokens.find_unended({}, {2})
    assert tokens.find_unended({}, {2, end}) is None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
    assert tokens.find_unended({}, {2}) is None, "the last answer ends where sampling stops"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {{ '' if loop.last else '<|im_end|>' }}{% endfor %}"
    assert f"Use --stop_token_ids {end}." in tokens.find_unended({}, {2})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert tokens.find_unended({}, {2}) is None, "ordinary text ends no turn"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert tokens.find_unended({}, {2}) is None


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("[user] hi\n<think>\n", "think"),
        ("<a-b>", "a-b"),
        ("x <think>\n\n</think>\n\n", None),  # thinking switched off: the model may open its own
        ("use <think> and <answer> tags", None),
        ("<|im_start|>", None),
    ],
)
def test_find_opened_tag_reads_end_of_prompt_only(prompt, opened):
    assert find_opened_tag(prompt) == opened


def test_tags_that_are_special_tokens_are_known():
    assert not SpecialTokens(make_tokenizer_with_processor("$A")).hides_tags(["reason"])
    assert SpecialTokens(make_tokenizer_with_processor("$A", "</think>")).hides_tags([]) and SpecialTokens(
        make_tokenizer_with_processor("$A", "<reason>")
    ).hides_tags(["reason"])


def test_prompt_encoder_text_ignores_system_message(tokenizer):
    assert decode_words(PromptEncoder(tokenizer, system="be brief")("hello there")) == "<s> hello there"


def test_messages_go_through_the_chat_template_up_to_the_answer(tokenizer):
    assert decode_words(PromptEncoder(tokenizer)(HELLO)) == "[user] hello there </s> [assistant]"


def test_system_is_put_before_messages_that_have_none(tokenizer):
    assert decode_words(PromptEncoder(tokenizer, system="be brief")(HELLO)) == "[system] be brief </s> [user] hello there </s> [assistant]"
    own = [{"role": "system", "content": "well"}, *HELLO]
    assert decode_words(PromptEncoder(tokenizer, system="be brief")(own)).startswith("[system] well </s> [user]")


def test_chat_template_kwargs_unknown_to_template_are_rejected(tokenizer):
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.inputs import ValidatedInputs, template_options

    cfg = Config().with_values({"chat_template_kwargs": {"enable_thinking": True, "enable_thinkin": True}})
    [problem] = template_options(cfg, ValidatedInputs(tokenizer=tokenizer))
    assert problem.message == "chat_template_kwargs: the model's chat template has no variable enable_thinkin."


def test_enable_thinking_reaches_the_template_only_when_set(tokenizer):
    assert decode_words(PromptEncoder(tokenizer, options={"enable_thinking": True})(HELLO)).endswith("[assistant] [think]")
    assert decode_words(PromptEncoder(tokenizer)(HELLO)).endswith("[assistant]")


def test_prompt_encoder_continues_a_started_answer(tokenizer):
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    assert decode_words(PromptEncoder(tokenizer)(begun)) == "[user] hello there </s> [assistant] well"


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
    assert decode_words(source.take(1)[0].token_ids) == "there </s> [assistant]"
    assert source.rows.longest_prompt == 3


def test_chats_for_a_model_without_template_are_refused_before_anything_loads(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"prompt": HELLO}))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="1 of 2 rows are chats, but the model's tokenizer has no chat template.*a.jsonl line 2"):
        open_stream(DataConfig(dataset=str(tmp_path / "a.jsonl")), bare, seed=0)


def test_a_directory_without_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_load_tokenizer_of_saved_tokenizer_gives_equal_tokens(tokenizer, tmp_path):
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
