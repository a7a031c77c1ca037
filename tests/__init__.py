"""Tests. A regular package, so that `tests.helpers` cannot be shadowed by a stray `tests` of another distribution."""
