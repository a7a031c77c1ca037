"""A client for Python on a Ray cluster: `connect()` finds the service, and calls go through its Serve handle.

Owns finding the application, waiting until it is ready, sending again what was refused, many prompts at a time, and
which errors a caller meets. What crosses the cluster is plain (handle_methods.py); what callers get is client_types.py.

Invariants:
 1. A call that is sent again has given nothing to its caller before.
 2. Whoever stops waiting (a closed stream, a cancelled task, Ctrl-C) ends the engine's work on that request.
 3. A batch holds at most max_in_flight requests open and WINDOW times as many prompts and answers in memory.
 4. Nothing of a caller's runs on the loop: prompts are taken by a thread of the batch's, and may come from the client.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

import ray
from ray import serve
from ray._private.grpc_utils import init_grpc_channel
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from tournant.deploy.client_types import (
    Completion,
    NoSuchApplication,
    NotConnected,
    NotReady,
    Options,
    Outcome,
    Piece,
    Prompt,
    check_batch,
    check_options,
)
from tournant.deploy.config import APP_NAME, DEPLOYMENT_NAME
from tournant.deploy.errors import GenerationFailed, RequestError
from tournant.workers.errors import EngineDeadError, Overloaded

READY_S, RETRIES = 60.0, 2
POLL_S = 0.2
REACHABLE_S = CLOSE_S = 5.0
MAX_WAIT_S = 30.0  # between two tries
MAX_TIMEOUT_S = 1e9
FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # of whoever connects to Ray; its request is empty
WINDOW = 4  # times max_in_flight
LOCAL_HOSTS = ("localhost", "127.0.0.1")
OURS = (RequestError, GenerationFailed, Overloaded, EngineDeadError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call goes on trying. ready_s: for an engine that is not ready; retries: how often it is sent again
    when it was refused for overload, or lost with an engine before anything of it was delivered.
    """

    ready_s: float = READY_S
    retries: int = RETRIES


