"""What crosses HTTP between a run and its rollout servers: the form of every body, and of every line that comes back.

Both sides use this file, so what one writes the other reads. A body is a JSON object whose fields are those of a class below, no more and
no fewer. Bytes, and arrays as their little-endian bytes, travel as base64: exact, and cheaper than decimal digits.
No torch and no vLLM, since a trainer on other machines than its servers has no vLLM.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megatron_grpo.base.errors import said_by
from megatron_grpo.types import SamplingMask

INCARNATION = "X-Incarnation"  # header: the incarnation that claimed the server; 409 where another one has it now
AUTHORIZATION = "Authorization"  # header: "Bearer <token>"
LEASE_SECONDS = 60.0  # an owner that is not heard of for so long has gone
BEAT_SECONDS = 2.0  # a stream of answers is never silent for longer: it sends an empty line
LONGEST_JOIN, MOST_MEMBERS = 120.0, 1 << 16  # seconds that a member of a link waits for another, and members
LONGEST_REFUSAL = 2000  # characters of a server's sentence that are repeated: it may name many tensors
STREAM_TYPE = "application/x-ndjson"

Kind = Literal["weights", "merged"]


class MalformedMessageError(ValueError):
    """What came is not of the form that was expected. A sentence."""

    def __init__(self, sentence: str):
        super().__init__(said_by(sentence))


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written and read as a JSON object."""


class Claim(Message, frozen=True):
    """POST /claim: a run takes a server."""

    run: str  # lies in the run's output_dir, so it outlives a restart
    incarnation: str  # new in every process


class Nothing(Message, frozen=True):
    """POST /release."""


class Join(Message, frozen=True):
    """POST /join: all workers of the server become members of a link (`parallel.link`), from rank `first_rank` on."""

    address: str  # of the trainer's store, as this server can reach it
    port: int
    first_rank: int
    world: int
    name: str
    seconds: float  # the longest wait for a member, at most LONGEST_JOIN


class WeightPush(Message, frozen=True):
    """POST /weights: the server takes all weights from the link. version None: an adapter follows, and makes the version."""

    version: int | None
    link: str
    kind: Kind = "weights"  # "merged": with an adapter added in, so they are no base for another one
    moves_tower: bool = False  # the weights that see pictures are among them; else the server has them already


class AdapterPush(Message, frozen=True):
    """POST /adapter: the server takes an adapter alone, for the base weights that this owner pushed before."""

    version: int
    link: str
    config: dict[str, Any]  # as PEFT writes it
    modules: tuple[str, ...]  # Hugging Face names of those that have an adapter in this run


