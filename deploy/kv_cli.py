"""`tournant kv`: what is in a running block store or lies in a folder of one, and how I/O orders serve a queue.

Owns flags, printing and exit codes; the work is kvstore's. Folders are locked while they are read, so a running store
keeps these commands out of its own: ask it through its socket (kv_running.py). Commands that change nothing find the
stores of this user by themselves.

Exit codes: 0 done, 1 damage found or the folder cannot be used, 2 wrong arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from tournant.cluster.run_folder import store_sockets, temporary_folder
from tournant.deploy import kv_running
from tournant.kvstore import nvme_folder
from tournant.kvstore.disk_events import RecordAt
from tournant.kvstore.disk_io import FolderRefused
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.io_trace import Replay, TraceError, compare, parse_trace
from tournant.kvstore.nvme_folder import FolderReport, segment_name
from tournant.kvstore.record import CODEC_NAMES, Stored

MAX_TRACE_BYTES = 64 << 20
SHOWN_REQUESTS = 40
PIPE_COLUMNS = 160  # width of printed tables where there is no terminal to fit

kv_app = typer.Typer(no_args_is_help=True, help="Look into the block store.")

Folder = Annotated[Path | None, typer.Argument(help="Folder of the NVMe tier of a store that does not run.")]
Socket = Annotated[Path | None, typer.Option("--socket", help="Socket of a running store, instead of a folder.")]
Running = Annotated[
    Path | None, typer.Option("--socket", help="Socket of a running store; with neither it nor a folder, all of yours.")
]


@contextmanager
def _place(folder: Path | None, socket: Path | None) -> Iterator[None]:
    """Exactly one place, and the words for what goes wrong there."""
    if (folder is None) == (socket is None):
        _fail("name either a folder or the --socket of a running store", 2)
    try:
        yield
    except BrokenPipeError:  # the reader of our output has enough; the command line ends quietly then
        raise
    except (FolderRefused, StoreUnavailable, StoreRefused, OSError) as error:
        _fail(str(error), 1)


@kv_app.command("status")
def status_command(
    socket: Annotated[
        Path | None, typer.Option("--socket", help="Socket of a running store; all of yours if left out.")
    ] = None,
) -> None:
    """Counters and gauges of a running store, or of all that services of this user run here, one a line."""
    for one in _running("name the --socket of one") if socket is None else [socket]:
        with _place(None, one):
            kv_running.print_status(one)


def _running(advice: str) -> list[Path]:
    """Sockets of this user's stores that answer; fails when none does."""
    found = store_sockets()
    if not (answering := [socket for socket in found if kv_running.answers(socket)]):
        dead = f"; these do not answer: {', '.join(map(str, found))}" if found else ""
        _fail(f"no store of this user runs below {temporary_folder()}; {advice}{dead}", 1)
    return answering


def _places(folder: Path | None, socket: Path | None) -> Iterator[tuple[Path | None, Path | None]]:
    """(folder, socket) that are named; else each store that runs, with a line that says which."""
    if folder is not None or socket is not None:
        yield folder, socket
        return
    for one in _running("name the folder of one that does not run, or a --socket"):
        typer.echo(f"socket {one}")
        yield None, one


@kv_app.command("ls")
def ls_command(
    folder: Folder = None,
    socket: Running = None,
    records: Annotated[bool, typer.Option("--records", help="One line per record or block.")] = False,
) -> None:
    """List the blocks of running stores, or the segments of a folder by their records' headers. Reads no payloads."""

    def show(at: RecordAt, stored: Stored) -> None:
        header, part = at.header, at.header.part
        typer.echo(
            f"{segment_name(at.segment)} {at.offset:>12} {header.key.hex()[:16]} "
            f"{header.version.writer_id:016x}.{header.version.counter} layers {part.layer_start}-{part.layer_stop - 1} "
            f"heads {part.head_start}-{part.head_stop - 1} {header.kv_form} {header.length} bytes, "
            f"{stored.length} stored ({CODEC_NAMES[stored.codec]})"
        )

    for at_rest, running in _places(folder, socket):
        with _place(at_rest, running):
            if running is not None:
                kv_running.print_blocks(running, lines=records)
            elif at_rest is not None:
                _print_report(nvme_folder.ls(at_rest, show if records else None))


@kv_app.command("verify")
def verify_command(folder: Folder = None, socket: Running = None) -> None:
    """Read every block. Adopted: verified; refused: of another format; corrupt: damaged, never served."""
    good = True
    for at_rest, running in _places(folder, socket):
        with _place(at_rest, running):
            if running is not None:
                good &= kv_running.verify_blocks(running)
            elif at_rest is not None:
                report = nvme_folder.verify(at_rest)
                _print_report(report)
                good &= not report.corrupt
    raise typer.Exit(0 if good else 1)


