"""What the HTTP path costs: server CPU per request and per streamed event, beside bare uvicorn in the same rounds.

Ours is the whole app (parsing, tokenizer, chat template, keys, detokenizer, events) over an engine that yields a token
per step at once; bare is an app of a few lines in another process. Counted in CPU seconds of the server's process, so
neither the client nor the neighbours' load counts. What an engine's messages cost to unpack is not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing

from benchmarks.common import BenchmarkError, Options, Report, Table, at_most, interleave, run_main, say
from benchmarks.http_load import ServerProcess, load
from tournant.workers.model_files import resolve_model

MAX_REQUEST_US, MAX_EVENT_US = 300.0, 50.0
USERS = 32
SHORT_EVENTS, LONG_EVENTS = 1, 129
EVENT_BYTES = 200  # about what one event of ours has
MESSAGES = [{"role": "user", "content": "What is the capital of France, and which river runs through it?"}]
TEXT = "Once upon a time, in a small village near the sea, there lived an old man"


def run(options: Options) -> Report:
    """Start both servers and measure requests, then streams."""
    report = Report("HTTP ingress")
    files = resolve_model(options.model, "bfloat16", progress=say)
    requests, streams = (64, 8) if options.quick else (2000, 96)
    with ExitStack() as stack:
        bare = stack.enter_context(closing(ServerProcess("serve_bare.py", {})))
        ours = stack.enter_context(closing(ServerProcess("serve_ours.py", {"folder": str(files.folder)})))
        report.add(_requests(bare, ours, requests, options))
        report.add(_events(bare, ours, streams, options))
    return report


def _body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "temperature": 0, **fields}).encode()


def _chat(events: int) -> bytes:
    return _body(messages=MESSAGES, max_tokens=events, ignore_eos=True, stream=True)


def _per_request_us(server: ServerProcess, path: str, body: bytes, count: int) -> Callable[[], float]:
    """A contestant: microseconds of server CPU per request."""

    def run() -> float:
        before = server.cpu_seconds()
        load(server.port, USERS, [(path, body)] * count)
        return (server.cpu_seconds() - before) / count * 1e6

    return run


def _requests(bare: ServerProcess, ours: ServerProcess, count: int, options: Options) -> Table:
    chat, text = _body(messages=MESSAGES, max_tokens=1), _body(prompt=TEXT, max_tokens=1)
    found = interleave(
        {
            "bare uvicorn, echo": _per_request_us(bare, "/echo", chat, count),
            "chat completion of 1 token": _per_request_us(ours, "/v1/chat/completions", chat, count),
            "text completion of 1 token": _per_request_us(ours, "/v1/completions", text, count),
        },
        options.rounds,
    )
    echo = found["bare uvicorn, echo"]
    return Table(
        "CPU per request",
        ("request", "microseconds", "this / bare uvicorn", "bar"),
        [
            (
                name,
                value,
                value.over(echo) if value is not echo else "",
                at_most(MAX_REQUEST_US, value) if value is not echo else "",
            )
            for name, value in found.items()
        ],
        (f"{count} requests over {USERS} connections; one uvicorn worker ({ours.facts}); not streamed.",),
    )


def _per_event_us(server: ServerProcess, path: str, body: Callable[[int], bytes], streams: int) -> Callable[[], float]:
    """A contestant: microseconds of server CPU per event of a stream beyond its first."""

    def cpu_and_events(length: int) -> tuple[float, int]:
        before = server.cpu_seconds()
        answers = load(server.port, USERS, [(path, body(length))] * streams)
        events = sum(len(answer.events) for answer in answers)
        if events < streams * length:
            raise BenchmarkError(f"{path} sent {events} events for {streams} x {length} tokens; events were joined")
        return server.cpu_seconds() - before, events

    def run() -> float:
        short_cpu, short_events = cpu_and_events(SHORT_EVENTS)
        long_cpu, long_events = cpu_and_events(LONG_EVENTS)
        return (long_cpu - short_cpu) / (long_events - short_events) * 1e6

    return run


def _events(bare: ServerProcess, ours: ServerProcess, streams: int, options: Options) -> Table:
    def bare_body(events: int) -> bytes:
        return json.dumps({"events": events, "bytes": EVENT_BYTES}).encode()

    found = interleave(
        {
            "bare uvicorn, events": _per_event_us(bare, "/events", bare_body, streams),
            "chat completion, streamed": _per_event_us(ours, "/v1/chat/completions", _chat, streams),
        },
        options.rounds,
    )
    plain, chat = found.values()
    return Table(
        "CPU per streamed event",
        ("stream", "microseconds", "this / bare uvicorn", "bar"),
        [
            ("bare uvicorn, events", plain, "", ""),
            ("chat completion, streamed", chat, chat.over(plain), at_most(MAX_EVENT_US, chat)),
        ],
        (
            f"Difference between {streams} streams of {LONG_EVENTS} and of {SHORT_EVENTS} tokens, {USERS} at a time, "
            f"per event; one token per event, events of about {EVENT_BYTES} bytes.",
        ),
    )


if __name__ == "__main__":
    run_main(run, __doc__)
