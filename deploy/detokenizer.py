"""Token ids of one answer to text that is final, with stop strings applied.

Owns the bytes of an unfinished character and the characters that may become a stop string; nothing of either is given
out early. Tokens are turned into bytes one by one, so the text does not depend on how tokens are grouped.

Invariants:
 1. Joined, what `feed` and `finish` return is the same for every grouping of the same tokens; that joined text *is* the
    answer, streamed or not. For byte-level tokenizers it equals `Tokenizer.decode` of the ids. (Decoders that strip one
    leading blank do so here only when a whole text is decoded, not for an answer, which continues a prompt.)
 2. Bytes that never become a character turn into U+FFFD, those of an answer that ends inside a character too.
 3. No character of a stop string that ended the answer is ever returned, unless `include_stop_str_in_output`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.sampling_params import SamplingParams


@lru_cache(maxsize=256)
def _fallback_table(text: str) -> tuple[int, ...]:
    """Per character: how many of the text's first characters the part up to it ends with. All answers share it."""
    table = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = table[length - 1]
        length += text[place] == text[length]
        table[place] = length
    return tuple(table)


class StopMatcher:
    """Finds one stop string in a stream of characters, each looked at once (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the stream ends with, at most len(text) - 1 between calls
        self._fallback = _fallback_table(text)

    def push(self, char: str) -> bool:
        """Take the next character; True when it completes the stop string."""
        matched, text = self.matched, self.text
        while matched and text[matched] != char:
            matched = self._fallback[matched - 1]
        if text[matched] == char:
            matched += 1
        complete = matched == len(text)
        self.matched = self._fallback[matched - 1] if complete else matched
        return complete


class Detokenizer:
    """Text of one answer. `feed` tokens as they come, `finish` once at the end.

    The stop string that is completed first wins; of several completed by one character the longest. A stop string
    counts only when the token that completes it is token number `min_tokens` or a later one.
    """

    __slots__ = (
        "_bytes",
        "_held",
        "_include_stop",
        "_matchers",
        "_min_tokens",
        "_skip",
        "_token_bytes",
        "num_emitted",
        "num_tokens",
        "stopped",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matchers = [StopMatcher(text) for text in params.stop]
        self._bytes = b""  # of a character that is not complete yet, at most 3
        self._held = ""  # characters that may be the head of a stop string
        self.num_tokens = 0
        self.num_emitted = 0  # characters returned so far
        self.stopped: str | None = None

    @property
    def num_decoded(self) -> int:
        """Characters returned so far and those held back."""
        return self.num_emitted + len(self._held)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that became final.

        Tokens after the one that completes a stop string are not taken: `num_tokens` tells how many were.
        """
        if not self._matchers:
            self.num_tokens += len(token_ids)
            text = self._decode(b"".join([self._token_bytes(token) for token in token_ids if token not in self._skip]))
        else:
            text = ""
            for token in token_ids:
                if self.stopped is not None:
                    break
                self.num_tokens += 1
                if token not in self._skip:
                    text += self._match(self._decode(self._token_bytes(token)))
        self.num_emitted += len(text)
        return text

    def finish(self) -> str:
        """What was held back, when no more tokens come; an unfinished character gives U+FFFD, a stop string nothing."""
        if self.stopped is not None:
            return ""
        text = self._match(self._decode(b"", final=True))
        if self.stopped is None:
            text += self._held
            self._held = ""
        self.num_emitted += len(text)
        return text

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._bytes + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._bytes = data[used:]
        return text

    def _match(self, text: str) -> str:
        """Add characters to those held back and return the final ones: all but a possible head of a stop string."""
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            completed = [matcher.text for matcher in self._matchers if matcher.push(char)]
            if completed and self.num_tokens >= self._min_tokens:
                self.stopped = max(completed, key=len)
                self._held = ""
                return buffer[: end if self._include_stop else end - len(self.stopped)]
        keep = max((matcher.matched for matcher in self._matchers), default=0)
        cut = len(buffer) if self._include_stop else len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]
