"""Messages between a frontend and an engine, and their msgpack form.

Owns the closed schema of both directions; who sends them and when is engine_client.py's and engine_process.py's
business. A frame is a 4-byte little-endian length and one msgpack array whose first item names the kind.
Only token ids cross this border: text, templates and stop strings stay in the frontend.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import msgpack

from tournant.kvstore.block import Namespace
from tournant.workers.config import EngineConfig
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sampling_params import SamplingParams

MAX_FRAME_BYTES = 64 << 20
FRAME_HEADER = struct.Struct("<I")
LOCAL_HOST = "127.0.0.1"
LOST_DEAD = "dead"  # the engine has ended, or a step of it failed
LOST_MOVED = "moved"  # the engine ends soon, changes its weights, or is full
LOST_WEIGHTS = "weights"  # no engine has its weights any more, nor will have them


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it is ready.

    max_model_len: tokens a sequence may have (prompt + output); pool_tokens: token slots of the device pool;
    overflow_tokens: of the places below it; a sequence is limited by the model or by both together. namespace: what
    keys of this engine are made in; sequences of more than `rope_switch` tokens (0 = none) rotate by other frequencies
    and have `long_layout_id` in their namespace: use `namespace_for`.
    """

    writer_id: int
    pid: int
    max_model_len: int
    pool_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_queued_requests: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    namespace: Namespace
    rope_switch: int = 0
    long_layout_id: bytes = b""
    overflow_tokens: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that can run: the model's limit or the places for them, whichever is less."""
        return min(self.max_model_len, self.pool_tokens + self.overflow_tokens)

    def namespace_for(self, num_tokens: int) -> Namespace:
        """The namespace of a sequence of this many tokens."""
        if 0 < self.rope_switch < num_tokens:
            return replace(self.namespace, layout_id=self.long_layout_id)
        return self.namespace


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine sees it.

    request_id: unique per client connection; keys: key chain of the prompt's full blocks, made in
    `namespace_digest` (an engine whose own digest differs computes them again); cache_salt: the client salt behind that
    digest; priority: lower runs earlier.

    An answer that another engine has begun is resumed as a request of its own (params.n is 1 then): the last num_output
    of token_ids are its output so far, and everything in params still counts from the prompt before them. first_index:
    the number of the first of params.n answers, under which outputs name it. weights_id: only an engine on these
    weights may take it, b"" for any. session: names the conversation for whoever chooses an engine, "" = none; an
    engine is not told.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    keys: list[bytes] = field(default_factory=list)
    namespace_digest: bytes = b""
    cache_salt: str | None = None
    priority: int = 0
    num_output: int = 0
    first_index: int = 0
    weights_id: bytes = b""
    session: str = ""

    @property
    def indices(self) -> range:
        """The numbers of its answers."""
        return range(self.first_index, self.first_index + self.params.n)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the most probable ones at its place (natural log, floored at -9999)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one answer of a request.

    index: which of the n answers; token_ids: new tokens, the stop token included; finish_reason: None while running,
    else "stop" (end-of-text or a stop token), "length", "abort" or "error"; stop_token: the token that stopped it;
    cached_tokens: prompt tokens whose KV was not computed anew, set on the first output of an answer; cached_by_tier:
    the same, by where it was found (device, host, NVMe);
    prompt_logprobs: one entry per prompt token (None for the first), on the first output of answer 0;
    queue_ms, prefill_ms: time from arrival to first scheduling and from there to the first token, on the first output;
    lost: of an "error" after which the answer can go on in another engine, one of LOST_DEAD, LOST_MOVED; or
    LOST_WEIGHTS, after which only its request can begin anew.
    """

    request_id: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    cached_by_tier: tuple[int, int, int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    error: str | None = None
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """An engine's side of the tiers below the device: counters since it started, and gauges.

    attached: 1 while a store serves; store_losses: how often it was lost; store_refusals: how often one was there that
    does not serve this engine; dirty_blocks: sealed device blocks that are
    not copied down; pressure: of STORE.md section 4, a share; saved_*, loaded_*: device blocks copied down and back;
    fetched_bytes: NVMe to RAM; remote_*: brought from other nodes into RAM here, and how often less came than was to;
    *_seconds: in copies, queue included; refused_saves: blocks that did not arrive;
    skipped_saves: steps without credit for all that was to go; dropped_dirty: blocks dropped from the device that were
    nowhere else; host_hit_tokens, nvme_hit_tokens: prompt tokens restored, by where they lay; lookups, late_lookups;
    restores, cut_restores: ended by their deadline; lost_blocks: chosen but missing or wrong when copied;
    corrupt_blocks; chose_load, chose_recompute: decisions; estimated_load_seconds, estimated_recompute_seconds: sums of
    both estimates over restores, actual_load_seconds: what they took; swapped: preemptions that copied down instead of
    recomputing; stashed: growing blocks among them; bytes_per_second_host, bytes_per_second_nvme,
    bytes_per_second_remote, prefill_tokens_per_second: what the estimates use now, 0 = not known yet.
    """

    attached: int = 0
    store_losses: int = 0
    store_refusals: int = 0
    dirty_blocks: int = 0
    pressure: float = 0.0
    saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    refused_saves: int = 0
    skipped_saves: int = 0
    dropped_dirty: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    remote_blocks: int = 0
    remote_bytes: int = 0
    remote_seconds: float = 0.0
    remote_failures: int = 0
    host_hit_tokens: int = 0
    nvme_hit_tokens: int = 0
    lookups: int = 0
    late_lookups: int = 0
    restores: int = 0
    cut_restores: int = 0
    lost_blocks: int = 0
    corrupt_blocks: int = 0
    chose_load: int = 0
    chose_recompute: int = 0
    estimated_load_seconds: float = 0.0
    estimated_recompute_seconds: float = 0.0
    actual_load_seconds: float = 0.0
    swapped: int = 0
    stashed: int = 0
    bytes_per_second_host: float = 0.0
    bytes_per_second_nvme: float = 0.0
    bytes_per_second_remote: float = 0.0
    prefill_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """Of running sequences that are larger than the device; counters since the engine started, and gauges.

    used_blocks, total_blocks: places below; written_bytes: device to there; host_bytes, disk_bytes: layers of blocks
    that steps attended to in RAM and read from disk; streamed_bytes: of those in RAM that were copied to the device
    first; lost_blocks: that could not be read; chosen_layers: layers of decode steps that read only some blocks,
    dense_layers: those of them that then read all; missed_mass: sum, over the others, of the attention that they
    missed, estimated.
    """

    used_blocks: int = 0
    total_blocks: int = 0
    written_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    streamed_bytes: int = 0
    lost_blocks: int = 0
    chosen_layers: int = 0
    dense_layers: int = 0
    missed_mass: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters (since the engine started) and gauges, sent with every step.

    kv_used / kv_total: device blocks held by sequences / in the pool; prefix_*_tokens: prompt tokens looked up / found
    in any tier; num_restoring: sequences whose blocks are on their way to the device; queued_tokens: of sequences that
    wait or run, what no step computes yet, before caches were asked for it; overflow: of sequences larger than the
    device; tiers: below it.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    kv_cached: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_restoring: int = 0
    queued_tokens: int = 0
    overflow: OverflowStats = OverflowStats()
    tiers: TierStats = TierStats()


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Everything one engine step produced, for all requests of the client it is sent to."""

    writer_id: int
    step: int
    outputs: list[RequestOutput]
    stats: EngineStats


