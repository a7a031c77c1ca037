"""The simulated world of one engine: virtual time, devices of its ranks, its link and store, its users, and fate.

The engine is the real one (workers/engine.py and all it uses); only device, link and clock are simulated. Everything
that happens is drawn from one seeded generator, so a `Setup` names a schedule. The world turns the engine's loop as a
process would: when an event came or `wait_s` is over. Invariants: STORE.md section 6.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.simulation.engine_device import SimDevice, SimRunner, Touched, key_after
from tests.simulation.engine_link import SimLink
from tests.simulation.engine_overflow import Places
from tests.simulation.engine_store import SimStore
from tests.simulation.engine_users import Users
from tests.simulation.world import Violation
from tournant.kvstore.block import Namespace
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import CopyState
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineInfo
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.transfer_messages import Copied, Loaded, ReadEnded, SaveEntry, Unstashed

FAULTS = (
    "cancel", "failed step", "late rank", "store lost", "lost block", "corrupt block", "rotten block", "evictions",
    "late lookup", "lookup never answered", "slow disk", "slow copy", "failed copy", "late report", "refused save",
    "no credit", "stash lost",
)  # fmt: skip
LATER_FAULTS = ("weights update",)  # drawn last: seeds of before mean what they did
OVERFLOW_FAULTS = ("lost below",)  # of one rank: others end with their group, see "failed step"
LONG_LAYOUT = b"L" * 32
FIRST_WRITER = 7
STEP_S = 20e-6  # of the engine's own work in a turn
MOST_IDLE_STEPS = 300
TURNS = 300
LONG_TURNS = 150  # of schedules with sequences larger than the device
QUIET_TURNS = 30_000
QUIET_S = 900.0


def namespace(weights: int) -> Namespace:
    """Of the weights with this number."""
    return Namespace(weights_id=b"wv"[weights : weights + 1] * 32, kv_form="sim", numerics="sim", layout_id=b"l" * 32)


@dataclass(frozen=True)
class Setup:
    """What a schedule is made of, next to its seed. rope_switch: 0 = none; persistent: what lies on NVMe
    survives the store; token_us: most that computing a token takes; num_below: places of sequences larger than the
    device; has_tiers: whether there is a node store.
    """

    seed: int
    faults: frozenset[str]
    ranks: int
    num_blocks: int
    block_tokens: int
    depth: int
    max_num_seqs: int
    max_num_batched_tokens: int
    caching: bool
    credit: int
    host_blocks: int
    nvme_blocks: int
    restore: str
    persistent: bool
    rope_switch: int
    lookup_ms: int
    restore_ms: int
    prefetch_requests: int
    prefetch_share: float
    publish_share: float
    watermarks: tuple[float, float, float]
    token_us: int
    turns: int = TURNS
    num_below: int = 0
    has_tiers: bool = True

    @staticmethod
    def draw(seed: int, *, turns: int = TURNS) -> Setup:
        """A random setup: each fault is on with the same odds of being off. A third are storms of preemptions, a third
        have much to restore.
        """
        rng = random.Random(seed * 2 + 1)
        storm, restores = rng.choice(((True, False), (False, True), (False, False)))
        num_blocks = rng.randrange(5, 12) if storm else rng.randrange(5, 24)
        setup = Setup(
            seed=seed,
            faults=frozenset(fault for fault in FAULTS if rng.randrange(3) == 0),
            ranks=rng.choice((1, 1, 2, 3)),
            num_blocks=num_blocks,
            block_tokens=8,
            depth=rng.choice((1, 1, 1, 2) if storm else (1, 2, 2, 3)),
            max_num_seqs=rng.choice((4, 8) if storm else (1, 3, 8)),
            max_num_batched_tokens=rng.choice((16, 48, 256)),
            caching=storm or restores or rng.randrange(6) > 0,
            credit=rng.choice((8, 16) if storm or restores else (1, 3, 8, 16)),
            host_blocks=rng.choice((16, 64, 64) if restores else (4, 16, 64)),
            nvme_blocks=rng.choice((16, 128, 128) if restores else (0, 16, 128)),
            restore="always" if restores else rng.choice(("auto", "auto", "always", "never")),
            persistent=rng.randrange(2) == 0,
            rope_switch=rng.choice((0, 0, 0, num_blocks * 4)),
            lookup_ms=rng.choice((4, 30, 100)),
            restore_ms=rng.choice((5, 50, 1000)),
            prefetch_requests=rng.choice((0, 2, 8)),
            prefetch_share=rng.choice((0.0, 0.25, 1.0)),
            publish_share=rng.choice((0.0, 0.05, 1.0)),
            watermarks=rng.choice(((0.5, 0.7, 0.9), (0.2, 0.3, 0.5), (1.0, 1.0, 1.0))),
            token_us=rng.choice((20, 200, 1000)),
            turns=turns,
        )
        return replace(setup, faults=setup.faults.union(fault for fault in LATER_FAULTS if rng.randrange(3) == 0))

    @staticmethod
    def draw_long(seed: int, *, turns: int = LONG_TURNS) -> Setup:
        """One in which sequences may be larger than the device, beside a node store or without one."""
        rng = random.Random(seed * 2 + 1)
        setup = Setup.draw(seed, turns=turns)
        num_blocks = rng.choice((1, 2, 3, 5, 8, 12))
        num_below = rng.choice((3, 10, 20, 40))
        return replace(
            setup,
            num_blocks=num_blocks,
            num_below=num_below,
            has_tiers=rng.randrange(2) == 0,
            rope_switch=rng.choice((0, 0, 0, 0, (num_blocks + num_below) * 4)),
            faults=setup.faults.union(OVERFLOW_FAULTS if setup.ranks == 1 and rng.randrange(2) == 0 else ()),
        )

    @property
    def most_tokens(self) -> int:
        """Of one sequence."""
        return (self.num_blocks + self.num_below) * self.block_tokens

    def engine_config(self) -> EngineConfig:
        """Of the engine."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.caching,
            num_in_flight=self.depth,
        )

    def offload_config(self) -> OffloadConfig:
        """Of its tiers."""
        stop, start, parallel = self.watermarks
        return OffloadConfig(
            "simulated",
            copy_stop=stop,
            copy_start=start,
            copy_parallel=parallel,
            publish_share=self.publish_share,
            restore=self.restore,
            lookup_ms=self.lookup_ms,
            restore_ms=self.restore_ms,
            prefetch_requests=self.prefetch_requests,
            prefetch_share=self.prefetch_share,
        )

    def info(self, writer_id: int, namespace: Namespace) -> EngineInfo:
        """What an engine is told of pool and model."""
        return EngineInfo(
            writer_id=writer_id,
            pid=1,
            max_model_len=4096,
            pool_tokens=self.num_blocks * self.block_tokens,
            block_tokens=self.block_tokens,
            max_num_seqs=self.max_num_seqs,
            max_queued_requests=64,
            vocab_size=997,
            eos_token_ids=(),
            dtype="sim",
            device="sim",
            namespace=namespace,
            overflow_tokens=self.num_below * self.block_tokens,
            rope_switch=self.rope_switch,
            long_layout_id=LONG_LAYOUT if self.rope_switch else b"",
        )


