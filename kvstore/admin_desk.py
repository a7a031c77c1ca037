"""Answers queries to a running store (messages: admin.py), for server.py and local use.

Owns what happens between question and answer; payloads are read on the shell's checker thread, so clients are served
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tournant.kvstore import admin
from tournant.kvstore.admin import CopyToCheck
from tournant.kvstore.announcer import AnnouncerConfig
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import RecordRead
from tournant.kvstore.disk_io import RealDisk, opened, page_buffer
from tournant.kvstore.events import Refused, Tick
from tournant.kvstore.nvme_folder import segment_name
from tournant.kvstore.record import CODEC_NONE, RecordHeader, checksum, padded
from tournant.kvstore.record_io import Scratch, read_run
from tournant.kvstore.shell import ForClients, StoreShell, now_us
from tournant.kvstore.wire import Query

Reply = admin.Status | admin.Listed | admin.VerifiedBlocks | admin.Cleared | admin.Announcements | Refused
MAX_VERIFYING = 4  # pages of blocks being read at once


class AdminDesk:
    """See the module."""

    def __init__(self, shell: StoreShell) -> None:
        self._shell = shell
        self._verifying = 0

    def answer(self, query: Query, reply: Callable[[Reply], None], deliver: Callable[[list[ForClients]], None]) -> None:
        """Answer now, or from `pump` for a VerifyBlocks. deliver: takes what the core has to say to clients
        meanwhile.
        """
        core = self._shell.core
        if isinstance(query, admin.StatusQuery):
            reply(admin.status(core))
        elif isinstance(query, admin.ListBlocks):
            reply(admin.list_blocks(core, query))
        elif isinstance(query, admin.PollAnnouncements):
            reply(self._poll(query))
        elif isinstance(query, admin.Clear):
            blocks = core.clear()
            deliver(self._shell.handle(Tick()))
            reply(admin.Cleared(blocks))
        elif self._verifying >= MAX_VERIFYING:
            reply(Refused(f"{self._verifying} checks are running; ask again when they are done"))
        else:
            self._verify(query, reply, deliver)

    def _poll(self, query: admin.PollAnnouncements) -> admin.Announcements:
        announcer = self._shell.announce(AnnouncerConfig(query.node, query.num_shards))
        for shard, heard in query.heard:
            if shard < query.num_shards:
                announcer.heard(shard, heard)
        return admin.Announcements(tuple(announcer.poll(now_us())))

    def _verify(
        self,
        query: admin.VerifyBlocks,
        reply: Callable[[Reply], None],
        deliver: Callable[[list[ForClients]], None],
    ) -> None:
        core, memory = self._shell.core, self._shell.memory
        last, more, checks = admin.copies_to_check(core, query)
        headers = [core.tiers.header(check.copy) for check in checks]
        folder = None if self._shell.nvme is None else self._shell.nvme.folder
        in_host: list[bool] = []
        on_nvme: list[bool] = []

        def read() -> None:
            for check, header in zip(checks, headers, strict=True):
                page = -1 if check.slot is None else check.slot.page
                in_host.append(page >= 0 and checksum(memory.slot(page, header.length)) == header.checksum)
                on_nvme.append(folder is not None and check.place is not None and _record_good(folder, check, header))

        def tell() -> None:
            self._verifying -= 1
            counts = dict.fromkeys(("host_good", "host_bad", "nvme_good", "nvme_bad"), 0)
            for check, host, nvme in zip(checks, in_host, on_nvme, strict=True):
                if check.slot_unmoved:
                    counts["host_good" if host else "host_bad"] += 1
                    if not host:
                        core.check(check.copy)
                if check.place_unmoved:
                    counts["nvme_good" if nvme else "nvme_bad"] += 1
            deliver(self._shell.handle(Tick()))
            reply(admin.VerifiedBlocks(last, more, **counts))

        self._verifying += 1
        self._shell.off_loop(read, tell)


def _record_good(folder: Path, check: CopyToCheck, header: RecordHeader) -> bool:
    """Read one record in full, past the tier's queue. False also when it cannot be read."""
    place = check.place
    if place is None:
        return False
    disk = RealDisk()
    payload = page_buffer(padded(header.length) // PAGE_BYTES)
    read = RecordRead(place.segment, place.offset, place.size, header, 0)
    try:
        handle = disk.open_folder(folder)
        try:
            with opened(disk, handle, segment_name(place.segment)) as file:
                return read_run(disk, file, [read], payload, Scratch(), _NoCosts()) == [""]
        finally:
            disk.close(handle)
    except OSError:
        return False


class _NoCosts:
    """Nobody learns from these reads what a codec costs."""

    def choose(self, kv_form: str) -> int:
        """See `record_io.CodecCosts`."""
        return CODEC_NONE

    def wrote(self, *_: Any, **__: Any) -> None:
        """See `record_io.CodecCosts`."""

    def restored(self, *_: Any, **__: Any) -> None:
        """See `record_io.CodecCosts`."""
