"""Tokenizers of Hugging Face's tokenizers library, and texts that continue other texts.

A word includes the space before it (▁the), the beginning of a text gets one, and the continuation
of a word is spelled differently from its beginning (##ing). So

    b after a      is what follows enc(a) in enc(a + b), if that begins with enc(a)
    b after a gap  is b after a letter: if a token ends between them, any other gives the same ids
    a long text    is chunks that begin with a space, each as after a gap
"""

import contextlib
import json
import random
import re
import unicodedata

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.data.tokenizer_json import BYTE_OF
from nanomdlm.support.errors import UserError

CHUNK = 1 << 16  # characters; the memory that BPE takes grows with the length of a text
SPACE = re.compile(r"(?<=\S)\s")  # the first space or line break after a word
# What stands for the text before a gap: first a letter that no token of any tokenizer begins with.
LETTERS = "ꝡxqzjkvwybcdfghlmnprstaeiouXQZ"
TRIES = 64  # words that are tried as such letters, and tokens that are decoded as a trial
BROKEN = "\ufffd"  # of a character whose bytes are not complete


def chunks_at_spaces(text):
    """Yield a text in chunks that begin with a space, except for the first one."""
    begin = 0
    while len(text) - begin > CHUNK:
        space = SPACE.search(text, begin + CHUNK, begin + 2 * CHUNK)
        end = space.start() if space else begin + CHUNK
        yield text[begin:end]
        begin = end
    yield text[begin:]


