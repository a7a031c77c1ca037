"""The section `access:` of a configuration: who may come in, and where operators do.

Owns names and limits; config.py reads it as part of a ServiceConfig, access.py carries it out.
"""

from __future__ import annotations

import ipaddress
import reprlib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator


def _absolute(value: str | None, info: ValidationInfo) -> str | None:
    """Replicas run in other folders, so a path must not depend on one."""
    if value is None:
        return None
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError(f"access.{info.field_name} is {reprlib.repr(value)}; it must be an absolute path")
    return str(path)


FilePath = Annotated[str | None, Field(min_length=1, max_length=4096), AfterValidator(_absolute)]


class AccessConfig(BaseModel):
    """What an operator chooses about access. Frozen.

    api_keys_file: tenants and their keys (access.py), None = everybody may use the API; public_metrics: `/metrics`
    needs no key where the rest does; admin_port: where the routes of operators are served instead of beside the API,
    0 = any free port, None = beside the API, for clients on the same machine; admin_host: its address; admin_key_file:
    the key that these routes then need, None = clients on the same machine need none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    api_keys_file: FilePath = None
    public_metrics: bool = False
    admin_host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    admin_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    admin_key_file: FilePath = None

    @model_validator(mode="after")
    def _check_admin(self) -> Self:
        if self.admin_key_file is not None and self.admin_port is None:
            raise ValueError(
                "access.admin_key_file needs access.admin_port: beside the API the routes of operators are for clients "
                "on the same machine alone"
            )
        if self.admin_port is not None and self.admin_key_file is None and not is_loopback(self.admin_host):
            raise ValueError(
                f"access.admin_host is {reprlib.repr(self.admin_host)}, which other machines can reach; it needs "
                "access.admin_key_file"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address is one of this machine alone; names are none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _section(value: Any) -> Any:
    if value is None:
        return AccessConfig()
    if not isinstance(value, AccessConfig | dict):
        raise ValueError(f"access is {reprlib.repr(value)}; it must be a mapping of names to values")
    return value


AccessSection = Annotated[AccessConfig, BeforeValidator(_section)]
