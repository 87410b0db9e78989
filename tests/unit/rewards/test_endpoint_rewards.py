"""Rewards that call a model: `reward_model`, local and over HTTP, and `llm_judge`."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest
import torch

from megatron_grpo.core.base.errors import ConfigError, RewardError
from megatron_grpo.plugins.rewards.llm_judge import read_score
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.rewards.protocol import RewardBatch, RowFailure
from megatron_grpo.run.rewards.scoring import score
from tests.unit.rewards.servers import serve_json

CHAT = [{"role": "user", "content": "10 11"}]


def load(name, **settings):
    return load_rewards(Config().with_values({"reward_funcs": [name], "reward_timeout": 5.0, **settings}))[0]


def load_judge(url, **settings):
    return load("llm_judge", llm_judge_url=f"{url}/v1", llm_judge_model="judge-7b", **settings)


def make_chat_response(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def make_batch(completions, **columns):
    return RewardBatch(prompts=["p"] * len(completions), completions=completions, completion_ids=[[1]] * len(completions), columns=columns,
                       labels=[f"row {row}" for row in range(len(completions))])  # fmt: skip


# --- llm_judge


@pytest.mark.parametrize(
    ("verdict", "value"),
    [("Good.\nScore: 7", 7), ("**Score:** 7.5/10", 7.5), ("score = 3\nFinal score: 4", 4), ("8", 8), ("I like it", None), ("", None),
     ("Score: -1", -1), ("10 out of 10", None)],
)  # fmt: skip
def test_llm_judge_score_is_parsed_from_response(verdict, value):
    assert read_score(verdict) == value


def test_llm_judge_receives_question_answer_and_completion_and_scales_score(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    requests = []

    def answer(path, request, headers):
        requests.append((path, request, headers))
        return make_chat_response("Fine. Score: 7" if "good" in request["messages"][0]["content"] else "Score: 25")

    with serve_json(answer) as url:
        function = load_judge(url, llm_judge_api_key_env="JUDGE_KEY")
        completions = [[{"role": "assistant", "content": "good {prompt}"}], "great"]
        assert function.function(prompts=[CHAT, "why?"], completions=completions, answer=["21", None], trainer_state=None) == [0.7, 1.0]
    path, request, headers = next(sent for sent in requests if "good" in str(sent))
    text = request["messages"][0]["content"]
    assert path == "/v1/chat/completions" and request["model"] == "judge-7b" and request["temperature"] == 0
    assert headers["Authorization"] == "Bearer sesame"
    assert "user: 10 11" in text and "21" in text and "good {prompt}" in text and "from 0 to 10" in text


def test_llm_judge_prompt_file_may_contain_columns(tmp_path):
    (tmp_path / "judge.txt").write_text("{rubric} | {completion} | {unknown}")
    seen = []

    def answer(path, request, headers):
        seen.append(request["messages"][0]["content"])
        return make_chat_response("Score: 1")

    with serve_json(answer) as url:
        function = load_judge(url, llm_judge_prompt=str(tmp_path / "judge.txt"), llm_judge_max_score=1.0)
        assert function.function(prompts=["p"], completions=["text"], rubric=["be kind"]) == [1.0]
    assert seen == ["be kind | text | {unknown}"]


def test_llm_judge_response_without_score_fails_only_its_row():
    with serve_json(lambda path, request, headers: make_chat_response("Score: 5" if "good" in str(request) else "hm")) as url:
        function = load_judge(url)
        with pytest.raises(RewardError, match="`llm_judge` found no `Score: <number>` in the response 'hm' on row 1, completion 'bad'"):
            score([function], make_batch(["good", "bad", "good"]))
        lenient = load_judge(url, reward_on_error="none")
        assert score([lenient], make_batch(["good", "bad", "good"])).rows == ((0.5,), (None,), (0.5,))


def test_llm_judge_retries_overloaded_endpoint():
    calls = []

    def answer(path, request, headers):
        calls.append(path)
        return (503, "busy") if len(calls) == 1 else make_chat_response("Score: 10")

    with serve_json(answer) as url:
        assert load_judge(url).function(prompts=["p"], completions=["c"]) == [1.0]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [((401, "no such key"), "answered 401 Unauthorized: no such key"), ((200, "<html>"), "returned a response that is not JSON: <html>"),
     ((200, {"error": "x"}), "got a response without choices\\[0\\].message.content")],
)  # fmt: skip
def test_llm_judge_client_error_is_reported_and_not_retried(reply, reason):
    calls = []

    def answer(path, request, headers):
        calls.append(path)
        return reply

    with serve_json(answer) as url:
        with pytest.raises(RewardError, match=reason):
            score([load_judge(url)], make_batch(["c"]))
    assert len(calls) == 1


def test_llm_judge_unreachable_endpoint_fails_after_timeout():
    started = time.monotonic()
    with pytest.raises(RewardError, match="http://127.0.0.1:9/v1/chat/completions cannot be reached .*Connection refused"):
        score([load_judge("http://127.0.0.1:9", reward_timeout=1.0)], make_batch(["c"]))
    assert time.monotonic() - started < 20  # of 60, on a busy machine too


def test_llm_judge_hanging_endpoint_takes_one_timeout():
    release = threading.Event()

    def answer(path, request, headers):
        if "bad" in str(request):
            release.wait(20)
        return make_chat_response("Score: 10")

    started = time.monotonic()
    with serve_json(answer) as url:
        function = load_judge(url, reward_timeout=1.0, reward_on_error="none")
        assert score([function], make_batch(["bad", "good", "bad"])).rows == ((None,), (1.0,), (None,))
        assert time.monotonic() - started < 15  # of 20, on a busy machine too
        release.set()


def test_llm_judge_sends_requests_concurrently():
    barrier = threading.Barrier(6)

    def answer(path, request, headers):
        barrier.wait(5)  # passes only when all six have arrived
        return make_chat_response("Score: 10")

    with serve_json(answer) as url:
        assert load_judge(url).function(prompts=["p"] * 6, completions=["c"] * 6) == [1.0] * 6


def test_llm_judge_reports_all_missing_settings(tmp_path):
    (tmp_path / "blind.txt").write_text("Judge!")
    with pytest.raises(ConfigError) as error:
        load("llm_judge", llm_judge_prompt=str(tmp_path / "blind.txt"))
    assert [problem.flags[0] for problem in error.value.problems] == [
        "llm_judge_url", "llm_judge_model", "llm_judge_prompt"]  # fmt: skip


# --- reward_model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A tiny sequence classifier with one output, and its tokenizer: token id n is the word "n"."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from tests.tiny_models import write_tiny

    path = write_tiny(tmp_path_factory.mktemp("classifier"), "qwen3")
    config = AutoConfig.from_pretrained(path)
    config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return str(path)


def compute_by_hand(path, token_ids):
    from transformers import AutoModelForSequenceClassification

    with torch.inference_mode():
        return AutoModelForSequenceClassification.from_pretrained(path).eval()(torch.tensor([token_ids])).logits.item()


def approximate(expected):
    """A score adds terms that are larger than itself, in an order that padding and the number of threads choose: float32's roundings count
    against the largest. A row that saw its padding, or lost a token, is off by more than a tenth of it."""
    return pytest.approx(expected, abs=1000 * torch.finfo(torch.float32).eps * max(map(abs, expected)))


def test_reward_model_scores_rows_independently_of_the_batch(classifier):
    function = load("reward_model", reward_model=classifier, reward_model_batch_size=2).function
    scores = function(prompts=["5 6", CHAT, "20"], completions=[" 7", [{"role": "assistant", "content": "12 13 14"}], " 21 22 23 24"])
    expected = [compute_by_hand(classifier, ids) for ids in ([5, 6, 7], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])]
    assert scores == approximate(expected)
    assert len({round(value, 3) for value in scores}) == 3


@pytest.mark.parametrize("pad_of_tokenizer", [None, "<eos>"])
def test_reward_model_without_pad_token_reads_last_token(classifier, tmp_path, pad_of_tokenizer):
    shutil.copytree(classifier, tmp_path / "model")
    for name, change in (("config.json", {"pad_token_id": None}), ("tokenizer_config.json", {"pad_token": pad_of_tokenizer})):
        values = json.loads((tmp_path / "model" / name).read_text())
        (tmp_path / "model" / name).write_text(json.dumps({**values, **change}))
    function = load("reward_model", reward_model=str(tmp_path / "model"), reward_model_batch_size=3).function
    scores = function(prompts=["5 6", "7", "9"], completions=[" 7 <eos>", " <eos>", " 10 11 12 13"])
    expected = [compute_by_hand(tmp_path / "model", ids) for ids in ([5, 6, 7, 2], [7, 2], [9, 10, 11, 12, 13])]
    assert scores == approximate(expected)
    every_token = " ".join(str(n) for n in range(4, 128))  # leaves no token for padding
    scores = function(prompts=["5", "<pad> <bos> <eos> <unk> ", "6"], completions=[" <eos>", every_token, " 7"])
    assert scores[::2] == approximate([compute_by_hand(tmp_path / "model", ids) for ids in ([5, 2], [6, 7])])


def test_reward_model_truncates_long_text_at_the_start(classifier):
    function = load("reward_model", reward_model=classifier, reward_model_max_length=3).function
    assert function(prompts=["5 6 7"], completions=[" 8 9"]) == approximate([compute_by_hand(classifier, [7, 8, 9])])


def test_reward_model_that_is_a_language_model_is_rejected(tmp_path):
    from tests.tiny_models import write_tiny

    with pytest.raises(ConfigError, match="has 2 outputs. Use a classifier with num_labels 1"):
        load("reward_model", reward_model=str(write_tiny(tmp_path, "qwen3")))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load("reward_model", reward_model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="needs reward_model .* or reward_model_url"):
        load("reward_model")


def test_reward_model_endpoint_receives_batches_of_prompts_and_completions():
    sizes = []

    def answer(path, request, headers):
        sizes.append(len(request["prompts"]))
        return 200, {"rewards": [len(text) for text in request["completions"]]}

    with serve_json(answer) as url:
        function = load("reward_model", reward_model_url=f"{url}/score", reward_model_batch_size=2).function
        assert function(prompts=["p"] * 5, completions=["", "a", "bb", "ccc", "dddd"]) == [0, 1, 2, 3, 4]
    assert sorted(sizes) == [1, 2, 2]


@pytest.mark.parametrize(
    ("route", "entry"),
    [("classify", lambda value: {"label": "LABEL_0", "probs": [value], "num_classes": 1}), ("pooling", lambda value: {"data": [value]}),
     ("pooling", lambda value: {"data": [[0.0], [value]]})],
)  # fmt: skip
def test_reward_model_vllm_route_disables_activation_and_sorts_by_index(classifier, route, entry):
    seen = []

    def answer(path, request, headers):
        seen.append((path, request))
        rows = [{"index": place, **entry(float(len(ids)))} for place, ids in enumerate(request["input"])]
        return 200, {"object": "list", "data": rows[::-1]}

    with serve_json(answer) as url:
        function = load("reward_model", reward_model_url=f"{url}/{route}", reward_model=classifier).function
        assert function(prompts=["5 6", CHAT], completions=[" 7", [{"role": "assistant", "content": "12"}]]) == [3, 3]
    path, request = seen[0]
    assert path == f"/{route}" and request["input"] == [[5, 6, 7], [10, 11, 12]] and request["use_activation"] is False


def test_reward_model_endpoint_with_wrong_number_of_scores_fails_its_batch():
    with serve_json(lambda path, request, headers: (200, {"rewards": [1.0]})) as url:
        function = load("reward_model", reward_model_url=url, reward_model_batch_size=2).function
        scores = function(prompts=["p"] * 3, completions=["c"] * 3)
    assert [isinstance(value, RowFailure) for value in scores] == [True, True, False]
    assert "got 1 scores for 2 completions" in scores[0].reason
