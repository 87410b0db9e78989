"""The reward `reward_model`: the score of a sequence classifier, loaded in this process with transformers or called over HTTP.

The classifier reads the conversation through its own chat template (or, for string prompts, the concatenation of prompt and completion)
and must have one output; that number, unscaled, is the reward. Endpoints: vLLM's `/classify` and `/pooling`, or any other URL that
answers `{"prompts": [...], "completions": [...]}` with `{"rewards": [...]}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, first_line, one_line, problem_with
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.plugins.rewards.endpoint import NoResponseError, ask_all, post_json, url_fault, warn_of_plain
from megatron_grpo.run.config.settings import Config, RewardConfig
from megatron_grpo.run.data.chat import encode_text
from megatron_grpo.run.rewards.protocol import RowFailure, Score, read_text, text_of_prompt


class LocalClassifier:
    """One copy of the classifier in this process, loaded at the first batch. Uses a GPU if there is one."""

    def __init__(self, path: str, settings: RewardConfig):
        self.path, self.batch_size, self.max_length = path, settings.reward_model_batch_size, settings.reward_model_max_length
        self._loaded: tuple[Any, Any, Any] | None = None
        self._pad_token_id: int | None = None

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[Score]:
        _, tokenizer, _ = self._load()
        scores: list[Score] = []
        for start in range(0, len(prompts), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self._score([conversation_ids(tokenizer, *row)[-self.max_length :] for row in zip(prompts[rows], completions[rows])])
        return scores

    def _score(self, rows: Sequence[list[int]]) -> list[Score]:
        """Score one batch of token IDs.

        A classifier reads the last token that is not its pad token. One without a pad token, which was trained on single rows, reads the
        last token: it gets a token for padding that no row contains, not the EOS token, with which rows may end.
        """
        model, _, torch = self._load()
        pad = self._pad_token_id
        if pad is None and len(rows) > 1:
            pad = next(iter({*range(model.config.get_text_config().vocab_size)}.difference(*rows)), None)
            if pad is None:
                return [*self._score(rows[: len(rows) // 2]), *self._score(rows[len(rows) // 2 :])]
        model.config.get_text_config().pad_token_id = pad
        lengths = torch.tensor([len(row) for row in rows])
        longest = int(lengths.max())
        padded = torch.tensor([row + [pad or 0] * (longest - len(row)) for row in rows], dtype=torch.int64)
        mask = (torch.arange(longest) < lengths[:, None]).to(torch.int64)
        with torch.inference_mode():
            return model(input_ids=padded.to(model.device), attention_mask=mask.to(model.device)).logits[:, 0].float().tolist()

    def _load(self) -> tuple[Any, Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
            # Safetensors only: other weight files are pickles.
            model = AutoModelForSequenceClassification.from_pretrained(self.path, trust_remote_code=False, use_safetensors=True)
            self._pad_token_id = model.config.get_text_config().pad_token_id
            self._loaded = model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, torch
        return self._loaded

    def close(self) -> None:
        """Release the model."""
        self._loaded = None


def conversation_ids(tokenizer: Any, prompt: Any, completion: Any) -> list[int]:
    """Return the token IDs of prompt and completion in the format of the classifier's training."""
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt + read_text(completion), is_open=False)
    encoded = tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


class GenericFormat:
    """Request and response format of a generic endpoint: prompts and completions in, `rewards` out."""

    def request(self, rows: Sequence[tuple[Any, Any]]) -> Any:
        """Return the request body for (prompt, completion) rows."""
        return {"prompts": [prompt for prompt, _ in rows], "completions": [completion for _, completion in rows]}

    def scores(self, answer: Any) -> list[float]:
        """Return the scores in a response."""
        return [float(score) for score in (answer["rewards"] if isinstance(answer, Mapping) else answer)]


class VllmFormat:
    """Request and response format of vLLM's pooling routes: texts in; `data[i].probs` (classify) or `data[i].data` (pooling) out.

    Args:
        model: Model name for the request, or None.
    """

    def __init__(self, model: str | None, field: str, encode: Any):
        self.model, self.field, self.encode = model, field, encode

    def request(self, rows: Sequence[tuple[Any, Any]]) -> Any:
        # Without activation: the raw number, as from the local classifier, not its sigmoid.
        payload = {"input": [self.encode(prompt, completion) for prompt, completion in rows], "use_activation": False}
        return {**payload, "model": self.model} if self.model else payload

    def scores(self, answer: Any) -> list[float]:
        return [_last_number(entry[self.field]) for entry in sorted(answer["data"], key=lambda entry: entry["index"])]


