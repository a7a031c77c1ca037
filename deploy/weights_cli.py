"""`tournant weights`: give a running service other weights, and see how that gets on.

Owns flags, printing and exit codes; what happens is the service's (admin_routes.py), and goes on if this ends.

Exit codes: 0 done, 1 the update failed or nobody answers, 2 wrong arguments.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tournant.deploy.http_client import (
    DEFAULT_URL,
    WEIGHTS_PATH,
    CAFile,
    KeyFile,
    error_text,
    open_client,
    unreachable,
)
from tournant.workers.errors import ConfigError

ANSWER_S = 60.0  # longer than the service waits for its roll-out
POLL_S = 0.5
PATIENCE_S = 60.0  # for a service that does not answer, as while its only replica is replaced
TRIES = 3
SHOWN_ID = 12

weights_app = typer.Typer(no_args_is_help=True, help="Change the weights of a running service.")
Url = Annotated[str, typer.Option(help="Address of the server on this machine, or of its port for operators.")]


@weights_app.command("update")
def update_command(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id, as every replica is to find it.")],
    url: Url = DEFAULT_URL,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until all replicas have changed.")] = True,
    key_file: KeyFile = None,
    ca_file: CAFile = None,
) -> None:
    """Give all replicas other weights, one after another, while the service goes on."""
    name = _as_replicas_see_it(model)
    with _service(url, key_file, ca_file) as client:
        epoch = _begin(client, name)
        if not wait:
            typer.echo(f"update {epoch} has begun; `tournant weights status` shows how it gets on")
            return
        try:
            status = _follow(client, epoch)
        except KeyboardInterrupt:
            _fail(f"update {epoch} goes on; `tournant weights status` shows how")
    if status["failed_epoch"] == epoch:
        _fail(f"update {epoch} failed, and all replicas have the weights from before: {status['error']}")
    if status["epoch"] < epoch:
        _fail(f"the service has begun anew and knows nothing of update {epoch}; it runs {_weights(status)}")
    typer.echo(f"update {epoch} is done: {len(status['replicas'])} replicas run {_weights(status)}")


@weights_app.command("status")
def status_command(url: Url = DEFAULT_URL, key_file: KeyFile = None, ca_file: CAFile = None) -> None:
    """What the service runs, and how an update gets on."""
    with _service(url, key_file, ca_file) as client:
        status = _get_status(client)
    lines = [("state", status["state"]), ("epoch", status["epoch"]), ("model", status["model"] or "the default model")]
    lines += [("weights_id", status["weights_id"] or "not known yet")]
    if status["error"]:
        lines += [("failed_epoch", status["failed_epoch"]), ("error", status["error"])]
    for name, value in lines:
        typer.echo(f"{name} {value}")
    for one in status["replicas"]:
        runs = f"epoch {one['epoch']}, weights {one['weights_id'][:SHOWN_ID] or 'not known yet'}"
        typer.echo(f"replica {one['replica']} {one['phase']}, {'nothing yet' if one['epoch'] < 0 else runs}")


@contextmanager
def _service(url: str, key_file: Path | None, ca_file: Path | None) -> Iterator[httpx.Client]:
    try:
        opened = open_client(url, ANSWER_S, key_file, ca_file)
    except ConfigError as error:
        _fail(str(error), 2)
    with opened as client:
        try:
            yield client
        except httpx.HTTPError as error:
            _fail(unreachable(client, error))


def _as_replicas_see_it(model: str) -> str:
    """A path that is here becomes absolute; the service says what is wrong with anything else."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return model
    return str(path.absolute()) if path.exists() else model


def _begin(client: httpx.Client, model: str) -> int:
    """The epoch of a new update. A lost answer is asked for again: the key makes that the same update."""
    headers = {"idempotency-key": uuid.uuid4().hex}
    for left in reversed(range(TRIES)):
        try:
            return int(_json(client.post(WEIGHTS_PATH, json={"model": model}, headers=headers), 202)["epoch"])
        except httpx.TransportError:
            if not left:
                raise
            time.sleep(POLL_S)
    raise ValueError(f"TRIES is {TRIES}; it must be at least 1")


def _follow(client: httpx.Client, epoch: int) -> Mapping[str, Any]:
    """The status once the update is over, with a bar of replicas until then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    heard = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"update {epoch}")
        while True:
            try:
                status = _get_status(client)
            except (httpx.TransportError, _Unavailable):
                if time.monotonic() - heard > PATIENCE_S:
                    raise
            else:
                heard = time.monotonic()
                replicas = status["replicas"]
                done = sum(one["epoch"] == status["epoch"] and one["phase"] == "serving" for one in replicas)
                words = "undoing update" if status["state"] == "undoing" else "update"
                progress.update(bar, total=len(replicas), completed=done, description=f"{words} {epoch}")
                if status["state"] in ("done", "failed") or status["epoch"] < epoch != status["failed_epoch"]:
                    return status
            time.sleep(POLL_S)


class _Unavailable(httpx.HTTPError):
    """Nobody could say how it stands, for the moment."""


def _get_status(client: httpx.Client) -> Mapping[str, Any]:
    response = client.get(WEIGHTS_PATH)
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise _Unavailable(error_text(response.status_code, response.content))
    return _json(response, 200)


def _json(response: httpx.Response, expected: int) -> Mapping[str, Any]:
    """The body of an answer of that status. Another one ends the command."""
    if response.status_code != expected:
        _fail(error_text(response.status_code, response.content))
    found: Mapping[str, Any] = response.json()
    return found


def _weights(status: Mapping[str, Any]) -> str:
    known = f", weights {status['weights_id'][:SHOWN_ID]}" if status["weights_id"] else ""
    return f"{status['model'] or 'the default model'}{known}, as epoch {status['epoch']}"


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