class Sampling(Message, frozen=True):
    """How the tokens of all requests of one body are drawn."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    tells_kept: bool = False  # completions come with what top_k, top_p, min_p and a grammar left of the vocabulary
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    more: dict[str, Any] = {}  # of vLLM's SamplingParams


class SentPicture(Message, frozen=True):
    """The file of a picture. It is sent once, and known by its key until the server has forgotten it."""

    key: str
    data: bytes


class ShownPicture(Message, frozen=True):
    """Where a prompt shows a picture."""

    key: str
    place: int  # of its first token, in the long form
    tokens: int


class Request(Message, frozen=True):
    """One group: a prompt that is answered n times."""

    key: str  # comes back with the answer
    ids: tuple[int, ...]
    seed: int  # completion i is drawn with seed + i
    n: int
    max_tokens: int
    shown: tuple[ShownPicture, ...] = ()


class Bounds(Message, frozen=True):
    """How large pictures become before they are cut into patches, in pixels."""

    min_pixels: int
    max_pixels: int


class Generate(Message, frozen=True):
    """POST /generate: one line comes back for each request, in the order in which they end."""

    version: int
    sampling: Sampling
    requests: tuple[Request, ...]
    pictures: tuple[SentPicture, ...] = ()  # those of the requests that the server may not have
    bounds: Bounds | None = None  # where a request shows some


class Score(Message, frozen=True):
    """POST /score: log-probs of each token after the first, at temperature 1; the last is read through the prefix cache."""

    sequences: tuple[tuple[int, ...], ...]
    shown: tuple[tuple[ShownPicture, ...], ...] = ()  # by each of them; () where none shows any
    pictures: tuple[SentPicture, ...] = ()
    bounds: Bounds | None = None


class ScoreResponse(Message, frozen=True):
    """What POST /score answers."""

    version: int | None
    logprobs: tuple[tuple[float, ...], ...]


class State(Message, frozen=True):
    """What GET /state says; POST /claim, /release, /weights and /adapter answer it too."""

    boot: str  # another one after every start of the server
    version: int | None  # of the weights; None: nobody has pushed any, or a push failed
    has_base: bool  # this owner pushed the weights that an adapter is added to
    owner: str | None  # the run that holds the server
    running: int  # requests
    model: str
    dtype: str
    world_size: int  # workers: so many members of a link
    max_model_len: int  # tokens of prompt and completion
    max_num_seqs: int  # sequences decoded together, by all engines of the server
    adapter_rank: int  # the largest rank that there is room for; 0: no room for adapters
    shape: dict[str, Any] = {}  # `weights.shape.flat` of its model; {}: it does not say
    tells_experts: bool = False  # completions come with the experts that their tokens were routed to
    limit_images: int = 0  # pictures of a prompt; 0: the model sees none
    max_pixels: int = 0  # of a picture
    most_kept: int = 0  # the largest top_k with which it tells what was left of the vocabulary
    is_frozen: bool = False  # nobody may claim it or push to it: it answers /prompt_logprobs alone, to all who have the token
    vocabulary: str = ""  # of a frozen one's tokenizer: `data.chat.vocabulary_of`
    fingerprint: str = ""  # of a frozen one's model: its configuration and weights
    vocab_size: int = 0  # of a frozen one's model: token ids below it have log-probs


class SampledCompletion(Message, frozen=True, omit_defaults=True, eq=False):
    """One completion of T tokens."""

    tokens: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    text: str
    reason: str  # "stop" or "length"; any other is no answer
    versions: tuple[tuple[int, int, int], ...]  # (weights version, begin, end) in tokens of the completion
    experts: NDArray[np.int16] | None = None  # [tokens, MoE layers, k]: what `experts.told` hands on
    kept: SamplingMask | None = None  # what each token was drawn among

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if self.tokens.shape != self.logprobs.shape:
            raise ValueError(f"{len(self.logprobs)} log-probs for {count} tokens")
        if self.kept is not None:
            counts, ids = self.kept.counts, self.kept.ids
            if len(counts) != count or self.kept.at[0] != 0 or (counts < 0).any() or counts.sum() != len(ids):
                by_counts = int(counts.sum())
                raise ValueError(f"{len(ids)} kept words of {len(counts)} tokens, {by_counts} by their counts, for {count} tokens")


class Answer(Message, frozen=True, omit_defaults=True, eq=False):
    """One line of /generate. error: what is wrong with this request; no other server would answer it either.

    lacks: keys of pictures that the server has not, or no more; the request is to be sent again with them.
    """

    key: str
    completions: tuple[SampledCompletion, ...] = ()
    error: str | None = None
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.error is not None:
            msgspec.structs.force_setattr(self, "error", said_by(self.error, most=LONGEST_REFUSAL))


class PromptLogprobs(Message, frozen=True):
    """POST /prompt_logprobs, of a frozen server: one line comes back for each sequence, in the order in which they end."""

    sequences: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]  # of each: the first token whose log-prob is wanted, at least 1

    def fault(self, max_model_len: int, vocab_size: int) -> str | None:
        """What no server of these sizes could do with it, as a sentence. One token is drawn besides, and thrown away."""
        if len(self.first) != len(self.sequences):
            return f"{len(self.first)} first tokens are told for {len(self.sequences)} sequences"
        for ids, first in zip(self.sequences, self.first, strict=True):
            if not 1 <= first < len(ids) < max_model_len:
                return (
                    f"a sequence of {len(ids)} tokens cannot be scored from token {first} on: it has at most {max_model_len - 1} "
                    "(max_model_len - 1) tokens, and the first one has no log-prob"
                )
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                return f"token id {max(ids) if min(ids) >= 0 else min(ids)} is not among the {vocab_size} of the teacher's model"
        return None


class Scored(Message, frozen=True, eq=False):
    """One line of /prompt_logprobs."""

    place: int  # of the sequence in the body
    logprobs: NDArray[np.float32]


# ---- JSON

Body = TypeVar("Body", bound=Struct)


class _Shaped(Message, frozen=True):
    """An array of more than one dimension."""

    shape: tuple[int, ...]
    ids: bytes


def encode(body: Struct) -> bytes:
    """The JSON of an object of one of the classes above."""
    return msgspec.json.encode(body, enc_hook=_form_of_array)


def decode(cls: type[Body], body: bytes | str) -> Body:
    """The object that `encode` wrote. Raises Malformed: unknown and missing fields, and values of another kind, are said by their place."""
    try:
        return msgspec.json.decode(body, type=cls, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise MalformedMessageError(f"{cls.__name__} has another form: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessageError(f"{cls.__name__} comes as a body that is not JSON: {error}") from error


def encode_line(line: Struct) -> bytes:
    """One line, with its end."""
    return encode(line) + b"\n"


def decode_line(cls: type[Body], line: bytes) -> Body | None:
    """None for an empty line, which only says that the server is alive. Raises Malformed, also where a line was cut off."""
    if not line.endswith(b"\n"):
        raise MalformedMessageError("the stream of answers ends in the middle of a line")
    return decode(cls, line) if line.strip() else None


def _form_of_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is not JSON")
    content = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    return content if value.ndim == 1 else _Shaped(shape=value.shape, ids=content)


def _array(kind: Any, form: Any) -> np.ndarray:
    """kind: an array's type as the classes above have it. Raises ValueError."""
    dtype: np.dtype = np.dtype(*get_args(get_args(kind)[1]))
    shaped = msgspec.convert(form if isinstance(form, dict) else {"shape": (-1,), "ids": form}, _Shaped)
    return np.frombuffer(shaped.ids, dtype.newbyteorder("<")).astype(dtype).reshape(shaped.shape)


