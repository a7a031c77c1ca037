"""Bounded reading of the small JSON files beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tournant.workers.errors import ModelFormatError


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in `path`. Reads at most `limit` bytes.

    Raises ModelFormatError when the file is missing, longer, no JSON, or holds something else than an object.
    """
    if not path.is_file():
        raise ModelFormatError(f"{path.parent} has no {path.name}, so it is not a model folder")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ModelFormatError(f"{path} has more than {limit} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value
