"""`tournant config`: see what is wrong with a Serve file, and what a right one amounts to, before it is deployed.

Owns the commands. The work needs Ray's schema, whose import takes longer than everything else here, so it is done by
processes of their own: config_check.py and config_show.py, which print and choose the exit code.

Exit codes: 0 the file is valid, 1 it is not, or cannot be read, 2 wrong arguments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

config_app = typer.Typer(no_args_is_help=True, help="Check a Serve file, or show what it amounts to.")
File = Annotated[Path, typer.Argument(help="A Serve file (YAML), or one with `args` alone.")]


@config_app.command("check")
def check_command(file: File) -> None:
    """Tell everything that is wrong, a line each, with the nearest key that is known."""
    _run("tournant.deploy.config_check", file)


@config_app.command("show")
def show_command(file: File) -> None:
    """Print the file with every default, and what Serve is told of its deployments; secrets are redacted."""
    _run("tournant.deploy.config_show", file)


def _run(module: str, file: Path) -> None:
    """Run a module of ours with the file, and end with its exit code."""
    # -P keeps the current folder off the module path
    code = subprocess.run([sys.executable, "-P", "-m", module, str(file)], check=False).returncode
    if code < 0:
        typer.echo(f"error: the check was ended by signal {-code}", err=True)
    raise typer.Exit(code if code >= 0 else 1)
