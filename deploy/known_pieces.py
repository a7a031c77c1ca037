"""Token ids of what a chat template itself writes, so that requests have only their own text encoded.

Owns where a text may be cut (at added tokens, which a tokenizer looks for before anything else) and the pieces between
them that every chat has. Nothing that clients send is kept: how long a request takes tells nothing of other requests.

Invariants:
 1. The ids are those of the whole text. A tokenizer that looks beyond a piece is not cut (`known_pieces` gives None).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_PIECES = 256
PIECEWISE = frozenset({"ByteLevel", "Digits", "Split", "NFC"})  # steps that look at one piece between added tokens


class KnownPieces:
    """Encodes chats. cut: matches each added token and nothing else; its ids; ids of pieces between them."""

    def __init__(
        self, backend: Any, cut: re.Pattern[str], tokens: Mapping[str, int], pieces: Mapping[str, list[int]]
    ) -> None:
        self._backend = backend
        self._cut = cut
        self._tokens = tokens
        self._pieces = pieces

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered chat. Raises what the tokenizer raises."""
        found: list[int] = []
        for place, piece in enumerate(self._cut.split(text)):
            if place % 2:
                found.append(self._tokens[piece])
            elif piece:
                known = self._pieces.get(piece)
                found += self._backend.encode(piece, add_special_tokens=False).ids if known is None else known
        return found


def known_pieces(backend: Any, chats: Iterable[str], unknown: str) -> KnownPieces | None:
    """None where a text may not be cut, or nothing is known. chats: rendered ones, whose own text is `unknown`."""
    steps = [step for part in (backend.normalizer, backend.pre_tokenizer) if part is not None for step in _kinds(part)]
    added = backend.get_added_tokens_decoder()
    if not set(steps) <= PIECEWISE or any(one.lstrip or one.rstrip or one.single_word for one in added.values()):
        return None
    tokens = {one.content: number for number, one in added.items() if not one.normalized}
    if not tokens:
        return None
    cut = re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True)))})")
    texts = dict.fromkeys(piece for chat in chats for piece in cut.split(chat)[::2] if piece and unknown not in piece)
    pieces = {text: backend.encode(text, add_special_tokens=False).ids for text in list(texts)[:MAX_PIECES]}
    return KnownPieces(backend, cut, tokens, pieces) if pieces else None


def _kinds(part: Any) -> Iterator[str]:
    """Kinds of the steps of a normalizer or pre-tokenizer."""

    def walk(state: Mapping[str, Any]) -> Iterator[str]:
        inner = state.get("normalizers", state.get("pretokenizers"))
        if inner is None:
            yield state["type"]
        else:
            for one in inner:
                yield from walk(one)

    return walk(json.loads(part.__getstate__()))
