"""API keys and tenants: who a request is from, and whether it may come in.

Owns the file of keys, the comparison, and the identity of a tenant's cached blocks; what a tenant may use is
quota.py's. The file is YAML or JSON:

    tenants:
      - name: search
        digests: [9f86d0...]        # SHA-256 of keys, as `tournant keys new` prints them
        keys: [a-key-as-it-is]      # or keys themselves
        max_outstanding: 64         # limits, all optional
        requests_per_minute: 600
        tokens_per_minute: 200000
        share_cache: false          # true: its blocks are shared with other tenants that say so

or holds nothing but one key, which is then that of the tenant "default" without limits.

Invariants:
 1. A key is compared as its digest, with every known one, each in constant time: how long it takes tells nothing.
 2. No key and no digest is logged or part of an error.
 3. No cache salt that a client can send is that of a tenant: those begin with RESERVED_SALT and hold a digest of the
    tenant's name and the client's salt, each with its length.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tournant.deploy.access_config import AccessConfig
from tournant.deploy.errors import RequestError
from tournant.deploy.openai_schema import ApiError
from tournant.deploy.quota import Tenant, TenantQuota
from tournant.deploy.watched_file import MAX_FILE_BYTES, WatchedFile
from tournant.deploy.yaml_file import parse_yaml
from tournant.kvstore.block import MAX_SALT_BYTES
from tournant.workers.errors import ConfigError

MAX_KEYS = 1000  # each is compared with every request's
MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
DEFAULT_TENANT = "default"
RESERVED_SALT = "tenant:"
NAME = r"^[A-Za-z0-9._-]{1,64}$"
_SCHEME = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *\Z")
_LENGTH = struct.Struct("<Q")

Limit = Annotated[int | None, Field(ge=1, le=1 << 40)]
Key = Annotated[str, Field(pattern=rf"^[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TenantEntry(BaseModel):
    """One tenant of a file; see the head of the module."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=NAME)]
    digests: list[Digest] = []
    keys: list[Key] = []
    max_outstanding: Limit = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    share_cache: bool = False

    def tenant(self) -> Tenant:
        """Without its keys."""
        return Tenant(
            self.name, self.max_outstanding, self.requests_per_minute, self.tokens_per_minute, self.share_cache
        )


