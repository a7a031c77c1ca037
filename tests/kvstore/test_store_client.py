"""What clients see of a store, the same behind a socket and in one process."""

from __future__ import annotations

import mmap
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kvstore.store_harness import (
    HALVES,
    PATIENCE_S,
    READER,
    SLOT,
    WEIGHTS,
    WHOLE,
    Store,
    entry,
    keys,
    payload,
    read,
    write,
    writer,
)
from tournant.kvstore.admin import BlockLine, Clear, ListBlocks
from tournant.kvstore.block import Version
from tournant.kvstore.client import Lent, StoreClient, connect
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreConfigError, StoreUnavailable
from tournant.kvstore.events import AdoptEntry, Fetched, Opened, Reported
from tournant.kvstore.groups import Handle
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.read_group import Answer, choose
from tournant.kvstore.record import checksum
from tournant.kvstore.slots import SlotState
from tournant.kvstore.wire import WireError


def opened(client: StoreClient, chain: list[bytes]) -> list[Handle]:
    """Handles of the first version of each key, of a store with one part."""
    _, answer = client.open(chain)
    return [handles[0] for handles in answer.handles()]


def test_what_was_written_is_read(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=8))
    assert rank.credit == 8
    chain = keys(20)
    assert write(rank, chain) == 20
    assert rank.credit == 8, "credit is filled again with each report"
    versions = read(rank, [*chain, b"?" * 32, *chain])
    assert versions == [Version(rank.identity.writer_id, counter) for counter in range(1, 21)]
    assert read(store.attach(READER), chain) == versions


def test_blocks_of_two_ranks_are_visible_once_both_have_reported(store: Store) -> None:
    store.start()
    ranks = [store.attach(writer(part=part, parts=HALVES, writer_id=77)) for part in HALVES]
    reader = store.attach(READER)
    chain = keys(8)
    write(ranks[0], chain)
    assert read(reader, chain, HALVES) == []
    write(ranks[1], chain)
    assert len(read(reader, chain, HALVES)) == 8
    assert read(reader, chain) == [], "parts cut otherwise are not taken"


def test_replies_to_posted_reports_are_collected_later(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=4))
    chain = keys(4)
    for counter, key in enumerate(chain, start=1):
        one = entry(rank, key, counter)
        assert one is not None
        assert rank.post([one]) == counter
    collected = []
    while len(collected) < 4:
        collected += rank.collect()
    assert [reply.seq for reply in collected] == [1, 2, 3, 4]
    assert rank.credit == 4
    assert len(read(rank, chain)) == 4


def test_many_reads_and_reports_are_under_way_at_once(store: Store) -> None:
    store.start(host_bytes=64 * SLOT, nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    rank = store.attach(writer(credit=4))
    chains = [keys(8, str(number)) for number in range(10)]
    for number, chain in enumerate(chains):
        write(rank, chain, first=100 * number + 1)
        store.wait_for_disk()
    reads = {rank.start_open(chain): chain for chain in chains[:3]}
    one = entry(rank, keys(1, "posted")[0], 5000)
    assert one is not None
    seq = rank.post([one])
    assert rank.num_lent == rank.credit == 3
    other, answer = rank.open(chains[9])  # what waits beside others loses none of their answers
    assert len(answer.counts) == 8
    fetched: dict[int, Fetched] = {}
    kinds: list[type] = []
    end = time.monotonic() + PATIENCE_S
    while len(fetched) < 3 or Reported not in kinds:
        assert time.monotonic() < end
        for message in rank.take():
            kinds.append(type(message))
            if isinstance(message, Opened):
                picks = choose([Answer(message.counts, message.rows, message.parts)], [WHOLE])
                rank.start_fetch(message.read, [pick.version for pick in picks])
            elif isinstance(message, Fetched):
                fetched[message.read] = message
            else:
                assert message.seq == seq
    assert rank.credit == 4
    for read_number, message in fetched.items():
        chain = reads[read_number]
        handles = [found[0] for found in Answer(message.counts, message.rows, message.parts).handles()]
        targets = [memoryview(bytearray(SLOT)) for _ in handles]
        assert rank.copy_out(chain, handles, targets) == 8
        for key, handle, target in zip(chain, handles, targets, strict=True):
            assert target == payload(key, handle.version, WHOLE)
        rank.close_read(read_number)
    rank.close_read(other)
    assert rank.take() == []
    found = store.wait_for(lambda found: found.open_reads == 0)
    assert (found.pinned_pages, found.host_hits + found.nvme_hits) == (0, 24)
    assert found.nvme_hits > 0


def test_a_slot_that_is_put_back_can_be_taken_again(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=1))
    lent = rank.take_slot()
    assert lent is not None
    assert rank.take_slot() is None
    rank.put_back(lent)
    rank.put_back(lent)
    assert rank.credit == rank.num_lent == 1
    assert rank.take_slot() == lent


