"""Where in Ray the named actors of an application live."""

from __future__ import annotations


def namespace_of(app: str) -> str:
    """The Ray namespace of an application's actors."""
    return f"tournant-{app}"