for _form in Message.__subclasses__():  # msgspec looks at a class when it first reads one, and crashes where two threads do so at once
    msgspec.json.Decoder(_form, dec_hook=_array)


def fault_of(request: Request, max_model_len: int) -> str | None:
    """What no server of this `max_model_len` could do with a request, as a sentence; None where there is nothing. Both sides ask.

    vLLM answers a prompt whose completion does not fit: it cuts the completion short, and says "length".
    """
    needed = len(request.ids) + request.max_tokens
    if any(one.place < 0 or one.tokens < 1 or one.place + one.tokens > len(request.ids) for one in request.shown):
        return f"a picture's place is not among its prompt's {len(request.ids)} tokens"
    if not request.ids:
        return "its prompt has no tokens"
    if request.n < 1 or request.max_tokens < 1 or not 0 <= request.seed < 2**63:
        return f"n ({request.n}) and max_tokens ({request.max_tokens}) are at least 1, and seed ({request.seed}) is between 0 and 2**63"
    if needed > max_model_len:
        return (
            f"its prompt has {len(request.ids)} tokens, and {len(request.ids)} + max_tokens ({request.max_tokens}) = {needed} exceeds the "
            f"server's max_model_len ({max_model_len})"
        )
    return None


# ---- refusals


class _Error(Struct):
    error: str


def encode_error(sentence: str) -> bytes:
    """The body of every answer that is not 200."""
    return encode(_Error(sentence))


def decode_error(body: bytes) -> str:
    """The sentence, or what came instead of one: another program may listen at that address."""
    try:
        return said_by(decode(_Error, body).error, most=LONGEST_REFUSAL)
    except MalformedMessageError:
        return said_by(body.decode(errors="replace"), most=200) or "no reason was given"