class AsyncClient:
    """The calls, for any event loop. handle: of the application's ingress."""

    def __init__(self, app: str, handle: Any, patience: Patience) -> None:
        self.app = app
        self._handle = handle
        self._patience = patience

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """All answers to one prompt: text, token ids or chat messages.

        Raises RequestError for what can never be served, Overloaded (`retry_after_s`) when it was refused `retries`
        times more, NotReady without an engine for `ready_s`, GenerationFailed when it failed or took `timeout_s`.
        """
        return await self._generate("generate", prompt, options)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]) -> Completion:
        """The next message of a chat, as of the service's chat endpoint; the rest as `generate`."""
        return await self._generate("chat", messages, options)

    async def _generate(self, method: str, prompt: Prompt, options: Options) -> Completion:
        check_options(options)
        tries = _Tries(self.app, self._patience)
        while True:
            try:
                return Completion.from_plain(await self._call(method, prompt, options))
            except OURS as error:
                await tries.wait(error)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """As `generate`, piece by piece. Nothing is sent until it is read; closing it ends the engine's work. Raises
        as `generate`, but is not sent again once a piece was read.
        """
        check_options(options)
        tries, delivered = _Tries(self.app, self._patience), False
        while True:
            try:
                async with aclosing(self._pieces(prompt, options)) as pieces:
                    async for piece in pieces:
                        delivered = True
                        yield Piece.from_plain(piece)
                return
            except OURS as error:
                if delivered:
                    raise
                await tries.wait(error)

    def batch(
        self, prompts: Iterable[Prompt], *, max_in_flight: int = 64, **options: Unpack[Options]
    ) -> AsyncGenerator[Outcome, None]:
        """Outcomes in the order of the prompts, which are taken as they are needed, at most max_in_flight at once.

        Prompts are taken by a thread of their own, so a slow source delays nothing but its own prompts. One that fails
        gives an outcome with its error; the others go on. Closing it ends what runs. Raises ValueError (RequestError)
        at once for a max_in_flight, prompts or options that can never do, and what the source of prompts raises.
        """
        check_batch(prompts, max_in_flight)
        check_options(options)
        return self._batch(enumerate(prompts), max_in_flight, options)

    async def _batch(
        self, numbered: Iterator[tuple[int, Prompt]], max_in_flight: int, options: Options
    ) -> AsyncGenerator[Outcome, None]:
        open_calls = asyncio.Semaphore(max_in_flight)
        source = _Source(numbered)
        running: deque[asyncio.Task[Outcome]] = deque()
        taking: asyncio.Future[tuple[int, Prompt] | None] | None = source.take()
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [*([taking] if taking else []), *([running[0]] if running else [])]
                if not awaited:
                    return
                # not the task itself: cancelled alone, it would let another one begin
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if taking and taking.done():
                    found, taking = taking.result(), None
                    if found is None:
                        source.over = True
                    else:
                        running.append(asyncio.create_task(self._outcome(open_calls, *found, options)))
                done = running.popleft() if running and running[0].done() else None
                if not taking and not source.over and len(running) < WINDOW * max_in_flight:
                    taking = source.take()
                if done:
                    yield done.result()
        finally:
            source.close()
            if taking:
                taking.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _outcome(self, open_calls: asyncio.Semaphore, number: int, prompt: Prompt, options: Options) -> Outcome:
        async with open_calls:
            try:
                return Outcome(number, prompt, await self._generate("generate", prompt, options), None)
            except Exception as error:  # whatever it is, it is this prompt's
                return Outcome(number, prompt, None, error)

    async def _call(self, method: str, prompt: Prompt, options: Options) -> Any:
        """One call of a method that answers once; cancelled there when it is here."""
        response = self._method(method, options).remote(prompt, **_plain(options))
        return await self._within(options, response.cancel, response)

    async def _pieces(self, prompt: Prompt, options: Options) -> AsyncGenerator[Mapping[str, Any], None]:
        """One call of a method that streams; cancelled there when this is closed before its end."""
        response = self._method("stream", options, stream=True).remote(prompt, **_plain(options))
        over = False
        try:
            while True:
                try:
                    piece = await self._within(options, response.cancel, anext(response))
                except StopAsyncIteration:
                    over = True
                    return
                except Exception:
                    over = True
                    raise
                yield piece
        finally:
            if not over:
                response.cancel()

    def _method(self, name: str, options: Options, stream: bool = False) -> Any:
        session_id = options.get("session_id")
        changes = {} if session_id is None else {"session_id": session_id}
        handle = self._handle.options(stream=stream, **changes) if stream or changes else self._handle
        return getattr(handle, name)

    async def _within(self, options: Options, cancel: Callable[[], None], awaited: Any) -> Any:
        """Wait for something of a call, no longer than it may take. Raises errors as callers know them."""
        timeout_s = options.get("timeout_s")
        limit_s = None if timeout_s is None else min(timeout_s, MAX_TIMEOUT_S) + self._patience.ready_s
        try:
            return await asyncio.wait_for(_wait(awaited), limit_s)
        except asyncio.CancelledError:
            cancel()
            raise
        except TimeoutError as error:
            cancel()
            raise NotReady(self.app, limit_s or 0.0, "no replica has answered") from error
        except (RayError, RayServeException) as error:
            raise _as_known(self.app, error) from None


class _Tries:
    """How often, and since when, one call was tried."""

    def __init__(self, app: str, patience: Patience) -> None:
        self._app, self._patience = app, patience
        self._began, self._done = time.monotonic(), 0

    async def wait(self, error: Exception) -> None:
        """Until the next try. Raises what the caller is to get when there is none."""
        wait_s = 1.0
        if isinstance(error, EngineDeadError):
            waited_s = time.monotonic() - self._began
            if waited_s >= self._patience.ready_s:
                raise NotReady(self._app, waited_s, str(error)) from error
            wait_s = min(wait_s, self._patience.ready_s - waited_s)
        elif not _is_passing(error) or self._done >= self._patience.retries:
            raise error
        else:
            first_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
            wait_s = min(MAX_WAIT_S, first_s * 2**self._done) * random.uniform(1.0, 1.25)
            self._done += 1
        await asyncio.sleep(wait_s)