def test_a_client_that_does_not_wait_keeps_what_has_no_room(served: Store) -> None:
    served.start()
    assert served.process is not None
    rank = connect(served.socket, writer(), PATIENCE_S, waits=False)
    chain = keys(4)
    write(rank, chain)
    served.process.process.send_signal(signal.SIGSTOP)
    while not rank.has_unsent:
        rank.used(keys(2000))
    reads = [rank.start_open(chain) for _ in range(3)]
    assert rank.take() == []
    assert rank.has_unsent
    served.process.process.send_signal(signal.SIGCONT)
    opened_reads: list[int] = []
    while len(opened_reads) < 3:
        assert select.select([rank.fileno()], [rank.fileno()] if rank.has_unsent else [], [], PATIENCE_S) != (
            [],
            [],
            [],
        )
        opened_reads += [message.read for message in rank.take() if isinstance(message, Opened)]
    assert opened_reads == reads
    assert not rank.has_unsent
    rank.close()


def test_a_chain_of_max_keys_is_answered_and_one_more_ends_the_service(served: Store) -> None:
    served.start(max_keys=3000, max_reads=2)
    rank = served.attach(writer())
    chain = keys(3000)
    write(rank, chain[:100])
    number, answer = rank.open(chain)
    assert len(answer.counts) == 100
    rank.open(chain)
    with pytest.raises(StoreUnavailable, match="read 3 of 3000 keys exceeds the limits"):
        rank.open(chain)
    again = served.attach(writer())
    with pytest.raises(StoreUnavailable, match="read 1 of 3001 keys exceeds the limits"):
        again.open([*chain, b"x" * 32])
    assert number == 1


def test_only_slots_that_are_lent_can_be_reported(store: Store) -> None:
    store.start()
    rank, other = store.attach(writer()), store.attach(writer())
    good = entry(rank, keys(1)[0], 1)
    assert good is not None
    foreign = entry(other, keys(2)[1], 1)
    assert foreign is not None
    stale = replace(good, generation=good.generation + 1)
    stolen = replace(foreign, version=good.version)
    assert rank.publish([stale, stolen, good, good]).refused == (0, 1, 3)
    assert len(read(rank, keys(1))) == 1


@pytest.mark.parametrize("length", [SLOT + 1, 5 * SLOT, SLOT - PAGE_BYTES, 0])
def test_a_payload_that_does_not_fit_its_slot_is_refused_and_touches_nothing(store: Store, length: int) -> None:
    store.start()
    rank = store.attach(writer(credit=2))
    before = bytes(rank.memory.pool[: 8 * SLOT])
    with pytest.raises(ValueError, match=f"payload has {length} bytes; for slot_bytes of {SLOT} it must have 4097 to"):
        rank.write(keys(1)[0], Version(rank.identity.writer_id, 1), b"x" * length)
    assert bytes(rank.memory.pool[: 8 * SLOT]) == before
    assert rank.credit == 2
    with pytest.raises(ValueError, match=f"{SLOT + 1} bytes of a slot"):
        rank.slot_view(0, SLOT + 1)
    shortest = rank.write(keys(1)[0], Version(rank.identity.writer_id, 1), memoryview(bytes(PAGE_BYTES + 1)))
    assert shortest is not None
    assert rank.publish([shortest]).refused == ()


