"""Typed errors of the block store and the one internal-check error of the project.

Every class hands all of its constructor arguments to the base class, so that an error pickled by Ray
between its own actors arrives as it left.
"""

from __future__ import annotations


class InvariantViolation(Exception):  # noqa: N818 - it names a broken statement, not a bad input
    """Something that must always hold does not. Raised instead of `assert`, so that it survives `python -O`."""


class StoreConfigError(ValueError):
    """A configuration of the store that cannot work; the message names the value and the limit."""


class StoreRefused(RuntimeError):  # noqa: N818 - the store said no
    """The store does not serve this client or call: another tenant secret, numeric form or protocol, or no room.

    Nothing was changed; trying again helps only where the message says so.
    """


class StoreUnavailable(RuntimeError):  # noqa: N818 - a state of the world
    """The store did not answer within the deadline, or it is gone. What was asked may or may not have happened: blocks
    may be lost, none is wrong. The client attaches again.
    """