class EngineWorld:
    """See the module."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = random.Random(setup.seed)
        self.now = 100.0
        self.quiet = False
        self.trace = 0
        self.garbage = 0
        self.counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, int, Callable[[], object]]] = []
        self._order = 0
        self._key_of_state: dict[int, bytes] = {}
        self._keys: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._salted: dict[tuple[int, str | None], bytes] = {}
        self.num_notes = 0
        self.weights = 0
        self.engines: list[int] = []  # weights of all that there were; their writer ids count up from FIRST_WRITER
        self.swap_at: float | None = None  # when the engine is to end; until then it takes no new requests
        self.store = SimStore(self, setup.host_blocks, setup.nvme_blocks)
        self._start_engine()
        self.users = Users(self)

    # ---- the engine's process

    def _start_engine(self) -> None:
        """Another process: nothing of the one before is left in memory."""
        setup = self.setup
        self.engines.append(self.weights)
        self.tables: dict[int, list[int]] = {}  # the leader's, by row
        self._hashes: dict[int, int] = {}
        self._copying: dict[str, tuple[int, ...]] = {}
        self._idle_steps = 0
        self.touched = Touched(self)
        self.places = Places(self, setup.num_blocks)
        self.devices = [
            SimDevice(self, rank, setup.num_blocks, setup.block_tokens, setup.num_below) for rank in range(setup.ranks)
        ]
        self.runner = SimRunner(self, self.num_steps)
        self.link = SimLink(self, self.store, setup.credit)
        info = setup.info(self.writer_id(), namespace(self.weights_told()))
        tiers = (self.link, setup.offload_config()) if setup.has_tiers else (None, None)
        self.engine = Engine(setup.engine_config(), self.runner, info, *tiers, lambda: self.now)

    num_steps = 0  # of engines that have ended

    def writer_id(self) -> int:
        """Of the engine that starts."""
        return FIRST_WRITER + len(self.engines)

    def weights_told(self) -> int:
        """Number of the weights with whose digest the engine that starts makes its keys."""
        return self.weights

    def begin_update(self) -> None:
        """The engine takes no new requests; it ends when those it has are answered, at the latest after a while."""
        if self.swap_at is None:
            self.swap_at = self.now + self.rng.choice((0.0, 0.002, 0.02, 0.2)) * self.rng.random()

    def _swap(self) -> None:
        """The engine ends, whatever is under way; another one starts, on other weights or, when these cannot be loaded,
        on the same. Who has had nothing of an answer yet is answered by that.
        """
        self.swap_at = None
        self.users.count_under_way()
        again = self.users.withdraw()
        self.users.count_stats()
        self.num_steps = self.runner.num_steps
        self.engine.close()
        end = self.now + self.rng.uniform(0.001, 0.1)
        while self._heap and self._heap[0][0] <= end:
            self._next()
        self.now = end
        if self.rng.randrange(4):
            self.weights = 1 - self.weights
        self._start_engine()
        self.users.submit_again(again)

    def were_others_between(self, writer_id: int) -> bool:
        """Whether an engine from before an update to other weights and back had this writer id."""
        return any(weights != self.weights for weights in self.engines[max(0, writer_id - FIRST_WRITER - 1) :])

    # ---- time

    def at(self, when: float, action: Callable[[], object], *, by_store: bool = False) -> None:
        """Do something at a time. What the store does comes true also if the engine has ended by then."""
        self._order += 1
        life = 0 if by_store else len(self.engines)
        heapq.heappush(self._heap, (max(when, self.now), self._order, life, action))

    def later(self, delay: float, action: Callable[[], object], *, by_store: bool = False) -> None:
        """Do something after a while."""
        self.at(self.now + delay, action, by_store=by_store)

    def _next(self) -> None:
        when, _, life, action = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        if life in (0, len(self.engines)) and not (life and self.link.closed):
            action()

    def run_until(self, over: Callable[[], bool]) -> None:
        """Let time pass, as somebody waits."""
        while not over():
            if not self._heap:
                self.violated("I11", "the engine waits for something that never happens")
            self._next()

    # ---- what happens

    def violated(self, invariant: str, message: str) -> None:
        """An invariant is broken: raises Violation."""
        raise Violation(invariant, f"{invariant} at {self.now - 100:.4f} s, seed {self.setup.seed}: {message}")

    def strikes(self, fault: str, odds: int) -> bool:
        """Whether a fault happens now."""
        if fault in self.setup.faults and not self.quiet and self.rng.randrange(odds) == 0:
            self.count(fault)
            return True
        return False

    def count(self, name: str, number: int = 1) -> None:
        """It happened so often."""
        self.counts[name] = self.counts.get(name, 0) + number

    def note(self, *what: object) -> None:
        """Into the trace."""
        self.num_notes += 1
        self.trace = zlib.crc32(repr(what).encode(), self.trace)

    # ---- oracles

    def salted(self, salt: str | None, weights: int | None = None) -> bytes:
        """Digest of the namespace of some weights, or those of now, under a salt, RoPE left out."""
        name = (self.weights if weights is None else weights, salt)
        if name not in self._salted:
            self._salted[name] = namespace(name[0]).digest(salt)
        return self._salted[name]

    def key_of(self, parent: bytes, tokens: tuple[int, ...]) -> bytes:
        """Key of a full block."""
        name = (parent, tokens)
        if name not in self._keys:
            self._keys[name] = key_after(parent, tokens)
        return self._keys[name]

    def know_key(self, state: int, key: bytes) -> None:
        """The block whose last KV is `state` has this key."""
        self._key_of_state[state] = key

    def check_sealed(self, save: int, entry: SaveEntry) -> None:
        """What is published is whole, and is what its key names."""
        for device in self.devices[:1]:
            contents = device.contents[entry.block]
            if min(contents) < 0:
                self.violated("I5", f"save {save} publishes block {entry.block}, which is not full")
            if self._key_of_state.get(contents[-1]) != entry.key:
                self.violated("I2", f"save {save} publishes block {entry.block} under another key than its tokens give")

    def step_hash(self, device: SimDevice, step: int, value: int) -> None:
        """I12: every rank runs a step on the same block tables."""
        if device.rank == 0:
            self._hashes[step] = value
            self.note("step", step, value)
        elif self._hashes.pop(step, value) != value:
            self.violated("I12", f"rank {device.rank} runs step {step} on other block tables than the leader")
        else:
            self._hashes[step] = value

    def begin_load(self, name: str, blocks: tuple[int, ...]) -> None:
        """An order to write into device blocks."""
        self.touched.begin_load(name, blocks)
        self._copying[name] = blocks

    def begin_save(self, name: str, blocks: tuple[int, ...]) -> None:
        """An order to read device blocks."""
        self.touched.begin_save(name, blocks)
        self._copying[name] = blocks

    def heard(self, event: Loaded | ReadEnded | Copied | Unstashed) -> None:
        """The engine learns that copies do not touch some blocks any more."""
        match event:
            case Loaded(read, count):
                self.touched.end_load(f"read {read}", self._copying[f"read {read}"][:count])
            case ReadEnded(read):
                self.touched.end_load(f"read {read}", self._copying.pop(f"read {read}", ()))
            case Unstashed(stash):
                self.touched.end_load(f"stash {stash}", self._copying.pop(f"stash {stash}", ()))
            case Copied(number):
                self.touched.end_save(f"copy {number}", self._copying.pop(f"copy {number}"))

    # ---- the schedule

    def run(self) -> EngineWorld:
        """Load and faults for so many turns, then a quiet tail in which everything must end."""
        try:
            for _ in range(self.setup.turns):
                if self.rng.randrange(4) == 0:
                    self._act()
                if self.swap_at is not None and (self.now >= self.swap_at or not self.engine.has_work):
                    self._swap()
                self._turn()
            self.swap_at = None
            self.users.submit_again([])
            if self.strikes("cancel", 2):
                self.users.cancel_all()
            self.quiet = True
            turns, end = 0, self.now + QUIET_S
            while self._turn():
                turns += 1
                if turns > QUIET_TURNS or self.now > end:
                    self.violated("I11", f"not at rest {self.now - end + QUIET_S:.0f} s after the last request")
            self._check_quiet()
        except InvariantViolation as error:
            raise Violation("I7", f"I7 at {self.now - 100:.4f} s, seed {self.setup.seed}: {error}") from error
        self.users.count_stats()
        return self

    def _act(self) -> None:
        """Something that a user or fate does."""
        choice = self.rng.randrange(100)
        if choice < 50:
            self.users.submit()
        elif choice < 60:
            for _ in range(self.rng.randrange(2, 6)):
                self.users.submit()
        elif choice < 75:
            if self.strikes("cancel", 1):
                self.users.cancel()
        elif choice < 80:
            if self.strikes("evictions", 1):
                self.store.lose_any(self.rng.randrange(1, 8))
        elif choice < 85:
            if self.strikes("rotten block", 1):
                self.store.rot_any()
        elif choice < 89:
            self.users.neighbour_publishes()
        elif choice < 90:
            self.engine.reset_prefix_cache()
        elif choice < 94 and self.strikes("store lost", 1):
            self.link.lose_store()
        elif choice >= 94 and self.strikes("weights update", 1):
            self.begin_update()

    def _turn(self) -> bool:
        """One thing: a step of the engine, or the next thing that happens below it. False: nothing ever will."""
        wait = self.engine.wait_s()
        if self.link.events or (wait is not None and wait <= 0):
            self._step()
            return True
        over = None if wait is None else self.now + wait
        if self._heap and (over is None or self._heap[0][0] <= over):
            self._next()
        elif over is not None:
            self.now = over
            self._step()
        else:
            return False
        return True

    def _step(self) -> None:
        before = (self.num_notes, self.runner.num_steps)
        self.now += STEP_S
        try:
            outputs = self.engine.step()
        except RuntimeError as error:
            if "injected" not in str(error):
                raise
            self.runner.give_up()
            outputs = self.engine.fail_all(str(error))
        except (ValueError, LookupError) as error:
            raise Violation("I14", f"I14, seed {self.setup.seed}: a step fails all its requests: {error!r}") from error
        self.users.book(outputs)
        self.engine.validate()
        self._check_clean()
        self._idle_steps = 0 if before != (self.num_notes, self.runner.num_steps) or outputs else self._idle_steps + 1
        if self._idle_steps > MOST_IDLE_STEPS:
            self.violated("I11", f"{MOST_IDLE_STEPS} steps in a row did nothing; wait_s is {self.engine.wait_s()}")

    def _check_clean(self) -> None:
        """I13: a device block that counts as copied down was said to lie below since the store was last lost."""
        blocks = self.engine.scheduler.blocks
        for block, key in enumerate(blocks._key_of if self.setup.has_tiers else ()):
            if key is not None and blocks._state_of[block] is CopyState.CLEAN and key not in self.link.told_below:
                self.violated("I13", f"block {block} counts as copied down, and nobody said that it lies below")

    def _check_quiet(self) -> None:
        """I11: requests have ended, nothing is held, all credit is back, all that could be saved is."""
        self.users.check_over()
        link, stats = self.link, self.engine.stats()
        if self.engine.has_work:
            self.violated("I11", "the engine has work, but waits for nothing")
        if link.reads or link.copies or link.reports or link.stashes:
            open_now = {
                "reads": sorted(link.reads),
                "copies": sorted(link.copies),
                "reports": sorted(link.reports),
                "stashes": sorted(link.stashes),
            }
            self.violated("I11", f"left open below: {open_now}")
        if self._copying or self.touched.steps:
            self.violated("I11", f"copies that never ended: {sorted(self._copying)}")
        if stats.kv_used or stats.overflow.used_blocks or stats.num_running or stats.num_waiting or stats.num_restoring:
            self.violated("I11", f"held after the last request: {stats}")
        if self.setup.has_tiers and link.num_lent != link.credit:
            self.violated("I8", f"{link.num_lent} slots are lent; the credit is {link.credit}")
        if self.store.lent != ({id(link): link.credit} if self.setup.has_tiers else {}):
            self.violated("I11", f"the store lends {sorted(self.store.lent.values())}; the credit is {link.credit}")
        if pins := sum(stored.pins for stored in self.store.blocks.values()):
            self.violated("I11", f"{pins} pins are left in the store")
        self.users.check_planner()


def run(setup: Setup) -> EngineWorld:
    """One schedule from its setup. Raises Violation."""
    return EngineWorld(setup).run()
