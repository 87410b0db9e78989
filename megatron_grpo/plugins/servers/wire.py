"""HTTP messages between a run and its rollout servers: every request body and every line of a response.

Client and server both use this module. A body is a JSON object with exactly the fields of one of the classes below. Bytes are base64, and
an array is the base64 of its little-endian bytes: exact, and shorter than decimal digits.
The module imports neither torch nor vLLM, since a trainer on a separate machine has no vLLM.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.base.errors import one_line

INCARNATION = "X-Incarnation"  # header: the incarnation that claimed the server; the response is 409 if another one owns it now
AUTHORIZATION = "Authorization"  # header: "Bearer <token>"
LEASE_SECONDS = 60.0  # an owner that makes no request for this long loses the server
BEAT_SECONDS = 2.0  # longest silence of a response stream; then the server sends an empty line
LONGEST_JOIN, MOST_MEMBERS = 120.0, 1 << 16  # largest timeout of a join in seconds, and largest size of a link
LONGEST_REFUSAL = 2000  # characters of a server's error message that are repeated: it may name many tensors
STREAM_TYPE = "application/x-ndjson"

Kind = Literal["weights", "merged"]


class MalformedMessageError(ValueError):
    """Error raised if a received message has an unexpected form. The text of the error is a sentence."""

    def __init__(self, sentence: str):
        super().__init__(one_line(sentence))


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of messages that are encoded as a JSON object."""


class ClaimRequest(Message, frozen=True):
    """Body of POST /claim: a run becomes the owner of the server.

    Args:
        run: Name of the run; stored in its output_dir, so it survives a restart.
        incarnation: Name of the process; new in every process.
    """

    run: str
    incarnation: str


class EmptyBody(Message, frozen=True):
    """Empty body: of POST /release, and of the response to POST /join."""


class JoinRequest(Message, frozen=True):
    """Body of POST /join: all workers of the server join a link (`servers.weight_transfer`), from rank `first_rank` on.

    Args:
        address: Address of the trainer's store, as this server reaches it.
        port: Port number of that store.
        first_rank: Rank of the server's first worker in the link, above 0: rank 0 is the trainer.
        seconds: Timeout for a member, above 0 and at most LONGEST_JOIN.
    """

    address: str
    port: int
    first_rank: int
    world: int
    name: str
    seconds: float


class WeightUpdateRequest(Message, frozen=True):
    """Body of POST /weights: the server receives all weights over the link.

    Args:
        version: Version; None: base weights; an adapter follows and sets the version.
        kind: Kind of the update; "merged": an adapter is merged into the weights, so no adapter can be added to them.
        moves_tower: True: the update contains the vision tower; False: the server has it already.
    """

    version: int | None
    link: str
    kind: Kind = "weights"
    moves_tower: bool = False


class AdapterUpdateRequest(Message, frozen=True):
    """Body of POST /adapter: the server receives an adapter for the base weights that this owner has synced."""

    version: int
    link: str
    config: dict[str, Any]
    modules: tuple[str, ...]


