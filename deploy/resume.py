"""How an answer goes on in another engine: the request for its rest, and how long to wait before.

Pure. Who notices that an engine is lost is generation.py, who finds another one is engine_pool.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tournant.kvstore.block import block_key
from tournant.workers.messages import EngineInfo, EngineRequest

MAX_RESUMES = 3  # engines that may die under one answer
MAX_TURNS = 32  # engines that may have one answer: those that drain or are full hand it on
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0


def wait_s(turn: int) -> float:
    """Seconds before an answer is given to an engine for the `turn`-th time again: at once, then ever longer."""
    return 0.0 if turn <= 1 else min(FIRST_WAIT_S * 2.0 ** (turn - 2), LONGEST_WAIT_S)


def rest_of(
    request: EngineRequest,
    request_id: int,
    log: Sequence[int],
    index: int,
    info: EngineInfo,
    *,
    prompt_is_told: bool,
) -> EngineRequest:
    """The request for what comes behind `log`, the tokens so far of answer `index` of `request`.

    info: of an engine on the same weights; prompt_is_told: the prompt's log-probabilities need not be told again.
    """
    token_ids = [*request.token_ids, *log]
    digest = info.namespace_for(len(token_ids)).digest(request.cache_salt)
    keys = list(request.keys) if digest == request.namespace_digest else []
    size = info.block_tokens
    for start in range(len(keys) * size, len(token_ids) - size + 1, size):
        keys.append(block_key(keys[-1] if keys else digest, token_ids[start : start + size]))
    params = replace(request.params, n=1)
    if prompt_is_told:
        params = replace(params, prompt_logprobs=None)
    return replace(
        request,
        request_id=request_id,
        token_ids=token_ids,
        params=params,
        keys=keys,
        namespace_digest=digest,
        num_output=len(log),
        first_index=index,
    )