class _Source:
    """Prompts, each taken when it is asked for, on a thread that ends with the process though the source blocks it."""

    def __init__(self, numbered: Iterator[tuple[int, Prompt]]) -> None:
        self.over = False
        self._wanted: queue.SimpleQueue[Future[tuple[int, Prompt] | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(numbered,), daemon=True, name="tournant-prompts").start()

    def take(self) -> asyncio.Future[tuple[int, Prompt] | None]:
        """The next prompt and its number, None after the last."""
        wanted: Future[tuple[int, Prompt] | None] = Future()
        self._wanted.put(wanted)
        return asyncio.wrap_future(wanted)

    def close(self) -> None:
        """Take no more; what is being taken is dropped."""
        self._wanted.put(None)

    def _serve(self, numbered: Iterator[tuple[int, Prompt]]) -> None:
        while (wanted := self._wanted.get()) is not None:
            if not wanted.set_running_or_notify_cancel():
                continue
            try:
                wanted.set_result(next(numbered, None))
            except Exception as error:  # it is the batch's to raise
                wanted.set_exception(error)
            except BaseException as error:  # SystemExit would end the loop
                wanted.set_exception(RuntimeError(f"the source of prompts raised {error!r}"))


class Client:
    """The same calls for programs without an event loop; from any thread. `aio` has them for one with."""

    def __init__(self, app: str, handle: Any, patience: Patience) -> None:
        self.aio = AsyncClient(app, handle, patience)
        self._loop = loop = asyncio.new_event_loop()
        self._thread = thread = threading.Thread(target=loop.run_forever, daemon=True, name="tournant-client")
        thread.start()
        self._close = weakref.finalize(self, _end, loop, thread)  # runs at the interpreter's exit too

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As `AsyncClient.generate`."""
        return self._run(self.aio.generate(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]) -> Completion:
        """As `AsyncClient.chat`."""
        return self._run(self.aio.chat(messages, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """As `AsyncClient.stream`. Leaving the loop over it closes it, `close()` does too."""
        return self._iterate(self.aio.stream(prompt, **options))

    def batch(
        self, prompts: Iterable[Prompt], *, max_in_flight: int = 64, **options: Unpack[Options]
    ) -> Iterator[Outcome]:
        """As `AsyncClient.batch`; prompts may come from calls of this client."""
        return self._iterate(self.aio.batch(prompts, max_in_flight=max_in_flight, **options))

    def close(self) -> None:
        """End what is still being read; this client makes no more calls. Idempotent, and done at exit by itself."""
        self._close()

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while (found := self._run(_next(items))) is not None:
                yield found
        finally:
            if threading.current_thread() is self._thread:  # where it was found to be garbage
                self._loop.create_task(_close(items))
            elif self._close.alive:  # else `_end` has closed it
                self._run(items.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait; Ctrl-C here cancels it there, and is raised once it has ended there."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called on the client's own event loop, which it would block; await client.aio's there")
        if not self._close.alive:
            work.close()
            raise NotConnected("this client is closed; connect again")
        begun: list[asyncio.Task[T]] = []
        ended: Future[asyncio.Task[T]] = Future()

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(ended.set_result)

        self._loop.call_soon_threadsafe(begin)
        try:
            task = ended.result()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: begun[0].cancel())  # `begin` ran before
            ended.result().cancelled() or ended.result().exception()  # else asyncio logs it as overlooked
            raise
        if task.cancelled():
            raise NotConnected("this client was closed meanwhile; connect again")
        return task.result()


def connect(
    app: str = APP_NAME,
    address: str | None = None,
    *,
    namespace: str | None = None,
    ready_s: float = READY_S,
    retries: int = RETRIES,
) -> Client:
    """A client of the service that runs as application `app` on a Ray cluster, once it can take requests.

    address: of the cluster, as Ray's ("HOST:6379", "auto"), None = the one this process is connected to, else the one
    that Ray finds on this machine; namespace: for this process, if it is not connected yet; ready_s and retries: see
    `Patience`. Raises NotConnected, NoSuchApplication, NotReady. This process stays connected to Ray.
    """
    _join_ray(address, namespace)
    _wait_until_ready(app, ready_s)
    try:
        handle = serve.get_app_handle(app)
    except RayServeException as error:  # deleted meanwhile
        raise NoSuchApplication(app, list(_applications())) from error
    return Client(app, handle, Patience(ready_s, retries))


def _join_ray(address: str | None, namespace: str | None) -> None:
    host, _, port = (address or "").rpartition(":")
    is_plain = port.isdecimal() and "//" not in host
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if is_plain and address != here and not (host in LOCAL_HOSTS and here.endswith(f":{port}")):
            raise NotConnected(f"this process is connected to Ray at {here}, not at {address}; leave out the address")
        return
    try:
        if address and is_plain:  # Ray itself tries for minutes
            _probe(address)
        ray.init(address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise NotConnected(
            f"no Ray cluster answers at {address or 'this machine'}: {error}; start one by `ray start --head`, or name "
            "the address that it printed, whose port is 6379 unless it was told another"
        ) from error


def _probe(address: str) -> None:
    """Raises ConnectionError unless a Ray cluster's control service answers there."""
    channel = init_grpc_channel(address, [("grpc.enable_http_proxy", 0)])
    try:
        failed = channel.unary_unary(FIRST_CALL).future(b"", timeout=REACHABLE_S).exception()
    finally:
        channel.close()
    if failed is not None:
        raise ConnectionError(f"{failed.code().name}: {' '.join(str(failed.details()).split())[:300]}")


def _applications() -> dict[str, ApplicationStatusOverview]:
    return dict(serve.status().applications)


def _wait_until_ready(app: str, ready_s: float) -> None:
    """Until it takes requests. Raises NoSuchApplication and NotReady."""
    began = time.monotonic()
    while True:
        applications = _applications()
        found = applications.get(app)
        if found is None:
            raise NoSuchApplication(app, list(applications))
        waited_s = time.monotonic() - began
        if found.status == ApplicationStatus.RUNNING and DEPLOYMENT_NAME not in found.deployments:
            raise NoSuchApplication(app, [name for name in applications if name != app])
        if found.status == ApplicationStatus.RUNNING or _all_serve(found):
            return
        over = found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING)
        if over or waited_s >= ready_s:
            why = " ".join(found.message.split())[:500] or "no replica of it runs yet"
            raise NotReady(app, waited_s, f"{found.status.value}: {why}")
        time.sleep(POLL_S)


def _all_serve(found: ApplicationStatusOverview) -> bool:
    """Whether it takes requests though it is being changed, or a part of it is unhealthy."""
    deployments = found.deployments.values()
    return bool(deployments) and all(_num_running(one) for one in deployments)


def _num_running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a while later."""
    return isinstance(error, Overloaded) or (
        isinstance(error, GenerationFailed) and error.kind in ("engine_dead", "engine_error", "weights_changed")
    )


def _as_known(app: str, error: Exception) -> Exception:
    """Serve's and Ray's errors as ours, where there is one."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, OURS):
        return error.cause
    if isinstance(error, BackPressureError):
        return Overloaded(str(error))
    if isinstance(error, DeploymentUnavailableError):
        return NotReady(app, 0.0, error.message)
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        return GenerationFailed(f"the replica ended before its answer: {error}", "engine_dead")
    return error


def _plain(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "session_id"}


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close what is still being read, so that nobody works for it, and end the loop."""

    async def close() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await loop.shutdown_asyncgens()
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)
    if threading.current_thread() is not thread:  # which may be where the client is found to be garbage
        thread.join(CLOSE_S)


async def _wait(awaited: Any) -> Any:
    return await awaited


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)