class Sampling(Message, frozen=True):
    """Sampling parameters for all requests of one body.

    Args:
        temperature: Temperature; 0: greedy.
        top_k: Top-k; 0: off.
        min_p: Min-p; 0: off.
        returns_sampling_mask: True: return the sampling mask, what top_k, top_p, min_p and a grammar left of the vocabulary.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    returns_sampling_mask: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    more: dict[str, Any] = {}


class ImageData(Message, frozen=True):
    """Image file. It is sent once; requests refer to it by its key until the server evicts it."""

    key: str
    data: bytes


class PlacedImage(Message, frozen=True):
    """Position of an image in a prompt.

    Args:
        place: Index of its first token in the prompt with expanded image placeholders.
        tokens: Number of its tokens.
    """

    key: str
    place: int
    tokens: int


class AbortRequest(Message, frozen=True):
    """Body of POST /abort: running requests end, and are answered with what they have sampled (`SampledCompletion.reason` "abort").

    Args:
        version: Version of the weights that sample them; another version is refused with 409.
    """

    version: int


class Request(Message, frozen=True, omit_defaults=True):
    """Request for one group: n completions of one prompt; or for the rest of a completion that was interrupted.

    Args:
        ids: Token IDs of the prompt, and of what was sampled before.
        seed: Seed; completion i is sampled with seed + i.
        n: Number of completions.
        num_sampled: The last tokens of `ids` that belong to the completion: its text includes them.
    """

    key: str
    ids: tuple[int, ...]
    seed: int
    n: int
    max_tokens: int
    images: tuple[PlacedImage, ...] = ()
    num_sampled: int = 0


class PixelBounds(Message, frozen=True):
    """Smallest and largest size of an image in pixels, to which it is resized before it is cut into patches."""

    min_pixels: int
    max_pixels: int


class GenerateRequest(Message, frozen=True):
    """Body of POST /generate. The response has one line per request, in order of completion.

    Args:
        version: Version of the weights that must sample; another version is refused with 409.
        image_data: Images of the requests that the server may not have.
        bounds: Bounds of the image size; required if a request has images.
    """

    version: int
    sampling: Sampling
    requests: tuple[Request, ...]
    image_data: tuple[ImageData, ...] = ()
    bounds: PixelBounds | None = None


class ScoreRequest(Message, frozen=True):
    """Body of POST /score: log-probs of each token after the first, at temperature 1; the last is read through the prefix cache.

    Args:
        sequences: Token IDs of each sequence.
        images: Images of each sequence; () if no sequence has any.
        bounds: Bounds of the image size; required if a sequence has images.
    """

    sequences: tuple[tuple[int, ...], ...]
    images: tuple[tuple[PlacedImage, ...], ...] = ()
    image_data: tuple[ImageData, ...] = ()
    bounds: PixelBounds | None = None


class ScoreResponse(Message, frozen=True):
    """Response to POST /score.

    Args:
        logprobs: One row per sequence, natural logs.
    """

    version: int | None
    logprobs: tuple[tuple[float, ...], ...]


class ServerState(Message, frozen=True):
    """Response to GET /state, and to POST /claim, /release, /weights, /adapter and /abort.

    Args:
        version: Version of the weights; None: no weight sync has completed, or the last one failed.
        has_base: Whether this owner has synced base weights for an adapter.
        running: Number of requests in the engine.
        world_size: Number of workers, each of which is one member of a link.
        max_model_len: Limit for prompt plus completion in tokens.
        max_num_seqs: Number of sequences decoded concurrently, by all engines of the server.
        adapter_rank: Largest supported LoRA rank; 0: no adapters.
        shape: `weights.shape.flat_values` of its model; {}: unknown.
        returns_experts: Whether completions include the experts that their tokens were routed to.
        limit_images: Images per prompt; 0: text only.
        max_pixels: Maximum number of pixels per image.
        max_mask_size: Largest top_k for which it returns the sampling mask.
        is_frozen: Whether it accepts no claim and no weight sync, and answers /prompt_logprobs to every client with the token.
        vocabulary: Vocabulary of a frozen server's tokenizer: `data.chat.fingerprint_vocabulary`.
        fingerprint: Fingerprint of a frozen server's model: its configuration and weights.
        vocab_size: Size of the vocabulary of a frozen server's model: token ids below it have log-probs.
    """

    boot: str
    version: int | None
    has_base: bool
    owner: str | None
    running: int
    model: str
    dtype: str
    world_size: int
    max_model_len: int
    max_num_seqs: int
    adapter_rank: int
    shape: dict[str, Any] = {}
    returns_experts: bool = False
    limit_images: int = 0
    max_pixels: int = 0
    max_mask_size: int = 0
    is_frozen: bool = False
    vocabulary: str = ""
    fingerprint: str = ""
    vocab_size: int = 0


class SampledCompletion(Message, frozen=True, omit_defaults=True, eq=False):
    """One completion of T tokens.

    Args:
        tokens: Token IDs, [T].
        logprobs: Log-prob of each token, [T]; natural logs.
        reason: Finish reason: "stop" or "length", or "abort" after POST /abort; the client rejects any other.
        versions: (weights version, begin, end) in tokens of the completion.
        experts: As `experts.completion_routes` returns them, [tokens, MoE layers, k].
        sampling_mask: Tokens that sampling could choose from at each of the T positions.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    text: str
    reason: str
    versions: tuple[tuple[int, int, int], ...]
    experts: NDArray[np.int16] | None = None
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if self.tokens.shape != self.logprobs.shape:
            raise ValueError(f"{len(self.logprobs)} log-probs for {count} tokens")
        if self.sampling_mask is not None:
            counts, ids = self.sampling_mask.counts, self.sampling_mask.ids
            if len(counts) != count or self.sampling_mask.at[0] != 0 or (counts < 0).any() or counts.sum() != len(ids):
                by_counts = int(counts.sum())
                raise ValueError(
                    f"a sampling mask of {len(ids)} IDs for {len(counts)} tokens, {by_counts} by its counts, for {count} tokens"
                )


