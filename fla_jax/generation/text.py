"""Text as its tokens come, and where it stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..core.arguments import as_integer, shown
from .tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_LONG = 16  # tokens whose text ends in no complete character: more are no text, and are cut


class TextDecoder:
    """Text as its tokens come: pieces whose concatenation is the text of all tokens.

    A character of several tokens comes whole. The time for a token does not grow with the text: once a piece
    is complete, only the end of it is decoded again with the next tokens, whose text may depend on it (many
    vocabularies write a space before every word but a text's first).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Begins after the tokens of ``prompt``, whose text is not returned."""
        self._tokenizer = tokenizer
        last = [int(token) for token in prompt[-1:]]
        text = tokenizer.decode(last)
        is_text = bool(text) and _UNKNOWN not in text
        self._before = last if is_text else []  # the last tokens of the last complete piece
        self._known = len(text) if is_text else 0  # characters of their text
        self._waiting: list[int] = []  # the tokens after them, whose text may still change
        self._text, self._done = "", 0  # their text, and how much of it was returned
        self._unknown = 0  # U+FFFD between the two that will not change, but may end the text

    def push(self, tokens: list[int]) -> str:
        """The text that tokens complete, perhaps none; tokens one by one give the same in more calls."""
        decode, piece = self._tokenizer.decode, ""
        self._waiting = self._waiting + tokens  # a new list: copies of this object keep theirs
        self._text = decode(self._before + self._waiting)[self._known :]
        ready = len(self._text.rstrip(_UNKNOWN))  # what ends in U+FFFD may be the beginning of a character
        if ready > self._done:
            piece = _UNKNOWN * self._unknown + self._text[self._done : ready]
            self._done, self._unknown = ready, 0
        if 0 < ready == len(self._text):
            last = self._waiting[-1:]
            text = decode(last)
            if not text or _UNKNOWN in text:  # no text by itself: a part of a character, perhaps
                last = self._waiting
                text = decode(last)
            self._before, self._known, self._waiting = last, len(text), []
            self._text, self._done = "", 0
        elif len(self._waiting) >= _LONG:
            self._cut()
        return piece

    def _cut(self) -> None:
        """Shortens what waits. Bytes that are no text came one after the other. A character has at most four,
        so one of the last places is between two characters: there the texts of both sides make the whole.
        """
        decode, waiting = self._tokenizer.decode, self._waiting
        for cut in range(len(waiting) - 1, len(waiting) - 5, -1):
            front = decode(self._before + waiting[:cut])[self._known :]
            if front + decode(waiting[cut:]) == self._text:
                self._unknown += max(len(front) - self._done, 0)
                self._done = max(self._done - len(front), 0)
                self._waiting, self._text = waiting[cut:], self._text[len(front) :]
                self._before, self._known = ([], 0) if front else (self._before, self._known)
                return

    def finish(self) -> str:
        """The text that was withheld."""
        return _UNKNOWN * self._unknown + self._text[self._done :]


class StopStrings:
    """Withholds text that may be the beginning of a stop string.

    Attributes:
        found: whether a stop string has come; no text follows it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found = False
        self._stop, self._withheld = tuple(stop), ""

    def push(self, piece: str) -> str:
        """The text that is no part of a stop string; text from the first stop string on is lost."""
        if self.found:
            return ""
        if not self._stop:
            return piece
        text = self._withheld + piece
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.found, self._withheld = True, ""
            return text[: min(places)]
        lengths = (min(len(stop) - 1, len(text)) for stop in self._stop)
        longest = max(lengths, default=0)
        ends = (n for n in range(longest, 0, -1) if any(x.startswith(text[-n:]) for x in self._stop))
        kept = next(ends, 0)
        text, self._withheld = text[: len(text) - kept], text[len(text) - kept :]
        return text

    def finish(self) -> str:
        """The text that was withheld, of a text that ends without a stop string."""
        return self._withheld


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[object]) -> Iterator[str]:
    """Text as its tokens come: pieces whose concatenation is the text of all tokens.

    A character of several tokens comes whole, and the time for a token does not grow with the text.

    Args:
        tokenizer: from `load_tokenizer`, or anything that decodes as `Tokenizer` says.
        tokens: integers of Python, NumPy or JAX.

    Yields:
        A non-empty piece of text.

    Raises:
        TypeError: a token is no integer.

    Example:
        >>> from fla_jax.generation import decode_stream, load_tokenizer
        >>> list(decode_stream(load_tokenizer("bytes"), "né!".encode()))  # four tokens, three characters
        ['n', 'é', '!']
    """
    decoder = TextDecoder(tokenizer)
    for token in tokens:
        number = as_integer(token)
        if number is None:
            raise TypeError(f"tokens must be integers, got {shown(token)}")
        piece = decoder.push([number])
        if piece:
            yield piece
    rest = decoder.finish()
    if rest:
        yield rest