class KeysFile(BaseModel):
    """A whole file of tenants."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    tenants: Annotated[list[TenantEntry], Field(min_length=1)]


def digest_of(key: bytes | str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


_FORMS = {
    "name": "1 to 64 letters, digits and . _ -",
    "keys": f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable characters without spaces",
    "digests": "64 hexadecimal digits, in lower case",
}


class Keyring:
    """Digests of keys and whose they are."""

    def __init__(self, entries: list[tuple[bytes, Tenant]]) -> None:
        self._entries = entries
        self.tenants = {tenant.name: tenant for _, tenant in entries}

    def find(self, key: bytes) -> Tenant | None:
        """Whose key it is. Every known one is looked at, whether one has been found or not."""
        given, found = digest_of(key), None
        for digest, tenant in self._entries:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def parse_keys(path: Path, content: bytes) -> Keyring:
    """The keys of a file. Raises ConfigError, one line per fault, without any key."""
    data = _parse(path, content)
    if isinstance(data, str):
        return Keyring([(digest_of(_one_key(path, data)), Tenant(DEFAULT_TENANT))])
    try:
        found = KeysFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_fault(details)}" for details in error.errors())) from None
    entries: list[tuple[bytes, Tenant]] = []
    names: set[str] = set()
    for entry in found.tenants:
        digests = [bytes.fromhex(digest) for digest in entry.digests] + [digest_of(key) for key in entry.keys]
        if not digests:
            raise ConfigError(f"{path}: tenant {entry.name} has no keys; `tournant keys new {entry.name}` makes one")
        if entry.name in names:
            raise ConfigError(f"{path}: there are two tenants {entry.name}; give one all its keys")
        names.add(entry.name)
        entries += [(digest, entry.tenant()) for digest in digests]
    if len({digest for digest, _ in entries}) < len(entries):
        raise ConfigError(f"{path}: a key is there twice; each belongs to one tenant")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{path}: there are {len(entries)} keys; at most {MAX_KEYS} are compared with each request")
    return Keyring(entries)


def parse_one_key(path: Path, content: bytes) -> bytes:
    """The digest of a file that holds one key and nothing else. Raises ConfigError."""
    return digest_of(_one_key(path, content.decode("utf-8", "replace")))


def _one_key(path: Path, text: str) -> str:
    key = text.strip()
    if not re.fullmatch(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}", key):
        raise ConfigError(
            f"{path} must hold one key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable characters without spaces"
        )
    return key


def _parse(path: Path, content: bytes) -> Any:
    """What YAML says. Its own errors quote the text, so they are not passed on."""
    try:
        return parse_yaml(content, MAX_FILE_BYTES)
    except ConfigError as error:
        line = re.search(r"line \d+", str(error))
        raise ConfigError(
            f"{path} is not YAML that can be read{', ' + line[0] if line else ''}; what it says there is not shown, "
            "because of its keys"
        ) from None


def _fault(details: Mapping[str, Any]) -> str:
    """What is wrong, without the value."""
    where = ".".join(str(part) for part in details["loc"]) or "the file"
    match details["type"]:
        case "extra_forbidden":  # its name is not told either: it may be what should be a value
            parent, _, _ = where.rpartition(".")
            known = ", ".join((TenantEntry if parent else KeysFile).model_fields)
            return f"{parent or 'the file'} has something else than {known}"
        case "missing":
            return f"{where} is missing"
        case "string_pattern_mismatch":
            field = next(part for part in reversed(details["loc"]) if isinstance(part, str))
            return f"{where} must have {_FORMS[field]}"
        case "model_type":
            return f"{where} must be a mapping of names to values"
        case _:
            return (
                f"{where}: {details['msg'].replace('Input should', 'it should').replace('String should', 'it should')}"
            )


def cache_salt(tenant: Tenant | None, client_salt: str | None) -> str | None:
    """The salt of a request's blocks: of nobody else's, unless the tenant shares. None: there are no tenants.

    Raises RequestError for a salt that is too long or begins as those of tenants do.
    """
    if client_salt is not None and client_salt.startswith(RESERVED_SALT):
        raise RequestError(f"cache_salt begins with {RESERVED_SALT!r}, which is reserved; choose another", "cache_salt")
    if tenant is None or tenant.share_cache:
        return client_salt
    salt = b"" if client_salt is None else client_salt.encode("utf-8", "surrogatepass")
    if len(salt) > MAX_SALT_BYTES:
        raise RequestError(f"cache_salt has {len(salt)} bytes; at most {MAX_SALT_BYTES} are allowed", "cache_salt")
    hasher = hashlib.sha256()
    for part in (tenant.name.encode(), b"" if client_salt is None else b"\x01" + salt):
        hasher.update(_LENGTH.pack(len(part)) + part)
    return RESERVED_SALT + hasher.hexdigest()


class Access:
    """Who may come in, by a configuration. Making one reads its files and raises ConfigError, one line per fault."""

    def __init__(self, config: AccessConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._keys = self._admin_key = None
        if config.api_keys_file is not None:
            self._keys = WatchedFile(Path(config.api_keys_file), parse_keys, clock)
        if config.admin_key_file is not None:
            self._admin_key = WatchedFile(Path(config.admin_key_file), parse_one_key, clock)
        self._keyring: Keyring | None = None
        self._quotas: dict[str, TenantQuota] = {}

    @property
    def needs_key(self) -> bool:
        """Whether the API needs one."""
        return self._keys is not None

    @property
    def admin_needs_key(self) -> bool:
        """Whether the routes of operators do, on their own port."""
        return self._admin_key is not None

    async def tenant(self, authorization: bytes) -> TenantQuota | None:
        """Whose request has this header; None where no key is needed. Raises ApiError 401."""
        if self._keys is None:
            return None
        keyring = await self._keys.current()
        if keyring is not self._keyring:
            self._take_up(keyring)
        tenant = keyring.find(_key(authorization))
        if tenant is None:
            raise _wrong_key()
        return self._quotas[tenant.name]

    async def check_admin(self, authorization: bytes) -> None:
        """Raises ApiError 401 without the operators' key, where one is needed, and 403 for a tenant's."""
        if self._admin_key is None:
            return
        expected, key = await self._admin_key.current(), _key(authorization)
        if hmac.compare_digest(expected, digest_of(key)):
            return
        if self._keys is not None and (await self._keys.current()).find(key) is not None:
            raise ApiError(403, "this is a tenant's key; here the key of operators is needed", None, "not_admin")
        raise _wrong_key()

    def _take_up(self, keyring: Keyring) -> None:
        """Tenants that were there keep what they have used."""
        for name, tenant in keyring.tenants.items():
            if name in self._quotas:
                self._quotas[name].change(tenant)
            else:
                self._quotas[name] = TenantQuota(tenant, self._clock)
        self._quotas = {name: self._quotas[name] for name in keyring.tenants}
        self._keyring = keyring


def _key(authorization: bytes) -> bytes:
    """The key of a header. Raises ApiError 401 when there is none."""
    found = _SCHEME.match(authorization) if len(authorization) <= MAX_KEY_CHARS + 100 else None
    if found is None:
        raise ApiError(
            401,
            "an API key is needed, as the header `Authorization: Bearer KEY`",
            None,
            "missing_api_key",
            (("www-authenticate", "Bearer"),),
        )
    return found[1]


def _wrong_key() -> ApiError:
    challenge = 'Bearer error="invalid_token"'
    return ApiError(401, "the API key is not known here", None, "invalid_api_key", (("www-authenticate", challenge),))