class GenerateLine(Message, frozen=True, omit_defaults=True, eq=False):
    """One line of the response to /generate.

    Args:
        error: Why the request is invalid; every other server would reject it too.
        lacks: Keys of images that the server does not have; send the request again with them.
    """

    key: str
    completions: tuple[SampledCompletion, ...] = ()
    error: str | None = None
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.error is not None:
            msgspec.structs.force_setattr(self, "error", one_line(self.error, max_characters=LONGEST_REFUSAL))


class PromptLogprobsRequest(Message, frozen=True):
    """Body of POST /prompt_logprobs, for a frozen server. The response has one line per sequence, in order of completion.

    Args:
        sequences: Token IDs of each sequence.
        first: Per sequence, index of the first token whose log-prob is requested, at least 1.
    """

    sequences: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]

    def fault(self, max_model_len: int, vocab_size: int) -> str | None:
        """Return why no server of these sizes could answer the request.

        A sequence must be shorter than `max_model_len`, since vLLM samples one more token, which is discarded.

        Args:
            max_model_len: Context length of the server in tokens.
            vocab_size: Number of token IDs of its model.

        Returns:
            A sentence, or None if the request is valid.
        """
        if len(self.first) != len(self.sequences):
            return f"`first` has {len(self.first)} entries for {len(self.sequences)} sequences"
        for ids, first in zip(self.sequences, self.first, strict=True):
            if not 1 <= first < len(ids) < max_model_len:
                return (
                    f"a sequence of {len(ids)} tokens cannot be scored from token {first} on: at most {max_model_len - 1} "
                    "(max_model_len - 1) tokens are supported, and the first one has no log-prob"
                )
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                return f"token id {max(ids) if min(ids) >= 0 else min(ids)} is outside the vocabulary of the teacher's model ({vocab_size})"
        return None


class LogprobsLine(Message, frozen=True, eq=False):
    """One line of the response to /prompt_logprobs.

    Args:
        place: Index of the sequence in the body.
        logprobs: Log-probs of the tokens from `first` on, natural logs.
    """

    place: int
    logprobs: NDArray[np.float32]


# ---- JSON

Body = TypeVar("Body", bound=Struct)


class _ShapedArray(Message, frozen=True):
    """Array with more than one dimension."""

    shape: tuple[int, ...]
    ids: bytes  # the little-endian values


def encode(body: Struct) -> bytes:
    """Encode an object of one of the classes above as JSON."""
    return msgspec.json.encode(body, enc_hook=_form_of_array)


