"""Text to tokens and back, also token by token. No torch, no threads.

A `Text` may be used from many threads: encoding and decoding leave the tokenizer as it is. A `Detokenizer`
and a `StopScanner` belong to the one answer that they follow.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"
"""What a decoder puts for bytes that are not a whole UTF-8 character (yet)."""

_CONTEXT = 6


class Encoded(Protocol):
    """What a tokenizer makes of a text."""

    @property
    def ids(self) -> list[int]:
        """The tokens."""
        ...


class Tokenizer(Protocol):
    """The part of ``tokenizers.Tokenizer`` that is used here."""

    def encode_batch_fast(self, texts: list[str], /) -> Sequence[Encoded]:
        """Turn texts into tokens, with those that every prompt of the model begins with."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Turn tokens into text."""
        ...

    def id_to_token(self, token: int) -> str | None:
        """Return a token's spelling in the vocabulary."""
        ...


class Text:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """Turn a prompt into tokens, begin-of-text included where the model wants it."""
        # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
        return tuple(self._tokenizer.encode_batch_fast([text])[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn tokens into text, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return a name for each of several tokens, no two alike.

        It is the token's text, or, where that is no whole character or another's too, its spelling in the
        vocabulary. A special token has one, too.
        """
        names: list[str] = []
        for token in tokens:
            name = self._tokenizer.decode([token], skip_special_tokens=False)
            spelt = INCOMPLETE in name or name in names
            names.append(self._tokenizer.id_to_token(token) or f"<{token}>" if spelt else name)
        return names


class Detokenizer:
    """Text of an answer as its tokens come: whole characters only, never one of them twice.

    The last tokens already shown are decoded together with the new ones, as some tokenizers drop a space
    that begins a text. So prompt and answer, put together, are what the tokenizer makes of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._shown = list(prompt[-_CONTEXT:])
        if decode(self._shown).endswith(INCOMPLETE):
            self._shown = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return what is left at the end, an incomplete character as the replacement character."""
        return self._new_text()

    def _new_text(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]


class StopScanner:
    """Lets text through until a stop sequence appears, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and whether a stop sequence was met."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            return self._held[: min(found)], True
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """Return what was held back."""
        return self._held

    def _undecided(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0
