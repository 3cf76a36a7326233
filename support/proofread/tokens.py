"""A text as tokens that join to its bytes again, even if a model does not know them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanomdlm.support.data.tokenizer import WORD
from nanomdlm.support.errors import UserError


@dataclass
class Token:
    id: int  # [MASK]: a character that the model has never seen
    own: bytes  # its text
    lead: bytes = b""  # text before it that belongs to no token and stays
    number: int | None = None  # in the file; None: inserted
    is_changed: bool = False


class Cutter:
    """Cuts a text into Tokens that join to its bytes. Line ends \\r\\n are shown as \\n.

    Raises UserError for a tokenizer whose ids have no text.
    """

    def __init__(self, tokenizer):
        if tokenizer.kind == "id":
            raise UserError("this model learned ids, whose text is not known; --fix needs text")
        self.tokenizer = tokenizer
        self.mask = tokenizer.mask_id
        self.by_character = tokenizer.kind in ("char", "byte")
        self.keeps_returns = tokenizer.kind == "char" and "\r" in tokenizer.vocab
        self.newline = b"\n"  # as the text ends its lines

    def tokens(self, text) -> Iterator[Token]:
        """The Tokens of a text, numbered from 0."""
        encoding = "utf-8"
        if self.tokenizer.kind == "byte":  # a character for each byte
            encoding = "latin-1"
            text = text.encode().decode(encoding)
        units = re.findall("." if self.keeps_returns else "\r\n|.", text, re.DOTALL)
        self.newline = b"\r\n" if "\r\n" in units else b"\n"

        def content(start, stop):
            return "".join(units[start:stop]).encode(encoding)

        end = number = 0
        for id, start, stop in self.spans("".join(unit[-1] for unit in units)):
            start = max(start, end)
            stop = max(start, stop)
            yield Token(id, content(start, stop), content(end, start), number)
            end = stop
            number += 1
        if end < len(units):
            yield Token(self.mask, content(end, None), number=number)

    def spans(self, text):
        """Yield (id, start, stop) for the tokens of a text; ids that are no text are [MASK]."""
        if self.by_character:
            ids = {c: i for i, c in enumerate(self.characters())}
            for i, c in enumerate(text):
                yield ids.get(c, self.mask), i, i + 1
        elif self.tokenizer.kind == "word":
            for match in WORD.finditer(text):
                id = self.tokenizer.index.get(match[0])
                # Other words are spelled in bytes, which are as many tokens without text.
                for byte in match[0].encode()[:-1] if id is None else ():
                    yield byte, match.start(), match.start()
                yield match[0].encode()[-1] if id is None else id, *match.span()
        else:
            special = {self.tokenizer.end_id, self.mask, self.tokenizer.library.unknown_id}
            for id, start, stop in self.encoded(text):
                yield (self.mask if id in special else id), start, stop

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
        text = self.tokenizer.token(id, first=False)
        if token and token.lead[-1:].isspace():
            text = text.removeprefix(b" ")
        return self.newline if text == b"\n" else text

    def characters(self):
        """The text of each id, if all ids are characters, otherwise None."""
        if self.tokenizer.kind == "char":
            return self.tokenizer.vocab
        return [chr(i) for i in range(256)] if self.tokenizer.kind == "byte" else None

    def barred(self, vocab_size):
        """(V,) bool: the ids that are not proposed: they are not text, or not on their own."""
        never = self.tokenizer.not_text()
        if self.tokenizer.kind == "byte":
            never |= {*range(128, 256)}
        elif self.tokenizer.kind == "word":
            never |= {*range(256)}
        return torch.tensor([id in never for id in range(vocab_size)])

    def reads_as(self, tokens):
        """Whether the text of tokens, where a word was changed, has these ids."""
        if self.by_character:
            return True
        shown = text_of(tokens).replace("\r\n", "\n")
        return [id for id, _, _ in self.spans(shown)] == [token.id for token in tokens]


def is_whole(token):
    """Whether a token is whole characters, so that another can take its place."""
    return bool(token.own) and token.own.decode(errors="replace").encode() == token.own


def bytes_of(tokens):
    return b"".join(token.lead + token.own for token in tokens)


def text_of(tokens):
    return bytes_of(tokens).decode(errors="replace")


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