def test_slots_of_refused_entries_can_be_written_again(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=3))
    chain = keys(4)
    first, second = entry(rank, chain[0], 1), entry(rank, chain[1], 2)
    assert first is not None
    assert second is not None
    stolen = replace(first, version=Version(1 << 50, 1))
    reply = rank.publish([stolen, second, stolen, replace(second, generation=99)])
    assert reply.refused == (0, 2, 3)
    assert rank.credit == 3, "each slot once: the refused one, the new one, and the one never used"
    rank.post([stolen])
    assert rank.credit == 2
    assert rank.publish([first]).refused == (), "the entry is put right and reported again"
    assert rank.credit == 3
    rank.publish([stolen], [Lent(first.page, first.generation)])
    assert rank.credit == 3
    assert write(rank, chain[2:], first=10) == 2
    assert len(read(rank, chain)) == 4
    assert store.pages(SlotState.LENT) == 3 * SLOT // PAGE_BYTES


def test_an_entry_that_is_none_is_named_before_anything_is_sent(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=1))
    chain = keys(2)
    entries = [entry(rank, key, counter) for counter, key in enumerate(chain, start=1)]
    with pytest.raises(TypeError, match="entry 1 is None"):
        rank.publish(entries)  # type: ignore[arg-type]
    assert rank.publish(entries[:1]).refused == ()  # type: ignore[arg-type]
    assert len(read(rank, chain)) == 1


def test_the_short_last_chunk_is_used(store: Store) -> None:
    store.start(host_bytes=20 * SLOT, chunk_bytes=16 * SLOT)
    rank = store.attach(writer(credit=2))
    chain = keys(18)
    assert write(rank, chain) == 18
    assert len(read(rank, chain[:9])) == 9
    assert len(read(rank, chain[9:])) == 9, "18 blocks and 2 lent slots fill the pool"


def test_released_slots_are_lent_again(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=2))
    slots = [rank.take_slot(), rank.take_slot()]
    assert rank.take_slot() is None
    rank.publish([], [slot for slot in slots if slot is not None])
    assert rank.credit == 2
    assert store.pages(SlotState.LENT) == 2 * SLOT // PAGE_BYTES


def test_a_handle_is_not_current_once_its_slot_is_reused(store: Store) -> None:
    store.start(host_bytes=16 * SLOT)
    rank = store.attach(writer(credit=4))
    chain = keys(8)
    write(rank, chain)
    handles = opened(rank, chain[:1])
    rank.close_read(1)
    assert rank.current(handles[0])
    write(rank, keys(32, "others"), first=100)
    assert not rank.current(handles[0])
    target = memoryview(bytearray(SLOT))
    assert rank.copy_out(chain[:1], handles, [target]) == 0
    assert rank.num_moved == 1
    assert rank.num_bad == 0


def test_bytes_that_are_wrong_are_told_and_dropped(store: Store) -> None:
    store.start()
    rank = store.attach(writer())
    chain = keys(4)
    write(rank, chain)
    handles = opened(rank, chain)
    rank.memory.slot(handles[2].page, SLOT)[17] ^= 1
    targets = [memoryview(bytearray(SLOT)) for _ in chain]
    assert rank.copy_out(chain, handles, targets) == 2
    assert rank.num_bad == 1
    rank.close_read(1)
    store.wait_for(lambda found: found.corrupt == 1)
    assert len(read(rank, chain)) == 2


def test_a_good_block_cannot_be_dropped_by_calling_it_bad(store: Store) -> None:
    store.start()
    rank = store.attach(writer())
    chain = keys(1)
    write(rank, chain)
    (handle,) = opened(rank, chain)
    assert rank.intact(chain[0], handle)
    rank.bad(chain[0], handle)
    rank.close_read(1)
    assert len(read(rank, chain)) == 1


