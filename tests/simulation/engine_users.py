"""The users of the simulated engine: what they ask, what they must get (I14), and other engines that publish the same.

Documents are prefixes that requests share; sessions return with what they got and a little more. The right answer to a
request is worked out without any engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.engine_device import VOCAB, Row, first_state, logprob_of, next_state, sampled
from tournant.kvstore.block import Version, key_chain
from tournant.workers.messages import EngineRequest, RequestOutput, TierStats, TokenLogprobs
from tournant.workers.overflow_blocks import OverflowBlocks
from tournant.workers.restores import ReadState
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from tests.simulation.engine_world import EngineWorld

MOST_OPEN = 8  # requests at a time
NEIGHBOUR = 1 << 62  # writer id of other engines


@dataclass(eq=False, slots=True)
class Ask:
    """A request, what each of its answers must be and is so far. over: by answer; ended: cancelled as a whole."""

    request: EngineRequest
    wanted: list[list[int]]
    got: list[list[int]]
    over: list[str | None]
    cached: list[bool] = field(default_factory=list)
    ended: bool = False
    delivered: bool = False


class Users:
    """See the module."""

    def __init__(self, world: EngineWorld) -> None:
        rng = world.rng
        self.world = world
        self.limit = world.setup.most_tokens
        self.asks: dict[int, Ask] = {}
        self.documents = [[rng.randrange(VOCAB) for _ in range(self.limit)] for _ in range(3)]
        self.sessions: list[list[int]] = []
        self.waiting: list[tuple[list[int], SamplingParams, str | None]] = []  # while the weights are changed
        self._published = 0
        for _ in range(rng.randrange(5)):
            self.neighbour_publishes()

    # ---- asking

    def submit(self) -> None:
        """A request of some kind, unless many wait already."""
        if sum(not ask.ended and None in ask.over for ask in self.asks.values()) >= MOST_OPEN:
            return
        rng, limit = self.world.rng, self.limit
        if self.sessions and rng.randrange(2):
            prompt = list(rng.choice(self.sessions))
            prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        else:
            prompt = self.documents[rng.randrange(3)][: rng.randrange(1, max(2, limit * 3 // 4))]
            if rng.randrange(2):
                prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
        prompt = prompt[: limit - 1]
        room = limit - len(prompt)
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            seed=rng.randrange(50),
            max_tokens=min(room, rng.choice((0, 1, 4, 12, 30, 30))) if room else 0,
            ignore_eos=True,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 4)),
            prompt_logprobs=0 if rng.randrange(12) == 0 else None,
        )
        if self.world.swap_at is not None:
            self.waiting.append((prompt, params, rng.choice((None, None, None, "a"))))
            return
        self._ask(prompt, params, rng.choice((None, None, None, "a")))

    def _ask(self, prompt: list[int], params: SamplingParams, salt: str | None) -> None:
        number = len(self.asks) + 1
        rng = self.world.rng
        keys, digest = self._frontend_keys(prompt, salt)
        request = EngineRequest(number, prompt, params, keys, digest, salt, rng.choice((0, 0, 0, -1, 2)))
        wanted = [self._right_answer(request, index) for index in range(params.n)]
        self.asks[number] = Ask(request, wanted, [[] for _ in wanted], [None] * params.n)
        self.world.count("requests")
        self.world.note("submit", number, len(prompt), params.n)
        self.book(self.world.engine.add_request(request))

    def _frontend_keys(self, prompt: list[int], salt: str | None) -> tuple[list[bytes], bytes]:
        """What a frontend sends along: nothing, the right keys, or right keys of another namespace."""
        choice = self.world.rng.randrange(4)
        if choice > 1:
            return [], b""
        digest = self.world.salted(salt if choice else "of another namespace")
        return key_chain(digest, prompt, self.world.setup.block_tokens), digest

    # ---- other weights

    def count_under_way(self) -> None:
        """What an update cuts off."""
        world, open_now = self.world, [ask for ask in self.asks.values() if not ask.ended and None in ask.over]
        scheduler = world.engine.scheduler
        doing = {self._doing(ask) for ask in open_now}
        link = world.link
        for name, is_so in (
            ("prefill", any(one.num_computed < len(one.request.token_ids) for one in scheduler.running)),
            ("decode", any(one.num_computed >= len(one.request.token_ids) for one in scheduler.running)),
            ("lookup", "looking" in doing),
            ("fetch", "fetching" in doing),
            ("load", any(reading.load is not None for reading in link.reads.values())),
            ("copy", bool(link.copies)),
            ("report", bool(link.reports)),
            ("stash", bool(link.stashes)),
        ):
            world.count(f"update during {name}", int(is_so))

    def withdraw(self) -> list[Ask]:
        """The engine is about to end: who has had something of an answer gets an error, all others are returned."""
        again = []
        for number, ask in self.asks.items():
            if ask.ended or None not in ask.over:
                continue
            self.world.engine.abort(number)
            if self.has_delivered(ask):
                ask.ended = True
                self.world.count("cut off by an update")
            else:
                again.append(ask)
        return again

    def has_delivered(self, ask: Ask) -> bool:
        """Whether who asked may have seen something."""
        return ask.delivered

    def submit_again(self, again: list[Ask]) -> None:
        """To the engine of now: first those that were inside, with the keys that they had, then those that waited."""
        for ask in again:
            self.world.count("submitted again")
            ask.over = [None] * len(ask.over)
            ask.wanted = [self._right_answer(ask.request, index) for index in range(len(ask.wanted))]
            self.book(self.world.engine.add_request(ask.request))
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            self._ask(*one)

    def cancel(self) -> None:
        """A user leaves, or one answer of several is not wanted any more."""
        alive = [ask for ask in self.asks.values() if not ask.ended and None in ask.over]
        if not alive:
            return
        rng = self.world.rng
        busy = [ask for ask in alive if self._doing(ask) not in ("waiting", "running")]
        ask = rng.choice(busy if busy and rng.randrange(3) else alive)
        number = ask.request.request_id
        index = rng.randrange(len(ask.over))
        self.world.note("cancel", number)
        self.world.count(f"cancel {self._doing(ask)}")
        if len(ask.over) > 1 and rng.randrange(2):
            if ask.over[index] is None:
                ask.over[index] = "abort"
            self.world.engine.abort_answer(number, index)
        else:
            ask.ended = True
            self.world.engine.abort(number)

    def cancel_all(self) -> None:
        """Everybody leaves."""
        for number, ask in self.asks.items():
            if not ask.ended and None in ask.over:
                self.world.count(f"cancel {self._doing(ask)}")
                ask.ended = True
                self.world.engine.abort(number)

    def _doing(self, ask: Ask) -> str:
        """What the first answer of a request that goes on is doing."""
        sequences = self.world.engine._sequences.get(ask.request.request_id)
        if sequences is None:
            return "nowhere"
        sequence: Sequence = sequences[ask.over.index(None)]
        tiers = self.world.engine.scheduler.tiers
        if tiers is None or sequence.state is not SequenceState.WAITING:
            return sequence.state.value
        if sequence in tiers.stashes._of:
            return "stashed"
        read = tiers.restores._of.get(sequence)
        if read is not None and read.state is not ReadState.NOTHING:
            return read.state.value
        return "preempted" if sequence.num_preemptions else "waiting"

    # ---- answers

    def _state_after(self, tokens: list[int], salt: str | None, offset: int, states: list[int] | None = None) -> int:
        state = first_state(self.world.salted(salt))
        for token in tokens:
            state = next_state(state, token, offset)
            if states is not None:
                states.append(state)
        return state

    def _offset(self, num_tokens: int) -> int:
        switch = self.world.setup.rope_switch
        return 4096 if 0 < switch < num_tokens else 0

    def _right_answer(self, request: EngineRequest, index: int) -> list[int]:
        """Tokens of an answer, worked out from the prompt alone."""
        params, tokens, out = request.params, list(request.token_ids), []
        offset = self._offset(len(tokens))
        state = self._state_after(tokens, request.cache_salt, offset)
        while len(out) < (params.max_tokens or 0):
            token = sampled(state, params.seed or 0, index)
            out.append(token)
            tokens.append(token)
            if token in params.stop_token_ids:
                break
            if self._offset(len(tokens)) != offset:
                offset = self._offset(len(tokens))
                state = self._state_after(tokens, request.cache_salt, offset)
            else:
                state = next_state(state, token, offset)
        return out

    def _right_logprobs(self, request: EngineRequest) -> list[TokenLogprobs | None]:
        tokens, states = request.token_ids, list[int]()
        self._state_after(tokens, request.cache_salt, self._offset(len(tokens)), states)
        return [None, *(logprob_of(state, token) for state, token in zip(states, tokens[1:], strict=False))]

    def book(self, outputs: list[RequestOutput]) -> None:
        """I14: every output continues its answer as the model alone would."""
        for out in outputs:
            ask = self.asks[out.request_id]
            self.world.note("out", out.request_id, out.index, out.token_ids, out.finish_reason)
            if ask.ended or ask.over[out.index] is not None:
                self.world.violated("I14", f"an output after the end of request {out.request_id}: {out}")
            got, wanted = ask.got[out.index], ask.wanted[out.index]
            ask.delivered = True
            got += out.token_ids
            if got != wanted[: len(got)]:
                self.world.violated("I14", f"request {out.request_id} answers {got}, which should be {wanted}")
            self._check_first(ask, out)
            if out.finish_reason is not None:
                self._end(ask, out)

    def _check_first(self, ask: Ask, out: RequestOutput) -> None:
        if out.cached_tokens is not None:
            tiers = out.cached_by_tier or (0, 0, 0)
            self.world.count("restored", int(sum(tiers[1:]) > 0))
            if out.cached_by_tier is not None and sum(tiers) != out.cached_tokens:
                self.world.violated("I14", f"{out.cached_tokens} tokens are said to be cached, by tier {tiers}")
            if out.index == 0 and ask.request.params.prompt_logprobs is not None and out.finish_reason != "error":
                if out.prompt_logprobs != self._right_logprobs(ask.request):
                    self.world.violated("I14", f"request {out.request_id} has wrong prompt log-probabilities")
                self.world.count("prompt_logprobs")

    def _end(self, ask: Ask, out: RequestOutput) -> None:
        ask.over[out.index] = out.finish_reason
        got, wanted = ask.got[out.index], ask.wanted[out.index]
        if out.finish_reason == "error":
            if str(out.error).startswith("KV that lay below") and "lost below" in self.world.setup.faults:
                self.world.count("given up after losses")
            elif "injected" not in str(out.error):
                self.world.violated("I14", f"request {out.request_id} fails: {out.error}")
            return
        stopped = bool(wanted) and wanted[-1] in ask.request.params.stop_token_ids
        if got != wanted or out.finish_reason != ("stop" if stopped else "length"):
            self.world.violated("I14", f"request {out.request_id} ends by {out.finish_reason} with {got} of {wanted}")
        self.world.count("answered")
        self.sessions.append([*ask.request.token_ids, *got])
        if len(self.sessions) > 6:
            self.sessions.pop(0)

    # ---- other engines

    def neighbour_publishes(self) -> None:
        """Another engine has computed a document or a session, and the store has its blocks now."""
        world, size = self.world, self.world.setup.block_tokens
        tokens = world.rng.choice(self.documents + self.sessions)
        tokens = tokens[: size * world.rng.randrange(1, len(tokens) // size + 2)]
        switch = world.setup.rope_switch
        if 0 < switch < len(tokens):
            return
        weights = world.rng.randrange(2) if "weights update" in world.setup.faults else world.weights
        row = Row(0, 0, list(tokens), first_state(world.salted(None, weights)))
        row.extend(len(tokens), 0)
        parent = world.salted(None, weights)
        for start in range(0, len(tokens) - size + 1, size):
            parent = world.key_of(parent, tuple(tokens[start : start + size]))
            states = tuple(row.states[start : start + size])
            world.know_key(states[-1], parent)
            self._published += 1
            world.store.put(parent, Version(NEIGHBOUR, self._published), (states,) * world.setup.ranks)

    # ---- the end

    def check_over(self) -> None:
        """I11: every request that was not cancelled has ended."""
        left = [number for number, ask in self.asks.items() if not ask.ended and None in ask.over]
        if left:
            self.world.violated("I11", f"requests {left} have not ended")

    def check_planner(self) -> None:
        """I11: the engine counts the credit as the link does, has copied down what it could, and can forget all."""
        tiering, link = self.world.engine.scheduler.tiers, self.world.link
        if tiering is not None:
            stats = self.world.engine.stats().tiers
            credit = tiering._group.credits[0]
            if link.attached and credit != link.free:
                self.world.violated("I8", f"the engine counts {credit} lent slots; {link.free} are")
            if link.attached != bool(stats.attached):
                self.world.violated("I11", f"the engine thinks attached is {stats.attached}")
            if link.attached and (stats.dirty_blocks or not tiering.is_settled):
                self.world.violated("I11", f"{stats.dirty_blocks} blocks stay dirty although nothing else is to do")
        if self.world.setup.caching and not self.world.engine.reset_prefix_cache():
            self.world.violated("I11", "the prefix cache cannot be reset although nothing is in use")
        blocks = self.world.engine.scheduler.blocks
        halves = [blocks, blocks.below] if isinstance(blocks, OverflowBlocks) else [blocks]
        if self.world.setup.caching and any(half.num_reusable for half in halves):
            self.world.violated("I11", "the prefix cache was reset and still has blocks")

    def count_stats(self) -> None:
        """For I15: what the engine says it did."""
        stats = self.world.engine.stats()
        self.world.count("preemptions", stats.num_preemptions)
        for name in TierStats.__slots__:
            value = getattr(stats.tiers, name)
            if isinstance(value, int):
                self.world.count(name, value)
