"""The wire form of engine messages: round trips, bounds, refusals."""

from __future__ import annotations

import msgpack
import pytest

from tests.workers.fake_runner import NAMESPACE
from tournant.workers.messages import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FrameBuffer,
    RequestOutput,
    StepMessage,
    TokenLogprobs,
    info_from_wire,
    info_to_wire,
    pack_frame,
    request_from_wire,
    request_to_wire,
    step_from_wire,
    step_to_wire,
    unpack_body,
)
from tournant.workers.sampling_params import SamplingParams


def through_the_wire(message: list) -> list:
    (received,) = FrameBuffer().feed(pack_frame(message))
    return received


def test_requests_survive() -> None:
    params = SamplingParams(
        n=2, stop=("a", "ü"), stop_token_ids=(1,), logit_bias=((3, -1.5),), seed=1 << 63, logprobs=0
    )
    request = EngineRequest(7, [1, 2, 3], params, [b"k" * 32], b"d" * 32, "salt", -3)
    assert request_from_wire(through_the_wire(request_to_wire(request))) == request
    plain = EngineRequest(8, [1], SamplingParams())
    assert request_from_wire(through_the_wire(request_to_wire(plain))) == plain


def test_steps_survive() -> None:
    outputs = [
        RequestOutput(1, 0, [5]),
        RequestOutput(1, 1, [6], "stop", stop_token=6, cached_tokens=0, logprobs=[TokenLogprobs(-0.5, [(6, -0.5)])]),
        RequestOutput(2, 0, [], "error", error="no"),
        RequestOutput(3, 0, [1], prompt_logprobs=[None, TokenLogprobs(-1.0, [])], queue_ms=1.0, prefill_ms=2.0),
    ]
    step = StepMessage((1 << 64) - 1, 3, outputs, EngineStats(num_running=2, num_steps=9))
    assert step_from_wire(through_the_wire(step_to_wire(step))) == step


def test_info_survives() -> None:
    info = EngineInfo(1, 2, 3, 4, 16, 5, 6, 7, (8, 9), "float32", "cpu", NAMESPACE)
    assert info_from_wire(through_the_wire(info_to_wire(info))) == info
    assert info.max_sequence_tokens == 3


def test_frames_come_out_whole_however_they_arrive() -> None:
    messages = [["a", 1], ["b", "x" * 1000], ["c"]]
    stream = b"".join(pack_frame(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        buffer, found = FrameBuffer(), []
        for start in range(0, len(stream), size):
            found += buffer.feed(stream[start : start + size])
        assert found == messages


@pytest.mark.parametrize(
    "body",
    [msgpack.packb(5), msgpack.packb([]), msgpack.packb([1]), b"\xc1", msgpack.packb({"a": 1}), b"\x91" * 2000],
)
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgpack's own errors are ValueErrors of many texts
        list(FrameBuffer().feed(FRAME_HEADER.pack(len(body)) + body))


@pytest.mark.parametrize("body", [b"\x92\xa1x\x81\x90\x01", b"\x92\xa1x\x81\x80\x01"], ids=["array", "map"])
def test_a_map_whose_key_cannot_be_one_is_no_frame(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^a frame holds what cannot be read: "):
        unpack_body(body)


def test_oversized_frames_are_refused_before_they_are_read() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        list(FrameBuffer().feed(FRAME_HEADER.pack(MAX_FRAME_BYTES + 1)))


def test_unknown_sampling_fields_are_refused() -> None:
    message = request_to_wire(EngineRequest(1, [1], SamplingParams()))
    message[3] = {"colour": "red"}
    with pytest.raises(TypeError, match="colour"):
        request_from_wire(message)