def test_a_forgotten_version_is_gone(store: Store) -> None:
    store.start()
    rank = store.attach(writer())
    chain = keys(3)
    write(rank, chain)
    rank.forget(chain[1], Version(rank.identity.writer_id, 2))
    assert len(read(rank, chain)) == 1


def test_hard_pinned_blocks_stay_until_unpinned(store: Store) -> None:
    store.start(host_bytes=16 * SLOT)
    rank = store.attach(writer(credit=2))
    chain = keys(2)
    write(rank, chain)
    refs = [(key, Version(rank.identity.writer_id, counter)) for counter, key in enumerate(chain, start=1)]
    assert rank.hard_pin([*refs, (b"?" * 32, Version(1, 1))]) is None, "all or none"
    pinned = rank.hard_pin(refs)
    assert pinned is not None
    request, answer = pinned
    handles = [found[0] for found in answer.handles()]
    write(rank, keys(50, "others"), first=100)
    for key, handle in zip(chain, handles, strict=True):
        assert rank.intact(key, handle)
    rank.hard_unpin(request)
    write(rank, keys(50, "more"), first=1000)
    assert not rank.current(handles[0])


def test_a_pool_that_the_machine_does_not_have_is_refused(store: Store) -> None:
    with pytest.raises(StoreConfigError, match="ask for less"):
        store.start(host_bytes=1 << 44)


def test_a_closed_client_says_so(store: Store) -> None:
    store.start()
    rank = store.attach(writer())
    rank.close()
    rank.close()
    for call in (lambda: rank.open(keys(1)), lambda: rank.publish([]), lambda: rank.close_read(1)):
        with pytest.raises(StoreUnavailable, match="it was closed"):
            call()


def test_what_has_no_form_on_the_wire_is_told_before_it_is_sent(served: Store) -> None:
    served.start()
    rank = served.attach(writer())
    one = entry(rank, keys(1)[0], 1)
    assert one is not None
    with pytest.raises(WireError):
        rank.publish([replace(one, length=1 << 40)])
    assert rank.publish([one]).refused == ()


