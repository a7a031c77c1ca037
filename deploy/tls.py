"""Certificate and key of `tournant serve`, checked before anything is started.

Owns the check alone: Serve's proxy serves with them (`http_options`).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tournant.workers.errors import ConfigError


def check_tls(options: Mapping[str, Any]) -> bool:
    """Whether HTTPS is served by these `http_options`. Raises ConfigError unless their files can be used."""
    certfile, keyfile = options.get("ssl_certfile"), options.get("ssl_keyfile")
    if certfile is None and keyfile is None:
        return False
    if certfile is None or keyfile is None:
        missing = "ssl_keyfile" if keyfile is None else "ssl_certfile"
        raise ConfigError(f"{missing} is missing; HTTPS needs both ssl_certfile and ssl_keyfile")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if options.get(name) is not None:
            _check_readable(name, Path(options[name]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=options.get("ssl_keyfile_password") or "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"ssl_certfile {certfile} and ssl_keyfile {keyfile} cannot be used together: {error}; they must be PEM "
            "files of one certificate and its key"
        ) from None
    return True


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from None
