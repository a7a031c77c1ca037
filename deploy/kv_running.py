"""`tournant kv` on a running store: asks over its socket and prints the answers.

Owns the words on the screen; the queries are kvstore/admin.py's. Every question has a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import cast

import typer

from tournant.kvstore.admin import Clear, Cleared, ListBlocks, Listed, Status, StatusQuery, VerifiedBlocks, VerifyBlocks
from tournant.kvstore.client import ask
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.slots import SlotState

ASK_S = 30.0


def answers(socket: Path) -> bool:
    """Whether a store runs behind a socket."""
    try:
        ask(socket, StatusQuery(), ASK_S)
    except (StoreUnavailable, StoreRefused):
        return False
    return True


def print_status(socket: Path) -> None:
    """One line per fact. Raises StoreUnavailable, StoreRefused, as all of these."""
    status = cast(Status, ask(socket, StatusQuery(), ASK_S))
    typer.echo(f"socket {socket}")
    for state, pages in status.pages:
        typer.echo(f"host_{SlotState(state).name.lower()}_bytes {pages * PAGE_BYTES}")
    for field in fields(Status):
        value = getattr(status, field.name)
        if field.name == "incarnation":
            typer.echo(f"incarnation {value:016x}")
        elif field.name.endswith("_pages"):
            typer.echo(f"{field.name.removesuffix('_pages')}_bytes {value * PAGE_BYTES}")
        elif field.name != "pages":
            typer.echo(f"{field.name} {value}")


def print_blocks(socket: Path, *, lines: bool) -> None:
    """What is in the store; one line per block if wanted."""
    blocks = size = in_host = on_nvme = 0
    for page in _pages_of_blocks(socket):
        for line in page.lines:
            blocks += 1
            size += line.length
            in_host += line.host
            on_nvme += line.nvme
            if lines:
                tiers = (
                    "+".join(name for name, there in (("host", line.host), ("nvme", line.nvme)) if there) or "partial"
                )
                typer.echo(
                    f"{line.key.hex()[:16]} {line.writer_id:016x}.{line.counter} {tiers} {line.parts} parts, "
                    f"{line.length} bytes, depth {line.depth}, pins {line.pins}, heat {line.heat}"
                )
    typer.echo(f"{blocks} blocks of {size} bytes; {in_host} in host slots, {on_nvme} on NVMe")


def _pages_of_blocks(socket: Path) -> Iterator[Listed]:
    page = Listed(0, True, ())
    while page.more:
        page = cast(Listed, ask(socket, ListBlocks(page.after), ASK_S))
        yield page


def verify_blocks(socket: Path) -> bool:
    """Have every block checked in every tier; whether all were good. The store drops what is bad."""
    sums = dict.fromkeys(("host_good", "host_bad", "nvme_good", "nvme_bad"), 0)
    page = VerifiedBlocks(0, True, 0, 0, 0, 0)
    while page.more:
        page = cast(VerifiedBlocks, ask(socket, VerifyBlocks(page.after), ASK_S))
        for name in sums:
            sums[name] += getattr(page, name)
    typer.echo(
        f"host slots: {sums['host_good']} parts verified, {sums['host_bad']} corrupt; "
        f"NVMe: {sums['nvme_good']} verified, {sums['nvme_bad']} corrupt"
    )
    return not sums["host_bad"] and not sums["nvme_bad"]


def clear_blocks(socket: Path) -> None:
    """Forget every block."""
    cleared = cast(Cleared, ask(socket, Clear(), ASK_S))
    typer.echo(f"{cleared.blocks} blocks forgotten")
