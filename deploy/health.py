"""Whether an engine can generate: a step of late says so, else one token is asked for.

Owns the probe, which callers share. What is done about an engine that cannot is Serve's, which replaces its replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tournant.workers.engine_client import EngineClient
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.sampling_params import SamplingParams

RECENT_STEP_S = 10.0
PROBE_TIMEOUT_S = 5.0
PROBE_PRIORITY = -(1 << 31)  # before every request of a client


class Health:
    """Of one engine. is_closed: whether it is being changed, and no fault that it cannot generate; recent_step_s: a
    step this recent counts; probe_timeout_s: how long one token may take.
    """

    def __init__(
        self,
        engine: EngineClient,
        is_closed: Callable[[], bool],
        recent_step_s: float = RECENT_STEP_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._is_closed = is_closed
        self._recent_step_s = recent_step_s
        self._probe_timeout_s = probe_timeout_s
        self._probe: asyncio.Task[bool] | None = None

    async def healthy(self) -> bool:
        """Whether the engine can generate: it made a step recently, or does so now, or will when it has been started
        anew (`engine.restarting`). Concurrent calls share a probe.
        """
        engine = self._engine
        if not engine.alive or self._is_closed() or engine.restarting:
            return engine.alive
        if engine.last_step_time and time.monotonic() - engine.last_step_time <= self._recent_step_s:
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._run_probe())
        probed = await asyncio.shield(self._probe)
        return probed or (engine.alive and (self._is_closed() or engine.restarting))

    async def _run_probe(self) -> bool:
        """Generate one token from a prompt of one token."""
        engine = self._engine
        reasons: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def sink(output: RequestOutput) -> None:
            if output.finish_reason is not None and not reasons.done():
                reasons.set_result(output.finish_reason)

        token_id = next(iter(engine.info.eos_token_ids), 0)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            engine.new_request_id(), [token_id], params, [], engine.info.namespace.digest(), priority=PROBE_PRIORITY
        )
        try:
            engine.submit(request, sink)
            return await asyncio.wait_for(reasons, self._probe_timeout_s) in ("length", "stop")
        except (TimeoutError, EngineDeadError):
            return False
        finally:
            engine.abort([request.request_id])