def folded(text):
    """A text without the features that tokenizers may change: case, accents, white space."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in plain if not c.isspace() and unicodedata.category(c) != "Mn")


@contextlib.contextmanager
def explained(what):
    """Context manager: raise UserError for what the library raises, its panics among them."""
    try:
        yield
    except BaseException as e:
        is_panic = type(e).__name__ == "PanicException"  # no Exception
        if not (is_panic or isinstance(e, Exception)):
            raise
        raise UserError(f"{what} ({' '.join(str(e).split())[:200]})") from None


class HFTokenizer:
    """A tokenizer of the tokenizers library.

    content: its tokenizer.json; UserError if the library cannot read it. in_context: whether ids
    and texts depend on the text before them. Padding, truncation and BPE dropout, which would give
    a text different ids in each call, are off.
    """

    def __init__(self, content, in_context=True):
        tokenizers = optional("tokenizers", "a tokenizer of words or pieces")
        with explained("the tokenizers library cannot read it"):
            self.library = tokenizers.Tokenizer.from_str(content)
        self.library.no_padding()
        self.library.no_truncation()
        self.library.encode_special_tokens = True  # a text that spells one is a text
        model = json.loads(content)["model"]
        if model.get("dropout"):
            self.library.model.dropout = None
        vocab = self.library.get_vocab()
        if not vocab:
            raise UserError("its vocabulary is empty")
        self.size = max(vocab.values()) + 1
        unknown = model.get("unk_token")
        self.unknown_id = self.library.token_to_id(unknown) if unknown else model.get("unk_id")
        # What may stand for the text before a gap: letters, or words where these are unknown.
        self.gains_space = False
        words = sorted(filter(str.isalpha, vocab), key=vocab.get)[:TRIES]
        self.letters = [each for each in (*LETTERS, *words) if in_context and self.is_kept(each)]
        self.letters = self.letters or [""]
        self.before = min(map(self.encode, self.letters), key=len)  # ids of a text before others
        # Whether a text gets a space in front that decoding leaves there, as RoBERTa's.
        self.gains_space = self.decode(self.before).startswith(" ")

    def is_kept(self, text):
        """Whether decoding the ids of a text gives the text back."""
        with contextlib.suppress(UserError):
            return self.decode(self.encode(text)).strip().lower() == text.lower()
        return False

    # ---- Encoding
    def encoding(self, text):
        """The library's Encoding of a whole text: ids, and offsets in the text."""
        with explained(f"the tokenizer cannot encode {text[:40]!r}; leave out what it lacks"):
            return self.library.encode(text, add_special_tokens=False)

    def encode(self, text):
        return self.encoding(text).ids

    def encode_all(self, texts):
        """The ids of several texts, encoded side by side."""
        try:
            with explained("the tokenizer cannot encode a text"):
                encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        except UserError:
            for word in " ".join(texts).split():
                self.encode(word)  # names the word that it does not know
            raise

    def encode_template(self, text):
        """The ids of a text in which special tokens count as such."""
        self.library.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.library.encode_special_tokens = True

    def after(self, before, text):
        """The ids of `text` after the text `before`; None if no token ends between them."""
        known = self.encode(before)
        ids = self.encode(before + text)
        return ids[len(known) :] if ids[: len(known)] == known else None

    def encode_after_gap(self, text):
        """The ids of a text that follows a gap. Raises UserError if it cannot be cut off."""
        for letter in self.letters:
            with contextlib.suppress(UserError):  # words are not known with a letter before them
                if (ids := self.after(letter, text)) is not None:
                    return ids
        raise UserError(f"{text[:40]!r} cannot be encoded after a gap; begin it with a space")

    def encode_long(self, text):
        """The ids of a text of any length, in bounded memory."""
        first, *chunks = chunks_at_spaces(text)
        letter = self.letters[0]
        known = self.encode(letter)
        ids, *others = self.encode_all([first, *(letter + chunk for chunk in chunks)])
        for chunk, found in zip(chunks, others):
            # Only a chunk that begins within a word can be a part of the letter's token.
            goes_on = found[: len(known)] == known
            ids += found[len(known) :] if goes_on else self.encode(chunk)
        return ids

    # ---- Decoding
    def decode(self, ids):
        """The text of ids, as a separate text."""
        return self.decode_each([ids], [])[0]

    def decode_each(self, rows, before):
        """The texts of rows of ids, each after the ids `before`."""
        rows = [[*before, *row] for row in rows]
        with explained("the tokenizer cannot decode its tokens"):
            texts = self.library.decode_batch(rows, skip_special_tokens=False)
            skip = self.library.decode(before, skip_special_tokens=False)
        skip = skip if before or not self.gains_space else " "
        return [text.removeprefix(skip) for text in texts]

    def spellings(self, first):
        """The bytes of each token, at the beginning of a text or within one; UserError if the text
        of several is not that of each, side by side."""
        before = [] if first else self.before
        texts = self.decode_each([[i] for i in range(self.size)], before)
        whole = [i for i, text in enumerate(texts) if BROKEN not in text]
        row = random.Random(0).choices(whole, k=TRIES)
        if before and self.decode_each([row], before) != ["".join(texts[i] for i in row)]:
            raise UserError("the text of this tokenizer's tokens depends on their neighbors")
        return [self.bytes_of(i, text) for i, text in enumerate(texts)]

    def bytes_of(self, id, text):
        """The bytes of a token with this text; it may be a part of a character."""
        if BROKEN in text:
            token = self.library.id_to_token(id)
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                return bytes([int(token[3:5], 16)])
            if set(token) <= BYTE_OF.keys():
                return bytes(BYTE_OF[c] for c in token)
        return text.encode()

    # ---- What is lost
    def check_kept(self, text):
        """Raise UserError if encoding loses characters of a text, except for case and accents."""
        encoding = self.encoding(text)
        lost = [
            text[begin:end]
            for id, (begin, end) in zip(encoding.ids, encoding.offsets)
            if id == self.unknown_id
        ]
        kept = set(folded(self.decode(encoding.ids)))
        lost += [c for c in text if not set(folded(c)) <= kept]
        if lost:
            raise UserError(f"the tokenizer does not know {lost[0][:20]!r} in {text[:40]!r}")

    def forgets_space_after(self, mark):
        """Whether ids do not tell if a space follows this character (WordPiece: punctuation)."""
        with contextlib.suppress(UserError):  # words are not known beside the mark
            word = self.letters[-1]
            return self.encode(f"{mark} {word}") == self.encode(mark + word)
        return False
