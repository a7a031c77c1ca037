"""`tournant keys`: make an API key.

Owns what is printed. The key itself is kept nowhere: the file of keys (access.py) holds its digest.

Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Annotated

import typer

from tournant.deploy.access import NAME, digest_of

KEY_BYTES = 32

keys_app = typer.Typer(no_args_is_help=True, help="Make keys for the API.")


@keys_app.callback()
def _keys() -> None:
    """Without it a single command would have no name."""


@keys_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="Tenant that the key is for: letters, digits and . _ -")],
) -> None:
    """Print a new key, which is shown this once, and the line that lets it in, for the file of keys."""
    if not re.fullmatch(NAME, name):
        typer.echo(f"error: {name!r:.100} is no name; it may have 1 to 64 letters, digits and . _ -", err=True)
        raise typer.Exit(2)
    key = new_key()
    typer.echo("the key, which is shown this once:", err=True)
    typer.echo(key)
    typer.echo("the line for the file of keys, below tenants:", err=True)
    typer.echo(f"  - {{name: {json.dumps(name)}, digests: [{digest_of(key).hex()}]}}")


def new_key() -> str:
    """A key that nobody can guess."""
    return f"tn-{secrets.token_urlsafe(KEY_BYTES)}"