def test_blocks_come_back_from_nvme(store: Store) -> None:
    store.start(host_bytes=32 * SLOT, nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    rank = store.attach(writer(credit=4))
    chain = keys(64)
    for start in range(0, 64, 8):
        write(rank, chain[start : start + 8], first=start + 1)
        store.wait_for_disk()
    number, answer = rank.open(chain)
    assert len(answer.counts) == 52, "soft pins hold half of the pool at most: 16 blocks, and all that lie on NVMe"
    on_nvme = [handles[0] for handles in answer.handles() if handles[0].generation == 0]
    assert len(on_nvme) == 36
    rank.close_read(number)
    for start in range(0, 64, 8):
        assert len(read(rank, chain[start : start + 8])) == 8
    assert store.status().loaded >= 32
    checked = store.verify()
    assert (checked.nvme_good, checked.host_bad, checked.nvme_bad) == (64, 0, 0)


def test_a_restart_finds_what_lies_on_nvme(store: Store) -> None:
    tier = {"nvme": NvmeConfig(), "nvme_bytes": 8 << 20, "segment_bytes": 1 << 20}
    store.start(**tier)
    rank = store.attach(writer())
    chain = keys(40)
    write(rank, chain)
    old = rank.incarnation
    store.stop()
    with pytest.raises(StoreUnavailable):
        rank.open(chain)
    store.start(**tier)
    assert store.status().adopted == 40
    reader = store.attach(READER)
    assert reader.incarnation != old
    assert [version.counter for version in read(reader, chain)] == list(range(1, 41))


def test_admin_queries(store: Store) -> None:
    store.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    rank = store.attach(writer())
    chain = keys(5)
    write(rank, chain)
    store.wait_for_disk()
    listed = store.ask(ListBlocks(0))
    assert not listed.more
    wanted = [
        BlockLine(key, rank.identity.writer_id, n, 1, SLOT, 0, host=1, nvme=1, pins=0, heat=0)
        for n, key in enumerate(chain, start=1)
    ]
    assert list(listed.lines) == wanted
    (handle, *_) = opened(rank, chain)
    rank.memory.slot(handle.page, SLOT)[0] ^= 1
    checked = store.verify()
    assert (checked.host_good, checked.host_bad, checked.nvme_good, checked.nvme_bad) == (4, 1, 5, 0)
    store.wait_for(lambda found: found.corrupt == 1)
    assert store.ask(Clear()).blocks == 4
    found = store.wait_for(lambda found: found.nvme_segments == 0)
    assert (found.blocks, found.nvme_records, found.nvme_used_bytes) == (0, 0, 0)
    rank.close_read(1)
    assert read(rank, chain) == []
    assert write(rank, keys(5, "after"), first=100) == 5
    assert not [path for path in store.nvme_folder.iterdir() if path.name.startswith("segment-0000000000000001")]


def test_a_slot_that_changes_during_its_copy_is_not_accepted(store: Store) -> None:
    store.start()
    rank = store.attach(writer())
    chain = keys(2)
    write(rank, chain)
    handles = opened(rank, chain)
    target = memoryview(bytearray(2 * SLOT))
    assert rank.copy_out(chain[:1], handles[:1], [target]) == 1
    assert target[:SLOT] == payload(chain[0], handles[0].version, WHOLE)

    def copy(target: memoryview, source: memoryview) -> None:
        target[:] = source
        source[SLOT - 1] ^= 1

    assert rank.copy_out(chain[1:], handles[1:], [target], copy) == 0
    assert rank.num_bad == 1


def test_clients_cannot_change_generations(served: Store) -> None:
    served.start()
    rank = served.attach(writer())
    with pytest.raises(TypeError, match="read-only"):
        rank.memory.generations[0] = 5
    view = rank.slot_view(0)
    rank.close()
    assert len(view) == SLOT, "what still looks at the pool keeps it mapped"
    assert isinstance(view.obj, mmap.mmap)


def test_releasing_what_is_not_lent_changes_nothing(store: Store) -> None:
    store.start()
    rank = store.attach(writer(credit=2))
    rank.publish([], [Lent(0, 99), Lent(12345, 1)])
    assert rank.credit == 2
    assert store.pages(SlotState.LENT) == 2 * SLOT // PAGE_BYTES


def test_choose_takes_versions_of_what_was_opened(store: Store) -> None:
    store.start()
    first, second = store.attach(writer()), store.attach(writer())
    chain = keys(3)
    write(first, chain)
    write(second, chain[:2])
    _, answer = first.open(chain)
    writers = [pick.version.writer_id for pick in choose([answer], [WHOLE])]
    assert writers == [second.identity.writer_id, second.identity.writer_id, first.identity.writer_id]


def test_what_a_request_used_leaves_last(store: Store) -> None:
    store.start(host_bytes=16 * SLOT)
    rank = store.attach(writer(credit=2))
    first, second = keys(6, "first"), keys(6, "second")
    write(rank, first)
    write(rank, second, first=100)
    rank.used(first)
    write(rank, keys(5, "others"), first=200)
    assert len(read(rank, first)) == 6
    assert len(read(rank, second)) < 6


def test_parts_from_elsewhere_are_adopted(tmp_path: Path) -> None:
    store = Store("local", tmp_path).start()
    assert store.local is not None
    version = Version(1 << 60, 5)
    payloads = [payload(key, version, WHOLE) for key in keys(3)]
    entries = [
        AdoptEntry(key, version, WHOLE, WEIGHTS, "bf16", SLOT, checksum(data))
        for key, data in zip(keys(3), payloads, strict=True)
    ]
    store.local.shell.adopt(entries, payloads)
    assert read(store.attach(READER), keys(3)) == [version] * 3
    store.close()