@kv_app.command("clear")
def clear_command(
    folder: Folder = None,
    socket: Socket = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all blocks of a running store or a folder. Files that are not the store's stay."""
    with _place(folder, socket):
        if not yes and not typer.confirm(f"Remove every block in {folder or socket}?"):
            raise typer.Exit(1)
        if socket is not None:
            kv_running.clear_blocks(socket)
        elif folder is not None:
            typer.echo(f"{show_bytes(nvme_folder.clear(folder))} freed")


@kv_app.command("io-trace")
def io_trace_command(
    queue: Annotated[
        str,
        typer.Argument(help="File with a request a line, `arrival position length`, or positions such as 98,183,37."),
    ],
    start: Annotated[int, typer.Option(min=0, help="Where the head stands at first.")] = 0,
    down: Annotated[bool, typer.Option("--down", help="SCAN begins downward.")] = False,
    ends: Annotated[str | None, typer.Option(help="LOW:HIGH: SCAN travels there before it turns.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Requests shown; all figures count all.")] = SHOWN_REQUESTS,
) -> None:
    """Serve a queue of requests in the orders FCFS, SSTF and SCAN, side by side.

    Arrival and wait are counted in requests: one with arrival 5 comes when five have been served, and a wait of 3 means
    that three others were served between its arrival and its turn; the way is what the head travelled meanwhile.
    """
    try:
        found = compare(parse_trace(_trace_text(queue)), start, upward=not down, ends=_bounds(ends))
    except (TraceError, OSError) as error:
        _fail(str(error), 2)
    _print_replays(found, start, show)


def _trace_text(queue: str) -> str:
    """Text of a file, or the argument itself when it can only be positions."""
    if queue.replace(",", "").replace(" ", "").isdecimal():
        return queue
    path = Path(queue)
    if not path.exists() or path.is_dir():
        raise TraceError(f"{queue!r:.200} is neither a file nor positions with commas between them, such as 98,183,37")
    with path.open("rb") as file:
        data = file.read(MAX_TRACE_BYTES + 1)
    if len(data) > MAX_TRACE_BYTES:
        raise TraceError(f"{path} has more than {MAX_TRACE_BYTES} bytes; so many are read at most")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8: {error}") from None


def _bounds(ends: str | None) -> tuple[int, int] | None:
    if ends is None:
        return None
    low, _, high = ends.partition(":")
    if not low.isdecimal() or not high.isdecimal() or int(low) > int(high):
        raise TraceError(f"--ends is {ends!r}; it must be LOW:HIGH, such as 0:199")
    return int(low), int(high)


def _print_replays(found: tuple[Replay, ...], start: int, show: int) -> None:
    console = Console(width=None if Console().is_terminal else PIPE_COLUMNS)
    table = Table("turn", *(one.order.upper() for one in found), title="position served (wait, way)")
    for turn in range(min(show, len(found[0].served))):
        cells = [one.served[turn] for one in found]
        table.add_row(str(turn + 1), *(f"{cell.request.position} ({cell.wait}, {cell.way})" for cell in cells))
    if len(found[0].served) > show:
        table.add_row("...", *["..."] * len(found))
    console.print(table)
    figures = Table("from the start position " + str(start), *(one.order.upper() for one in found))
    figures.add_row("total seek distance", *(str(one.seek_distance) for one in found))
    figures.add_row("mean wait", *(f"{one.mean_wait:.2f}" for one in found))
    figures.add_row("mean way", *(f"{one.mean_way:.2f}" for one in found))
    figures.add_row("longest wait", *(str(one.max_wait) for one in found))
    figures.add_row("calls after merging", *(str(one.runs) for one in found))
    console.print(figures)


def _print_report(report: FolderReport) -> None:
    console = Console(width=None if Console().is_terminal else PIPE_COLUMNS)
    table = Table("segment", "size", "on disk", "adopted", "refused", "corrupt")
    for found in report.segments:
        numbers = (found.adopted, found.refused, found.corrupt)
        table.add_row(
            segment_name(found.segment), show_bytes(found.size), show_bytes(found.allocated), *map(str, numbers)
        )
    console.print(table)
    for problem in report.problems:
        typer.echo(problem, err=True)
    stored = f"payloads of {show_bytes(report.payload_bytes)} stored in {show_bytes(report.stored_bytes)}"
    counts = f"adopted {report.adopted}, refused {report.refused}, corrupt {report.corrupt}"
    typer.echo(f"{counts}; {stored}; files of others {show_bytes(report.foreign_bytes)}")


def show_bytes(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