def decode(cls: type[Body], body: bytes | str) -> Body:
    """Decode what `encode` has written.

    Raises:
        MalformedMessageError: The body is not JSON, or a field is unknown, missing or of another type. The message names its position.
    """
    try:
        return msgspec.json.decode(body, type=cls, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise MalformedMessageError(f"{cls.__name__} is malformed: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessageError(f"the body of {cls.__name__} is not JSON: {error}") from error


def encode_line(line: Struct) -> bytes:
    """Encode one line of a stream, including its newline."""
    return encode(line) + b"\n"


def decode_line(cls: type[Body], line: bytes) -> Body | None:
    """Decode one line of a stream.

    Returns:
        The object, or None for an empty line, which the server sends as a heartbeat.

    Raises:
        MalformedMessageError: The line has another form, or it does not end with a newline.
    """
    if not line.endswith(b"\n"):
        raise MalformedMessageError("the response stream ends in the middle of a line")
    return decode(cls, line) if line.strip() else None


def _form_of_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is not JSON")
    content = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    return content if value.ndim == 1 else _ShapedArray(shape=value.shape, ids=content)


def _array(kind: Any, form: Any) -> np.ndarray:
    """Decode an array.

    Args:
        kind: Type of the array as annotated in the classes above, such as `NDArray[np.int32]`.
        form: The decoded JSON: base64, or an object with `shape` and `ids`.

    Raises:
        ValueError: The bytes do not fit the dtype or the shape.
    """
    dtype: np.dtype = np.dtype(*get_args(get_args(kind)[1]))
    shaped = msgspec.convert(form if isinstance(form, dict) else {"shape": (-1,), "ids": form}, _ShapedArray)
    return np.frombuffer(shaped.ids, dtype.newbyteorder("<")).astype(dtype).reshape(shaped.shape)


for _form in Message.__subclasses__():  # msgspec inspects a class at its first use, and crashes if two threads do so at the same time
    msgspec.json.Decoder(_form, dec_hook=_array)


def find_request_problem(request: Request, max_model_len: int) -> str | None:
    """Return why no server of this context length could answer a request. Client and server both check it.

    The check is needed because vLLM accepts a prompt whose completion does not fit: it truncates the completion, with finish reason
    "length".

    Args:
        max_model_len: Context length in tokens.

    Returns:
        The end of a sentence about the request, or None if it is valid.
    """
    num_needed = len(request.ids) + request.max_tokens
    if not 0 <= request.num_sampled < max(1, len(request.ids)) or (request.num_sampled and request.n > 1):
        return f"num_sampled ({request.num_sampled}) must be below the number of its tokens ({len(request.ids)}), and n then 1"
    if any(image.place < 0 or image.tokens < 1 or image.place + image.tokens > len(request.ids) for image in request.images):
        return f"an image position is outside its prompt of {len(request.ids)} tokens"
    if not request.ids:
        return "its prompt has no tokens"
    if request.n < 1 or request.max_tokens < 1 or not 0 <= request.seed < 2**63:
        return f"n ({request.n}) and max_tokens ({request.max_tokens}) must be at least 1, and seed ({request.seed}) between 0 and 2**63"
    if num_needed > max_model_len:
        return (
            f"its prompt has {len(request.ids)} tokens, and {len(request.ids)} + max_tokens ({request.max_tokens}) = {num_needed} exceeds "
            "the "
            f"server's max_model_len ({max_model_len})"
        )
    return None


# ---- refusals


class _Error(Struct):
    error: str


def encode_error(sentence: str) -> bytes:
    """Encode the body of a response whose status is not 200."""
    return encode(_Error(sentence))


def decode_error(body: bytes) -> str:
    """Return the error message of a response.

    Args:
        body: Body of a response whose status is not 200. If it does not come from a rollout server, its beginning is returned.
    """
    try:
        return one_line(decode(_Error, body).error, max_characters=LONGEST_REFUSAL)
    except MalformedMessageError:
        return one_line(body.decode(errors="replace"), max_characters=200) or "no reason was given"
