"""What crosses HTTP between a run and its rollout servers: the form of every body, and of every line that comes back.

Both sides use this file, so what one writes the other reads. A body is a JSON object whose fields are those of a class below. Token ids,
log-probs and routes of completions travel as base64 of their little-endian bytes: exact, and cheaper than decimal digits.
No torch and no vLLM, since a trainer on other machines than its servers has no vLLM.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np

from megatron_grpo.base.errors import said_by
from megatron_grpo.types import Kept

INCARNATION = "X-Incarnation"  # header: the incarnation that claimed the server; 409 where another one has it now
AUTHORIZATION = "Authorization"  # header: "Bearer <token>"
LEASE_SECONDS = 60.0  # an owner that is not heard of for so long has gone
BEAT_SECONDS = 2.0  # a stream of answers is never silent for longer: it sends an empty line
LONGEST_JOIN, MOST_MEMBERS = 120.0, 1 << 16  # seconds that a member of a link waits for another, and members
LONGEST_REFUSAL = 2000  # characters of a server's sentence that are repeated: it may name many tensors
STREAM_TYPE = "application/x-ndjson"

Kind = Literal["weights", "merged"]


class Malformed(ValueError):
    """What came is not of the form that was expected. A sentence."""

    def __init__(self, sentence: str):
        super().__init__(said_by(sentence))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """POST /claim: a run takes a server."""

    run: str  # lies in the run's output_dir, so it outlives a restart
    incarnation: str  # new in every process


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """POST /release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """POST /join: all workers of the server become members of a link (`parallel.link`), from rank `first_rank` on."""

    address: str  # of the trainer's store, as this server can reach it
    port: int
    first_rank: int
    world: int
    name: str
    seconds: float  # the longest wait for a member, at most LONGEST_JOIN


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPush:
    """POST /weights: the server takes all weights from the link. version None: an adapter follows, and makes the version."""

    version: int | None
    link: str
    kind: Kind = "weights"  # "merged": with an adapter added in, so they are no base for another one
    moves_tower: bool = False  # the weights that see pictures are among them; else the server has them already


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPush:
    """POST /adapter: the server takes an adapter alone, for the base weights that this owner pushed before."""

    version: int
    link: str
    config: dict[str, Any]  # as PEFT writes it
    modules: tuple[str, ...]  # Hugging Face names of those that have an adapter in this run


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of all requests of one body are drawn."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    tells_kept: bool = False  # completions come with what top_k, top_p, min_p and a grammar left of the vocabulary
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # of vLLM's SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPicture:
    """The file of a picture. It is sent once, and known by its key until the server has forgotten it."""

    key: str
    data: str  # base64

    @classmethod
    def of(cls, key: str, content: bytes) -> SentPicture:
        return cls(key=key, data=base64.b64encode(content).decode())

    @property
    def content(self) -> bytes:
        """Raises Malformed."""
        try:
            return base64.b64decode(self.data, validate=True)
        except ValueError as error:
            raise Malformed(f"the picture {self.key!r} is not base64: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPicture:
    """Where a prompt shows a picture."""

    key: str
    place: int  # of its first token, in the long form
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One group: a prompt that is answered n times."""

    key: str  # comes back with the answer
    ids: tuple[int, ...]
    seed: int  # completion i is drawn with seed + i
    n: int
    max_tokens: int
    shown: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large pictures become before they are cut into patches, in pixels."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """POST /generate: one line comes back for each request, in the order in which they end."""

    version: int
    sampling: Sampling
    requests: tuple[Request, ...]
    pictures: tuple[SentPicture, ...] = ()  # those of the requests that the server may not have
    bounds: Bounds | None = None  # where a request shows some


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """POST /score: log-probs of each token after the first, at temperature 1; the last is read through the prefix cache."""

    sequences: tuple[tuple[int, ...], ...]
    shown: tuple[tuple[ShownPicture, ...], ...] = ()  # by each of them; () where none shows any
    pictures: tuple[SentPicture, ...] = ()
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What POST /score answers."""

    version: int | None
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
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
    shape: dict[str, Any] = field(default_factory=dict)  # `weights.shape.flat` of its model; {}: it does not say
    tells_experts: bool = False  # completions come with the experts that their tokens were routed to
    limit_images: int = 0  # pictures of a prompt; 0: the model sees none
    max_pixels: int = 0  # of a picture
    most_kept: int = 0  # the largest top_k with which it tells what was left of the vocabulary
    is_frozen: bool = False  # nobody may claim it or push to it: it answers /prompt_logprobs alone, to all who have the token
    vocabulary: str = ""  # of a frozen one's tokenizer: `data.chat.vocabulary_of`
    fingerprint: str = ""  # of a frozen one's model: its configuration and weights
    vocab_size: int = 0  # of a frozen one's model: token ids below it have log-probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """One completion."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    text: str
    reason: Literal["stop", "length"]
    versions: tuple[tuple[int, int, int], ...]  # (weights version, begin, end) in tokens of the completion
    experts: np.ndarray | None = None  # int16 [tokens, MoE layers, k]: what `experts.told` hands on
    kept: Kept | None = None  # what each token was drawn among


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """One line of /generate. error: what is wrong with this request; no other server would answer it either.

    lacks: keys of pictures that the server has not, or no more; the request is to be sent again with them.
    """

    key: str
    completions: tuple[Drawn, ...] = ()
    error: str | None = None
    lacks: tuple[str, ...] = ()


# ---- bodies

Body = TypeVar("Body")
_NESTED: Mapping[str, type] = {cls.__name__: cls for cls in (Sampling, Request, SentPicture, ShownPicture, Bounds)}


def encode(body: Any) -> bytes:
    """The JSON of an object of one of the classes above."""
    return json.dumps(_form(body)).encode()


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_form(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _form(getattr(value, f.name)) for f in fields(value)}
    return value


def decode(cls: type[Body], body: bytes | str) -> Body:
    """The object that `encode` wrote. Raises Malformed: unknown and missing fields, and values of another kind, are said by name."""
    try:
        form = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    return _read(cls, form, cls.__name__)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _read(cls: type[Body], form: Any, where: str) -> Body:
    if not isinstance(form, dict):
        raise Malformed(f"{where} is a JSON object, not {_shown(form)}")
    known: dict[str, Any] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # every class here is a dataclass
    if unknown := [name for name in form if name not in known]:
        raise Malformed(f"{where} has no field {unknown[0]!r}; its fields are {', '.join(known) or 'none'}")
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING and name not in form]
    if needed:
        raise Malformed(f"{where} lacks {', '.join(needed)}")
    return cls(**{name: _value(known[name].type, value, f"{where}.{name}") for name, value in form.items()})