_RARE = ("stop_token", "cached_tokens", "cached_by_tier", "queue_ms", "prefill_ms", "error", "lost")
_STATS = attrgetter(*(item.name for item in fields(EngineStats)))  # astuple copies deeply, and this is once per step
_OVERFLOW = attrgetter(*(item.name for item in fields(OverflowStats)))
_TIERS = attrgetter(*(item.name for item in fields(TierStats)))


def pack_frame(message: list[Any]) -> bytes:
    """Length header + msgpack. Raises ValueError above MAX_FRAME_BYTES; nothing is sent then."""
    body = msgpack.packb(message, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
    return FRAME_HEADER.pack(len(body)) + bytes(body)


def unpack_body(body: bytes | memoryview) -> list[Any]:
    """The array inside one frame. Raises ValueError when it is not one."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False, use_list=True)
    except TypeError as error:  # a map with a key that cannot be one
        raise ValueError(f"a frame holds what cannot be read: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError("a frame must hold an array that begins with the kind of message")
    return message


class FrameBuffer:
    """Cuts a byte stream into frames of at most `max_bytes`. Holds at most one frame's bytes beyond what it has given
    out.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Yields every message completed by `data`. Raises ValueError on an oversized or malformed frame."""
        self._buffer += data
        while len(self._buffer) >= FRAME_HEADER.size:
            (length,) = FRAME_HEADER.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise ValueError(f"a frame of {length} bytes exceeds the limit of {self.max_bytes} bytes")
            end = FRAME_HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[FRAME_HEADER.size : end])
            del self._buffer[:end]
            yield unpack_body(body)


def request_to_wire(request: EngineRequest) -> list[Any]:
    """["submit", ...] for `pack_frame`."""
    return [
        "submit",
        request.request_id,
        request.token_ids,
        request.params.to_wire(),
        request.keys,
        request.namespace_digest,
        request.cache_salt,
        request.priority,
        request.num_output,
        request.first_index,
        request.weights_id,
    ]


def request_from_wire(message: list[Any]) -> EngineRequest:
    """Inverse of `request_to_wire`. Raises ValueError or TypeError on a malformed message."""
    _, request_id, token_ids, params, *rest = message
    return EngineRequest(request_id, token_ids, SamplingParams.from_wire(params), *rest)


def _logprobs_to_wire(entry: TokenLogprobs | None) -> list[Any] | None:
    return None if entry is None else [entry.logprob, entry.top]


def _logprobs_from_wire(data: list[Any] | None) -> TokenLogprobs | None:
    return None if data is None else TokenLogprobs(data[0], [(token, value) for token, value in data[1]])


def step_to_wire(step: StepMessage) -> list[Any]:
    """["step", writer_id, step, outputs, stats]; rare fields of an output travel in a map only when they are set."""
    outputs: list[list[Any]] = []
    for out in step.outputs:
        item: list[Any] = [out.request_id, out.index, out.token_ids, out.finish_reason]
        extras: dict[str, Any] = {name: getattr(out, name) for name in _RARE if getattr(out, name) is not None}
        if out.logprobs is not None:
            extras["logprobs"] = [_logprobs_to_wire(entry) for entry in out.logprobs]
        if out.prompt_logprobs is not None:
            extras["prompt_logprobs"] = [_logprobs_to_wire(entry) for entry in out.prompt_logprobs]
        if extras:
            item.append(extras)
        outputs.append(item)
    *plain, overflow, tiers = _STATS(step.stats)
    return ["step", step.writer_id, step.step, outputs, [*plain, _OVERFLOW(overflow), _TIERS(tiers)]]


def step_from_wire(message: list[Any]) -> StepMessage:
    """Inverse of `step_to_wire`."""
    _, writer_id, number, items, stats = message
    outputs: list[RequestOutput] = []
    for item in items:
        out = RequestOutput(item[0], item[1], item[2], item[3])
        if len(item) > 4:
            extras = item[4]
            for name in ("logprobs", "prompt_logprobs"):
                if name in extras:
                    extras[name] = [_logprobs_from_wire(entry) for entry in extras[name]]
            if "cached_by_tier" in extras:
                extras["cached_by_tier"] = tuple(extras["cached_by_tier"])
            for name, value in extras.items():
                setattr(out, name, value)
        outputs.append(out)
    *plain, overflow, tiers = stats
    own: list[Any] = [*plain, OverflowStats(*overflow), TierStats(*tiers)]
    return StepMessage(writer_id, number, outputs, EngineStats(*own))


@dataclass(frozen=True, slots=True)
class StartMessage:
    """What an engine process is to be: the first frame it gets. model: as of `DescribedModel.to_wire`; offload: None
    without a store; host: address of this machine at which its other ranks, if there are any, find it.
    """

    config: EngineConfig
    model: list[Any]
    parent_pid: int
    offload: OffloadConfig | None = None
    host: str = LOCAL_HOST


def start_to_wire(start: StartMessage) -> list[Any]:
    """["start", parent pid, config map, model, map or None, host] for `pack_frame`."""
    offload = None if start.offload is None else asdict(start.offload)
    return ["start", start.parent_pid, asdict(start.config), start.model, offload, start.host]


def start_from_wire(message: list[Any]) -> StartMessage:
    """Inverse of `start_to_wire`."""
    _, parent_pid, config, model, offload, host = message
    return StartMessage(
        EngineConfig(**config),
        model,
        parent_pid,
        None if offload is None else OffloadConfig.from_plain(offload),
        host,
    )


def info_to_wire(info: EngineInfo) -> list[Any]:
    """["ready", map] for `pack_frame`."""
    data = {name: getattr(info, name) for name in EngineInfo.__slots__ if name != "namespace"}
    data["namespace"] = {name: getattr(info.namespace, name) for name in Namespace.__slots__}
    return ["ready", data]


def info_from_wire(message: list[Any]) -> EngineInfo:
    """Inverse of `info_to_wire`."""
    data = dict(message[1])
    data["namespace"] = Namespace(**data["namespace"])
    data["eos_token_ids"] = tuple(data["eos_token_ids"])
    return EngineInfo(**data)
