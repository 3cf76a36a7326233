"""A text as tokens that join to its bytes again, even if a model does not know them."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nanomdlm.support.data.tokenizer import WORD
from nanomdlm.support.errors import UserError

PIECE = 1 << 16  # characters that are tokenized at a time
CONTEXT = 256  # characters in front of a piece, far more than a token has


@dataclass
class Token:
    id: int  # [MASK]: a character that the model has never seen
    own: bytes  # its text
    lead: bytes = b""  # text before it that belongs to no token and stays
    number: int | None = None  # in the file; None: inserted
    is_changed: bool = False


def without_returns(text):
    """(the text with \\n for \\r\\n, the places of these \\n in it)"""
    if "\r\n" not in text:
        return text, set()
    ends = np.cumsum([len(piece) + 1 for piece in text.split("\r\n")][:-1]) - 1
    return text.replace("\r\n", "\n"), set(ends.tolist())


def with_returns(text, start, stop, ends):
    """text[start:stop] in bytes, with \\r\\n at the places `ends`."""
    piece = text[start:stop]
    if ends and "\n" in piece:
        pairs = enumerate(piece, start)
        piece = "".join("\r\n" if i in ends else c for i, c in pairs)
    return piece.encode()


class Cutter:
    """Cuts a text into Tokens that join to its bytes. Line ends \\r\\n are shown as \\n.

    Raises UserError for a tokenizer whose ids have no text.
    """

    def __init__(self, tokenizer):
        if tokenizer.kind == "id":
            what = "this model learned ids, whose text is not known"
            raise UserError(f"{what}; --fix needs one that learned text")
        self.tokenizer = tokenizer
        self.mask = tokenizer.mask_id
        self.by_character = tokenizer.kind in ("char", "byte")
        self.keeps_returns = tokenizer.kind == "char" and "\r" in tokenizer.vocab
        self.newline = b"\n"  # as the file ends its lines

    def tokens(self, pieces: Iterable[str]) -> Iterator[Token]:
        """Tokens of a text that comes in pieces."""
        text = before = ""
        for piece in itertools.chain(pieces, [None]):
            text += piece or ""
            n = len(text) if piece is None else self.ready(text)
            yield from self.cut(text[:n], before)
            before = (before + text[:n])[-CONTEXT:]
            text = text[n:]

    def ready(self, text):
        """How many characters of a text can be cut into tokens before the next ones are known."""
        if self.by_character:
            return len(text) - text.endswith("\r")
        spaces = (i for i in range(len(text) - 1, 0, -1) if text[i].isspace())
        n = next((i for i in spaces if not text[i - 1].isspace()), 0)
        return n if n or len(text) < PIECE else len(text) - text.endswith("\r")

    def cut(self, text, before):
        """Tokens of `text`, which goes on after `before`."""
        ends = set()
        if not self.keeps_returns:
            text, ends = without_returns(text)
            before = before.replace("\r\n", "\n")
        if text and ends:
            self.newline = b"\r\n"
        elif "\n" in text:
            self.newline = b"\n"
        if self.tokenizer.kind == "char":
            table = self.tokenizer.table
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            ids = table[np.minimum(codes, len(table) - 1)]
            for i, (c, id) in enumerate(zip(text, ids.tolist())):
                own = b"\r\n" if i in ends else c.encode()
                yield Token(id if id >= 0 else self.mask, own)
        elif self.tokenizer.kind == "byte":
            for i, c in enumerate(text):
                for byte in c.encode():
                    yield Token(byte, b"\r\n" if i in ends else bytes([byte]))
        else:
            yield from self.cut_words(text, before, ends)

    def cut_words(self, text, before, ends):
        """`cut` where tokens are longer than a character."""
        end = last = 0
        for id, start, stop in self.spans(text, before):
            start = max(start, end)
            last = max(stop, start)
            lead = with_returns(text, end, start, ends)
            yield Token(id, with_returns(text, start, last, ends), lead)
            end = last
        if end < len(text):
            yield Token(self.mask, with_returns(text, end, len(text), ends))

    def spans(self, text, before):
        """Yield (id, start, stop) for the tokens of a text; ids that are no text are [MASK]."""
        if self.tokenizer.kind == "word":
            for match in WORD.finditer(text):
                id = self.tokenizer.index.get(match[0])
                # Other words are spelled in bytes, which are as many tokens without text.
                ids = [id] if id is not None else match[0].encode()
                stops = [match.start()] * (len(ids) - 1) + [match.end()]
                starts = [match.start()] * len(ids)
                yield from zip(ids, starts, stops)
            return
        library = self.tokenizer.library
        special = {self.tokenizer.end_id, self.mask, library.unknown_id}
        for id, start, stop in self.encoded(before + text):
            if stop > len(before):
                start = max(0, start - len(before))
                yield (self.mask if id in special else id), start, stop - len(before)

    def encoded(self, text):
        """Yield (id, start, stop) for the tokens of the library; unknown words are [MASK]."""
        try:
            encoding = self.tokenizer.library.encoding(text)
            yield from ((id, *span) for id, span in zip(encoding.ids, encoding.offsets))
        except UserError:  # it refuses a text for one word: ask for each alone
            for word in re.finditer(r"\w+|[^\w\s]", text):
                try:
                    encoding = self.tokenizer.library.encoding(word[0])
                    spans = zip(encoding.ids, encoding.offsets)
                except UserError:
                    spans = [(self.mask, (0, len(word[0])))]
                yield from ((id, word.start() + a, word.start() + b) for id, (a, b) in spans)

    def written(self, id, token):
        """The bytes of another token in the place of a Token (None: between two tokens)."""
        if self.tokenizer.kind == "char":
            text = self.tokenizer.vocab[id].encode()
        elif self.tokenizer.kind == "byte":
            text = bytes([id])
        else:
            text = self.tokenizer.piece(id).encode()
            if token.lead[-1:].isspace():
                text = text.removeprefix(b" ")
        return self.newline if text == b"\n" else text

    def characters(self):
        """The text of each id, if all ids are characters, otherwise None."""
        if self.tokenizer.kind == "char":
            return self.tokenizer.vocab
        return [chr(i) for i in range(256)] if self.tokenizer.kind == "byte" else None

    def barred(self, vocab_size):
        """(V,) bool: the ids that are not proposed: they are not text, or not on their own."""
        barred = torch.zeros(vocab_size, dtype=torch.bool)
        if self.tokenizer.kind == "byte":
            barred[128:] = True
        elif self.tokenizer.kind == "word":
            barred[:256] = True
        elif not self.by_character:
            special = {*self.tokenizer.special_ids().values(), self.tokenizer.library.unknown_id}
            barred[[id for id in special if id is not None and id < vocab_size]] = True
        for id in (self.tokenizer.end_id, self.mask):
            if id is not None and id < vocab_size:
                barred[id] = True
        return barred

    def reads_as(self, tokens):
        """Whether the text of tokens, where a word was changed, has these ids."""
        if self.by_character:
            return True
        shown = text_of(tokens).replace("\r\n", "\n")
        return [id for id, _, _ in self.spans(shown, "")] == [token.id for token in tokens]


def numbered(tokens):
    """Tokens with their numbers."""
    for number, token in enumerate(tokens):
        token.number = number
        yield token


def is_whole(token):
    """Whether a token is whole characters, so that another can take its place."""
    return bool(token.own) and token.own.decode(errors="replace").encode() == token.own


def text_of(tokens):
    return b"".join(token.lead + token.own for token in tokens).decode(errors="replace")


def begins(token):
    """Whether no character goes on from the token before it."""
    return not token.own or token.own[0] & 0xC0 != 0x80


def finished(tokens, last):
    """The tokens up to number `last`, with those that were changed after it; whole characters."""
    for i, token in enumerate(tokens):
        is_ahead = token.number is not None and token.number > last
        if is_ahead and not token.is_changed and begins(token):
            return tokens[:i]
    return tokens