def _value(kind: str, value: Any, where: str) -> Any:
    if kind.endswith(" | None") and kind.removesuffix(" | None") in _NESTED:
        return None if value is None else _value(kind.removesuffix(" | None"), value, where)
    if kind in _NESTED:
        return _read(_NESTED[kind], value, where)
    if kind.startswith("tuple["):
        if not isinstance(value, list):
            raise Malformed(f"{where} is a list, not {_shown(value)}")
        inner = kind.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_value(inner, one, f"{where}[{i}]") for i, one in enumerate(value))
    what, fits = _KINDS[kind]
    if not fits(value):
        raise Malformed(f"{where} is {what}, not {_shown(value)}")
    return float(value) if kind == "float" else value


def _is_int(value: Any) -> bool:
    return type(value) is int  # True is an int to Python


def _is_float(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "str | None": ("a string or null", lambda value: value is None or isinstance(value, str)),
    "int": ("a whole number", _is_int),
    "int | None": ("a whole number or null", lambda value: value is None or _is_int(value)),
    "float": ("a number", _is_float),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "Kind": ("one of weights, merged", lambda value: value in ("weights", "merged")),
    "dict[str, Any]": ("an object", lambda value: isinstance(value, dict)),
}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- lines of answers


def encode_line(answer: Answer) -> bytes:
    """One line, with its end."""
    if answer.error is not None:
        form: dict[str, Any] = {"key": answer.key, "error": answer.error}
    elif answer.lacks:
        form = {"key": answer.key, "lacks": list(answer.lacks)}
    else:
        form = {"key": answer.key, "completions": [_drawn_form(one) for one in answer.completions]}
    return json.dumps(form).encode() + b"\n"


