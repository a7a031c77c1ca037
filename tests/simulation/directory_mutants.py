"""Named mutants of the directory and of the announcing side: each breaks a promise that an invariant of
directory_world.py watches.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.mutants import Mutant
from tournant.kvstore import announcer as announcer_module
from tournant.kvstore.announcer import Announcer
from tournant.kvstore.directory import GONE, HOST, NVME, Announcement, Directory, Heard
from tournant.kvstore.groups import Group
from tournant.kvstore.residency import Residency


def _untold(name: str) -> Any:
    """A method of Residency whose change nobody is told of."""
    method = getattr(Residency, name)

    def silently(residency: Residency, *args: Any) -> None:
        told, residency.on_changed = residency.on_changed, None
        try:
            method(residency, *args)
        finally:
            residency.on_changed = told

    return silently


def _any_later(node: Any, message: Announcement) -> bool:
    return bool(message.incarnation == node.incarnation and message.seq > node.seq)


def _apply_again(directory: Directory, now_us: int, message: Announcement) -> Heard:
    node = directory._nodes.get(message.node)
    if node is not None and directory._is_stale(node, message):
        for where, keys in ((HOST, message.host), (NVME, message.nvme), (GONE, message.gone)):
            directory._apply(message.node, keys, where)
    return _ANNOUNCE(directory, now_us, message)


_ANNOUNCE = Directory.announce


def _any_answer(node: Any, message: Announcement) -> bool:
    del node
    return message.answers != 0


def _begin_and_keep(directory: Directory, node: Any, message: Announcement) -> None:
    del directory
    node.incarnation, node.question = message.incarnation, 0


def _lose_the_name_only(directory: Directory, number: int) -> None:
    directory._nodes.pop(number, None)


def _nobody_expires(directory: Directory, now_us: int) -> tuple[int, ...]:
    del directory, now_us
    return ()


def _no_eviction(directory: Directory) -> None:
    del directory


def _evict_untold(directory: Directory) -> None:
    log, end = directory._log.copy(), directory._end
    _EVICT(directory)
    directory._log, directory._end = log, end


_EVICT = Directory._evict


def _everybody_is_listed(directory: Directory, old: Any, number: int, where: int) -> Any:
    del directory
    host, nvme = (tuple(sorted({*nodes} - {number})) for nodes in (old.host, old.nvme))
    if where == HOST:
        host = tuple(sorted((*host, number)))
    if where == NVME:
        nvme = tuple(sorted((*nvme, number)))
    return host, nvme


def _listed_twice(directory: Directory, old: Any, number: int, where: int) -> Any:
    host, nvme = _PLACES(directory, old, number, where)
    return host, tuple(sorted({*nvme, number})) if where == HOST and number in old.nvme else nvme


def _never_gone(directory: Directory, number: int, keys: Any, where: int) -> None:
    if where != GONE:
        _APPLY(directory, number, keys, where)


_APPLY, _PLACES = Directory._apply, Directory._places


def _positions_from_zero(directory: Directory, *args: Any) -> None:
    _INIT(directory, *args)
    directory._end = 0


_INIT = Directory.__init__


def _forget_quietly(announcer: Announcer) -> None:
    if len(announcer._changed) > announcer.config.max_changed:
        announcer._changed.clear()


def _never_trim(announcer: Announcer) -> None:
    del announcer


def _first_piece_only(announcer: Announcer, stream: Any, shard: int) -> list[bytes]:
    piece = _NEXT_OF_ALL(announcer, stream, shard)
    stream.todo = []
    return piece


_NEXT_OF_ALL = Announcer._next_of_all


def _hear_once(announcer: Announcer, shard: int, reply: Any) -> None:
    if not announcer._streams[shard].begun:
        _HEARD(announcer, shard, reply)


_HEARD = Announcer.heard


def _silent_without_changes(announcer: Announcer, *args: Any) -> None:
    _INIT_ANNOUNCER(announcer, *args)
    object.__setattr__(announcer.config, "heartbeat_us", 1 << 60)


_INIT_ANNOUNCER = Announcer.__init__


def _newest_version_only(first: Group, host: Any, nvme: Any, gone: Any) -> Any:
    del host
    return nvme if first.complete and first.on_nvme else gone


def _other_shard(key: bytes, num_shards: int) -> int:
    return (key[0] + 1) % num_shards


RESTARTS = ("store killed", "late message", "duplicated message")
LOSSES = ("dropped message",)

MUTANTS = (
    Mutant("a gap is not noticed", ("D1",), LOSSES, ((Directory, "_is_next", staticmethod(_any_later)),)),
    Mutant("an old message is applied again", ("D1", "D3"), ("duplicated message", "late message"),
           ((Directory, "announce", _apply_again),)),
    Mutant("any message may begin anew", ("D7",), RESTARTS, ((Directory, "_answers", staticmethod(_any_answer)),)),
    Mutant("entries of an earlier life of a store stay", ("D1", "D3"), RESTARTS,
           ((Directory, "_begin", _begin_and_keep),)),
    Mutant("entries of a lost node stay", ("D2",), ("node thought lost",),
           ((Directory, "node_lost", _lose_the_name_only),)),
    Mutant("a store may be silent for ever", ("D1",), ("store killed", "node dead"),
           ((Directory, "expire", _nobody_expires),)),
    Mutant("the index grows", ("D2",), (), ((Directory, "_evict", _no_eviction),)),
    Mutant("routers do not hear of what the shard forgets", ("D4",), (), ((Directory, "_evict", _evict_untold),)),
    Mutant("a node too many is listed", ("D2",), (), ((Directory, "_places", _everybody_is_listed),)),
    Mutant("a node is listed in two places", ("D2", "D3"), (), ((Directory, "_places", _listed_twice),)),
    Mutant("what is gone stays listed", ("D1",), (), ((Directory, "_apply", _never_gone),)),
    Mutant("positions begin at zero", ("D4",), ("shard killed", "router slow"),
           ((Directory, "__init__", _positions_from_zero),)),
    Mutant("an overflow is not told", ("D1",), (), ((Announcer, "trim", _forget_quietly),)),
    Mutant("changes gather without bound", ("D2",), (), ((Announcer, "trim", _never_trim),)),
    Mutant("only the first piece of everything is told", ("D1",), (),
           ((Announcer, "_next_of_all", _first_piece_only),)),
    Mutant("a shard that asks again is not heard", ("D1",), ("shard killed",), ((Announcer, "heard", _hear_once),)),
    Mutant("a store without changes says nothing", ("D1",), ("shard killed",),
           ((Announcer, "__init__", _silent_without_changes),)),
    Mutant("the newest version alone counts", ("D1", "D3"), (),
           ((announcer_module, "_slow_tier", _newest_version_only),)),
    Mutant("a chain is spread over the shards", ("D3",), (), ((announcer_module, "shard_of", _other_shard),)),
    Mutant("what moves to NVMe is not told", ("D1",), (), ((Residency, "evict", _untold("evict")),)),
    Mutant("what is dropped is not told", ("D1",), (), ((Residency, "drop", _untold("drop")),)),
    Mutant("what comes into the pool is not told", ("D1",), (), ((Residency, "entered", _untold("entered")),)),
)  # fmt: skip