class RemoteClassifier:
    """A classifier behind an HTTP endpoint."""

    def __init__(self, url: str, shape: GenericFormat | VllmFormat, settings: RewardConfig):
        self.url, self.shape, self.settings = url, shape, settings

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[Score | RowFailure]:
        rows = list(zip(prompts, completions))
        size = self.settings.reward_model_batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        answers = ask_all(self._ask, parts, concurrency=self.settings.reward_concurrency, seconds=self.settings.reward_timeout)
        scores: list[Score | RowFailure] = []
        for part, answer in zip(parts, answers):
            scores += [answer] * len(part) if isinstance(answer, RowFailure) else answer
        return scores

    def _ask(self, rows: Sequence[tuple[Any, Any]], deadline: float) -> list[float]:
        answer = post_json(self.url, self.shape.request(rows), deadline)
        try:
            scores = self.shape.scores(answer)
        except (KeyError, TypeError, ValueError, IndexError):
            raise NoResponseError(f"got a response without scores from {self.url}: {one_line(answer, max_characters=200)}") from None
        if len(scores) != len(rows):
            raise NoResponseError(f"got {len(scores)} scores for {len(rows)} completions from {self.url}")
        return scores


def _last_number(values: Any) -> float:
    """Return a score that is a number or in a list; of per-token scores, the last."""
    while isinstance(values, list):
        values = values[-1]
    return float(values)


def build_reward_model(config: Config) -> LocalClassifier | RemoteClassifier:
    """Create the reward. Raises ConfigError if its settings or the classifier's configuration are invalid."""
    settings = config.rewards
    model, url, problems = settings.reward_model, settings.reward_model_url, []
    if not model and not url:
        message = "Reward `reward_model` needs reward_model (a sequence classifier) or reward_model_url (an endpoint)."
        problems.append(problem_with(("reward_model", "reward_model_url"), message))
    if url and (fault := url_fault(url)):
        message = f"reward_model_url {fault}."
        problems.append(problem_with("reward_model_url", message))
    if not problems and model and not url:
        problems += _unusable(model)
    if url and not problems:
        warn_of_plain(url, "reward_model_url", has_key=False)
        return RemoteClassifier(url, _shape(settings, url), settings)
    if problems or not model:
        raise ConfigError(problems)
    local = Path(model)  # loaded later: another reward function may have changed the directory by then
    path = str(local.absolute()) if local.exists() else model
    return LocalClassifier(path, settings)


def _unusable(path: str) -> list[Problem]:
    """Return the problems of a classifier that its configuration file shows."""
    try:
        outputs = _num_outputs(path)
    except (OSError, ValueError) as error:
        reason = one_line(error, first_line)
        return [problem_with("reward_model", f"reward_model {path!r} cannot be loaded: {reason}")]
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        message = (
            f"reward_model {path!r} has no .safetensors weights. Other formats are pickles, which can run code; save it as safetensors."
        )
        return [problem_with("reward_model", message)]
    if outputs != 1:
        message = f"reward_model {path!r} has {outputs} outputs. Use a classifier with num_labels 1."
        return [problem_with("reward_model", message)]
    return []


def _num_outputs(path: str) -> int:
    """Return the number of outputs. A directory is read as plain JSON, because importing transformers would cost `plan` seconds."""
    file = Path(path) / "config.json"
    if file.is_file():
        config = parse_json(file.read_text(encoding="utf-8"))
        return int(config.get("num_labels") or len(config.get("id2label") or {}) or 2)  # transformers omits the default value
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False).num_labels


def _shape(settings: RewardConfig, url: str) -> GenericFormat | VllmFormat:
    """Return the format of an endpoint.

    vLLM's routes are recognized by name. They take text, so chats are rendered with the template of `reward_model`, if given.
    """
    route = url.rstrip("/").rpartition("/")[2]
    field = {"classify": "probs", "pooling": "data"}.get(route)
    if field is None:
        return GenericFormat()
    if settings.reward_model is None:
        return VllmFormat(None, field, _plain_text)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.reward_model, trust_remote_code=False)
    longest = settings.reward_model_max_length
    return VllmFormat(settings.reward_model, field, lambda prompt, completion: conversation_ids(tokenizer, prompt, completion)[-longest:])


def _plain_text(prompt: Any, completion: Any) -> str:
    return prompt + read_text(completion) if isinstance(prompt, str) else text_of_prompt([*prompt, *completion])
