"""One running answer: its tokens, counters and block table.

Owns the state of a sequence and the arithmetic over it. Does not decide anything: `Scheduler` alone calls the mutators.

Invariants (checked by `validate`):
 1. 0 <= num_computed <= num_scheduled <= num_tokens; the last not of a FINISHED one, whose tokens of batches that are
    still in flight are dropped.
 2. `token_ids` holds every known token; `num_pending` more are being sampled by batches in flight.
 3. A sequence that is neither RUNNING nor RESTORING and has no batch in flight holds neither blocks nor a row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tournant.kvstore.block import block_key
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.messages import EngineRequest, TokenLogprobs
from tournant.workers.sampling_params import SamplingParams


class SequenceState(enum.Enum):
    """WAITING covers both new and preempted sequences: both are prefilled from the tokens they have. RESTORING: it
    holds a row and blocks, and blocks for it are on their way from a lower tier.
    """

    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RopeSwitch:
    """A sequence of more than `at` tokens uses RoPE rows from `offset` on and keys rooted at `namespace`."""

    at: int
    offset: int
    namespace: bytes


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one answer. Positions and counts are in tokens, `block_table` in physical block ids.

    arrival: order of arrival, unique in an engine; max_total: tokens after which it ends by length;
    keys: key chain of its full blocks as far as known, rooted at `namespace`; rope_switch: None once it has
    happened; rope_offset: added to positions to find their rows in the RoPE tables; num_scheduled: tokens whose KV is
    computed or being computed by batches in flight; num_below: leading blocks that are known to lie in the overflow;
    num_losses: how often blocks of it were lost there; lost_epoch: what batches of this epoch or before yield of it
    means nothing; row: place in the runner's per-sequence tables, -1 without one;
    epoch: grows at each preemption, so that a batch in flight can tell that the blocks it wrote are gone;
    fork_of: the first answer of the same request, whose prompt blocks this one may share; cached_by_tier: prompt tokens
    of `cached_tokens` by where they were found (device, host, NVMe).
    """

    request: EngineRequest
    index: int
    arrival: int
    max_total: int
    seed: int
    namespace: bytes
    rope_switch: RopeSwitch | None
    arrival_time: float
    fork_of: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    num_sealed: int = 0
    num_below: int = 0
    num_losses: int = 0
    lost_epoch: int = -1
    num_preemptions: int = 0
    epoch: int = 0
    row: int = -1
    rope_offset: int = 0
    state: SequenceState = SequenceState.WAITING
    finish_reason: str | None = None
    cached_tokens: int | None = None
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    first_scheduled_time: float | None = None
    reported: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self.keys = list(self.request.keys)
        self.num_prompt = len(self.token_ids) - self.request.num_output  # resumed: as if it had been preempted here
        if self.params.prompt_logprobs is not None and self.index == 0 and not self.request.num_output:
            self.prompt_logprobs = [None] * self.num_prompt
        if self.outgrew_rope:
            self.switch_rope()

    @property
    def params(self) -> SamplingParams:
        """Sampling of the request this answer belongs to."""
        return self.request.params

    @property
    def order(self) -> tuple[int, int]:
        """Smaller runs earlier: priority, then arrival."""
        return (self.request.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those being sampled."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_generated(self) -> int:
        """Known generated tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_schedule(self) -> int:
        """Tokens whose KV nobody computes yet. 0 while the last token a sequence may have is being sampled."""
        needed = max(self.num_prompt, self.max_total - 1)  # the last token's own KV is never read
        return min(self.num_tokens, needed) - self.num_scheduled

    @property
    def outgrew_rope(self) -> bool:
        """True when its KV must be computed again with the long RoPE frequencies before it can go on."""
        return self.rope_switch is not None and self.num_tokens > self.rope_switch.at

    @property
    def waits_for_parent(self) -> bool:
        """True while a fork should wait for the prompt's blocks that its parent is about to have."""
        parent = self.fork_of
        if parent is None or self.num_preemptions:
            return False
        if parent.state in (SequenceState.WAITING, SequenceState.RESTORING):
            return parent.num_preemptions == 0
        return parent.state is SequenceState.RUNNING and parent.num_computed < parent.num_prompt

    def switch_rope(self) -> None:
        """Use the long frequencies from now on. Its computed KV must be dropped by the caller."""
        if self.rope_switch is None:
            raise InvariantViolation(f"sequence {self.arrival} has no RoPE to switch to")
        if self.namespace != self.rope_switch.namespace:
            self.namespace = self.rope_switch.namespace
            self.keys = []
        self.rope_offset = self.rope_switch.offset
        self.rope_switch = None

    def extend_keys(self, num_blocks: int, block_tokens: int) -> None:
        """Make sure the keys of the first `num_blocks` blocks are known; all their tokens must be."""
        while len(self.keys) < num_blocks:
            start = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else self.namespace
            self.keys.append(block_key(parent, self.token_ids[start : start + block_tokens]))

    def drop_progress(self) -> list[int]:
        """Forget all computed KV (preemption or end). Returns the block table the caller must release."""
        table, self.block_table = self.block_table, []
        self.num_computed = self.num_scheduled = self.num_sealed = self.num_below = 0
        self.epoch += 1
        return table

    def validate(self, block_tokens: int) -> None:
        """Recount everything that can be recounted. Raises InvariantViolation."""
        most = self.num_scheduled if self.state is SequenceState.FINISHED else self.num_tokens
        if not 0 <= self.num_computed <= self.num_scheduled <= most:
            raise InvariantViolation(
                f"sequence {self.arrival}: computed {self.num_computed}, scheduled {self.num_scheduled}, "
                f"tokens {self.num_tokens} must not decrease"
            )
        if len(self.block_table) * block_tokens < self.num_scheduled:
            raise InvariantViolation(f"sequence {self.arrival}: {self.num_scheduled} tokens exceed its blocks")
        if self.num_sealed * block_tokens > self.num_computed:
            raise InvariantViolation(f"sequence {self.arrival}: {self.num_sealed} sealed blocks are not all computed")
        holds = self.state in (SequenceState.RUNNING, SequenceState.RESTORING)
        idle = not holds and self.num_in_flight == 0
        if idle and (self.block_table or self.row >= 0):
            raise InvariantViolation(f"sequence {self.arrival} is {self.state.value} but holds blocks or a row")
