"""Text to token ids and back. Owns the tokenizer and chat template of a model; below it only token ids exist.

It does not stream (detokenizer.py) and does not know requests.

Invariants:
 1. A raw prompt gets exactly one begin-of-text token if the model uses one; a chat prompt gets what its template says.
 2. Nothing here changes the shared tokenizer after construction, so any thread may call any method.
 3. `token_bytes` of the tokens of a text, joined, is the text in UTF-8 (less a leading blank that some decoders strip).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from tournant.deploy.known_pieces import known_pieces
from tournant.workers.errors import ModelFormatError

MAX_TOKEN_ID = 1 << 22  # bounds the table of token bytes
INLINE_CHARS = 4096  # longer texts are encoded off the event loop: 4,096 characters take about 1 ms
INLINE_MESSAGES = 64  # longer chats are rendered off the event loop, too
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# What apply_chat_template renders with, in its sandbox. Not public: a version without it has the longer way alone.
_compile_template: Any = getattr(chat_template_utils, "_compile_jinja_template", None)
PLAIN_FIELDS = frozenset({"role", "content", "name"})
UNKNOWN = "a text of a client"
USUAL_CHATS = (("user",), ("system", "user"), ("user", "assistant", "user"))  # roles of chats whose frame is learned
# Arguments of transformers' apply_chat_template that are not a client's to choose, a template above all.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character in the printable alphabet that byte-level BPE spells its tokens in (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    for place, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        alphabet[chr(256 + place)] = byte
    return alphabet


def _decoder_steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _token_table(backend: Any) -> list[bytes]:
    """Bytes of every token id. Raises ModelFormatError for a decoder that does not work token by token."""
    if backend.decoder is None:
        raise ModelFormatError("tokenizer.json names no decoder; use a byte-level or byte-fallback tokenizer")
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()))
    unknown = {step["type"] for step in steps} - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if unknown:
        raise ModelFormatError(
            f"tokenizer.json has the decoder {', '.join(sorted(unknown))}; only byte-level and byte-fallback "
            "tokenizers (Llama, Qwen, Mistral, Gemma, SmolLM and their kin) are supported"
        )
    kinds = {step["type"] for step in steps}
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ModelFormatError(
                    f"tokenizer.json replaces by the pattern {step['pattern']}; only plain strings are supported"
                )
            replacements.append((step["pattern"]["String"], step["content"]))
    alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else {}
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    largest = max(vocab.values(), default=-1)
    if min(vocab.values(), default=0) < 0 or largest >= MAX_TOKEN_ID:
        raise ModelFormatError(f"tokenizer.json has token ids up to {largest}; they must be 0 to {MAX_TOKEN_ID - 1}")
    table = [b""] * (largest + 1)
    for token, token_id in vocab.items():
        if alphabet and all(char in alphabet for char in token):
            table[token_id] = bytes(alphabet[char] for char in token)
            continue
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[token_id] = bytes([int(token[3:5], 16)])
            continue
        for old, new in replacements:
            token = token.replace(old, new)
        table[token_id] = token.encode("utf-8", "replace")
    return table


def _not_unicode(error: Exception) -> ValueError:
    return ValueError(f"the text is not valid Unicode: {error}")


def _chars(message: Mapping[str, Any]) -> int:
    return sum(len(value) for value in message.values() if isinstance(value, str))


class Tokenizer:
    """Encoder, decoder and chat template of one model. Safe to use from several threads.

    tokenizer: a transformers tokenizer with a `tokenizers` backend. Raises ModelFormatError for any other kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelFormatError(f"{type(tokenizer).__name__} has no tokenizer.json form; convert it first")
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer: Any = tokenizer
        self._backend: Any = backend
        self._table = _token_table(backend)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._template_names = frozenset(self._special_tokens) | RESERVED_TEMPLATE_KWARGS
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._template: jinja2.Template | None = None
        if _compile_template is not None and isinstance(tokenizer.chat_template, str):
            self._template = self._compiled(tokenizer.chat_template)
        self._known = known_pieces(backend, self._usual_chats(), UNKNOWN)

    @staticmethod
    def _compiled(chat_template: str) -> jinja2.Template | None:
        """None for a template that is wrong: requests are told so."""
        try:
            template: jinja2.Template = _compile_template(chat_template)
        except TEMPLATE_ERRORS:
            return None
        template.globals = dict(template.globals)  # a ChainMap, which every rendering would copy key by key
        return template

    def _usual_chats(self) -> Iterator[str]:
        if self.has_chat_template:
            for roles in USUAL_CHATS:
                with suppress(ValueError):  # a template that does not take this one
                    yield self.render_chat([{"role": role, "content": UNKNOWN} for role in roles])

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Tokenizer of a model folder. Reads local files only and runs no code from them.

        Raises ModelFormatError when the folder holds no usable tokenizer.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
        except ModelFormatError:
            raise
        except Exception as error:  # tokenizers and transformers raise whatever a wrong value leads them to
            reason = " ".join(str(error).split())[:300]
            message = f"no tokenizer could be read from {folder}: {type(error).__name__}: {reason}"
            raise ModelFormatError(message) from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a spelling; the model's own vocabulary may be padded beyond it."""
        return len(self._table)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that mark structure (begin of text, turns) and are left out of answers."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        """The begin-of-text token, if the tokenizer names one."""
        token_id: int | None = self._tokenizer.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token, if the tokenizer names one."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can work."""
        return bool(self._tokenizer.chat_template)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, which may be part of a character; empty for an id without a spelling."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself; U+FFFD for bytes that are part of a character only."""
        return [self.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]

    def gives_ids_of(self, other: Tokenizer) -> bool:
        """Whether texts and chats have the same token ids by both."""
        if self is other:
            return True
        chats = self._tokenizer.chat_template == other._tokenizer.chat_template
        return chats and bool(self._backend.to_str() == other._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, in the calling thread.

        With `add_special_tokens` exactly one begin-of-text token if the model uses one, also when the text spells it.
        Raises ValueError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            if len(text) <= INLINE_CHARS:
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # lets other threads run and is twice as fast, but takes 0.2 ms to begin
                encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeError, TypeError) as error:
            raise _not_unicode(error) from error
        ids: list[int] = encoded.ids
        bos = self.bos_token_id if add_special_tokens else None
        if bos is not None and ids[:2] == [bos, bos] and text.startswith(self._tokenizer.bos_token):
            del ids[0]
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`; texts above INLINE_CHARS are encoded in a small pool of threads so that the loop goes on."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.encode, text, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text, by the model's template in transformers' sandbox.

        template_kwargs: further variables for the template; names that belong to the server are refused.
        Raises ValueError when the model has no template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError("this model has no chat template; use /v1/completions")
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(self._template_names & kwargs.keys()):
            raise ValueError(f"chat_template_kwargs may not set {', '.join(reserved)}")
        try:
            if self._template is not None and not (continue_final_message or kwargs) and self._is_plain(messages):
                return self._render_plain(self._template, messages, add_generation_prompt)
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template of this model refused the messages: {error}") from error
        return str(text)

    @staticmethod
    def _is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether transformers would give the template these very messages, as all but odd ones are."""
        return bool(messages) and all(
            type(message) is dict and message.keys() <= PLAIN_FIELDS and set(map(type, message.values())) <= {str}
            for message in messages
        )

    def _render_plain(
        self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """As apply_chat_template without its copies of the messages, which take as long as the template itself."""
        return template.render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat. The template alone decides about special tokens: none is added to its text.

        Raises ValueError as `render_chat`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self._encode_chat(text)

    async def apply_chat_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """As `apply_chat`, in a thread for chats that are long."""
        call = partial(
            self.apply_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        if not template_kwargs and len(messages) <= INLINE_MESSAGES and sum(map(_chars, messages)) <= INLINE_CHARS:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _encode_chat(self, text: str) -> list[int]:
        if self._known is None or len(text) > INLINE_CHARS:
            return self.encode(text, add_special_tokens=False)
        try:
            return self._known.encode(text)
        except (UnicodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids at once; incomplete characters become U+FFFD. Ids without a spelling give nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < len(self._table)]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
