"""Typed errors of the block store and the one internal-check error of the project.

Every class hands all of its constructor arguments to the base class, so that an error pickled by Ray
between its own actors arrives as it left.
"""

from __future__ import annotations


class InvariantViolation(Exception):  # noqa: N818 - it names a broken statement, not a bad input
    """Something that must always hold does not. Raised instead of `assert`, so that it survives `python -O`."""