def decode_line(line: bytes) -> Answer | None:
    """None for an empty line, which only says that the server is alive. Raises Malformed, also where a line was cut off."""
    if not line.endswith(b"\n"):
        raise Malformed("the stream of answers ends in the middle of a line")
    if not line.strip():
        return None
    try:
        form = json.loads(line)
        if "error" in form:
            return Answer(key=form["key"], error=said_by(form["error"], most=LONGEST_REFUSAL))
        if "lacks" in form:
            return Answer(key=form["key"], lacks=tuple(map(str, form["lacks"])))
        return Answer(key=form["key"], completions=tuple(_drawn(one) for one in form["completions"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Malformed(f"a line of answers is not of the expected form: {error!r}") from error


def _drawn_form(drawn: Drawn) -> dict[str, Any]:
    form: dict[str, Any] = {
        "tokens": packed(drawn.tokens, "<i4"),
        "logprobs": packed(drawn.logprobs, "<f4"),
        "text": drawn.text,
        "reason": drawn.reason,
        "versions": [{"version": version, "begin": begin, "end": end} for version, begin, end in drawn.versions],
    }
    if drawn.experts is not None:
        form["experts"] = {"shape": list(drawn.experts.shape), "ids": packed(drawn.experts, "<i2")}
    if drawn.kept is not None:
        form["kept"] = {"counts": packed(drawn.kept.counts, "<i4"), "ids": packed(drawn.kept.ids, "<i4")}
    return form


def _drawn(form: Mapping[str, Any]) -> Drawn:
    routes = form.get("experts")
    tokens, logprobs = unpacked(form["tokens"], "<i4"), unpacked(form["logprobs"], "<f4")
    if len(tokens) != len(logprobs):
        raise Malformed(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
    return Drawn(
        tokens=tokens, logprobs=logprobs, text=form["text"], reason=form["reason"],
        versions=tuple((span["version"], span["begin"], span["end"]) for span in form["versions"]),
        experts=None if routes is None else unpacked(routes["ids"], "<i2").reshape(routes["shape"]),
        kept=_kept(form["kept"], len(tokens)) if "kept" in form else None,
    )  # fmt: skip


def _kept(form: Mapping[str, Any], num_tokens: int) -> Kept:
    counts, ids = unpacked(form["counts"], "<i4"), unpacked(form["ids"], "<i4")
    if len(counts) != num_tokens or (counts < 0).any() or counts.sum() != len(ids):
        raise Malformed(f"{len(ids)} kept words of {len(counts)} tokens, {int(counts.sum())} by their counts, for {num_tokens} tokens")
    return Kept(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)]), ids)


def packed(values: Any, dtype: str) -> str:
    """Base64 of their bytes."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def unpacked(text: str, dtype: str) -> np.ndarray:
    """What `packed` made. Raises ValueError."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).astype(np.dtype(dtype).newbyteorder("="))


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


def encode_error(sentence: str) -> bytes:
    """The body of every answer that is not 200."""
    return json.dumps({"error": sentence}).encode()


def decode_error(body: bytes) -> str:
    """The sentence, or what came instead of one: another program may listen at that address."""
    try:
        return said_by(json.loads(body)["error"], most=LONGEST_REFUSAL)
    except (ValueError, KeyError, TypeError, RecursionError):
        return said_by(body.decode(errors="replace"), most=200) or "no reason was given"
