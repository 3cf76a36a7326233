"""A tokenizer of the tokenizers library, and texts and ids that are cut in chunks.

enc: text -> ids and dec: ids -> text. enc(a + b) = enc(a) + enc(b) holds where tokens are
characters or bytes. Elsewhere a word takes the space in front of it (▁the), the beginning of a text
gains one, and a word that goes on is spelled otherwise than one that begins (##ing). So whole texts
are encoded and decoded, and cut:

    b after a         what follows enc(a) in enc(a + b), if enc(a + b) begins with enc(a): then a
                      token ends where a ends. Else there is no cut.
    ids b after ids a what follows dec(a) in dec(a + b).
    b after a gap     b after a letter. Any letter that can be cut off gives the same ids: BPE's
                      merges on both sides of a cut do not depend on each other, the best
                      segmentation of a + b (Unigram) contains the best one of b, and WordPiece goes
                      from left to right. So a space is there or not, as b says, and letters go on
                      with a word.
    a long text       chunks, each after the last CONTEXT characters of the one before it.
"""

import contextlib
import itertools
import json
import re
import unicodedata

from support.environment import optional
from support.errors import UserError

CHUNK = 1 << 16  # characters; the memory that BPE takes grows with the length of a text
CONTEXT = 256  # characters in front of a chunk, far more than a token has
TRIES = 64  # places for a cut, or letters, that are tried
WORDS = 1000  # of a vocabulary, that are tried where it has no letters
# What stands for the text before a gap: first a letter that no token of any tokenizer begins with.
LETTERS = ("ꝡ", *"xqzjkvwybcdfghlmnprstaeiouXQZ")
SPACED = ".,;:!?%"  # marks that a space usually follows
ANY_TEXT = "The value of a class\n"
BROKEN = "\ufffd"  # of a character whose bytes are not complete


def is_space(text):
    """Whether a text begins with a space or a line break."""
    return text[:1].isspace()


def end_of(text):
    """The last CONTEXT characters of a text, from a space on: half of a word may be unknown."""
    space = re.search(r"\s", text[-CONTEXT:])
    return text[-CONTEXT:][space.start() :] if space and len(text) >= CONTEXT else text[-CONTEXT:]


def shared(a, b):
    """How many characters at their beginning two texts have in common."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (c, d) in enumerate(zip(a, b)) if c != d), min(len(a), len(b)))


class Panic(UserError):
    """The tokenizers library failed where it expects no failure; said: what it says of that."""

    def __init__(self, said):
        self.said = " ".join(said.split())[:200]
        fix = "take a tokenizer.json that this library has saved"
        super().__init__(f"the tokenizers library fails with this tokenizer ({self.said}); {fix}")


def guarded(function, *args, **settings):
    """Call a function of the tokenizers library; its panic, a BaseException, is raised as Panic."""
    try:
        return function(*args, **settings)
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise Panic(str(e)) from None


@contextlib.contextmanager
def explain_errors(what):
    """Context manager: turn what the tokenizers library raises into a UserError."""
    try:
        yield
    except UserError as e:
        if not isinstance(e, Panic):
            raise
        raise UserError(f"{what} ({e.said})") from None
    except Exception as e:  # it raises bare Exceptions
        raise UserError(f"{what} ({' '.join(str(e).split())[:200]})") from None


class Library:
    """A tokenizer of the tokenizers library; content: its tokenizer.json.

    Raises as the library does, and Panic. Padding, truncation and BPE's dropout, with which a text
    would get other ids in each call, are off.
    """

    def __init__(self, content):
        tokenizers = optional("tokenizers", "a tokenizer of words or pieces")
        self.content = content
        self.library = guarded(tokenizers.Tokenizer.from_str, content)
        self.library.no_padding()
        self.library.no_truncation()
        if getattr(self.library.model, "dropout", None):
            self.library.model.dropout = None
        self.library.encode_special_tokens = True  # a text that spells one is a text
        vocab = self.library.get_vocab()
        if not vocab:
            raise ValueError("its vocabulary is empty")
        self.size = max(vocab.values()) + 1
        self.cached_letters = None
        self.cached_unknown_id = None
        self.cached_gain = None
        self.cached_dropped = {}  # character -> whether it is dropped
        self.check_no_panic()

    def check_no_panic(self):
        """Raise Panic if the library panics with any words, as with an empty Prepend."""
        try:
            guarded(self.library.encode, ANY_TEXT, add_special_tokens=False)
        except Exception as e:  # others: it does not know these words
            if isinstance(e, Panic):
                raise

    # ---- Encoding
    def encoding(self, text):
        """The library's Encoding of a whole text: ids, and offsets in the text."""
        with explain_errors(f"the tokenizer cannot encode {text[:40]!r}; leave out what it lacks"):
            return guarded(self.library.encode, text, add_special_tokens=False)

    def encode(self, text):
        return self.encoding(text).ids

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

    def letters(self):
        """What may stand for the text before a gap: letters, or words where these are unknown."""
        if self.cached_letters is None:
            vocab = self.library.get_vocab(with_added_tokens=False)
            words = sorted(filter(str.isalpha, vocab), key=vocab.get)[:WORDS]
            kept = filter(self.is_kept, (*LETTERS, *words))
            self.cached_letters = list(itertools.islice(kept, TRIES))
        return self.cached_letters

    def is_kept(self, text):
        """Whether a text has ids from which it comes back, but for spaces around it."""
        with contextlib.suppress(UserError):
            ids = self.encode(text)
            return bool(ids) and self.decode(ids).strip().lower() == text.lower()
        return False

    def letter_before(self, text):
        """The first of the letters after which `text` gets ids; None if there is none."""
        for letter in self.letters():
            with contextlib.suppress(UserError):  # words are not known with a letter before them
                ids = self.after(letter, text)
                if ids is not None and self.fits(letter, text, ids):
                    return letter
        return None

    def fits(self, letter, text, ids):
        """Whether ids after a letter begin with a space if the text does, and only then.

        Also true of a tokenizer that gives both the same ids.
        """
        decoded = self.decode_after(self.encode(letter), ids)
        told = is_space(decoded) == is_space(text)
        return told or not ids or self.after(letter, f" {text}") == ids

    def encode_after_gap(self, text):
        """The ids of a text that follows a gap. Raises UserError if it cannot be cut off."""
        letter = self.letter_before(text)
        if letter is None and self.letters():
            what = f"this tokenizer cannot encode {text[:40]!r} as what follows a gap"
            raise UserError(f"{what}; begin it with a space, or let the gap end with the word")
        return self.after(letter, text) if letter else self.encode(text)

    def go_on(self, before, text):
        """The ids of `text` after the text `before`, whatever lies between them.

        If that is no end of a token: as after a letter, or else as a text of its own.
        """
        if not before:
            return self.encode(text)
        ids = self.after(before, text)
        if ids is None:  # the cut is within a token
            letter = self.letter_before(text[:CONTEXT])
            ids = self.after(letter, text) if letter else None
        return self.encode(text) if ids is None else ids

    def encode_long(self, text, before=""):
        """The ids of a text of any length that goes on after `before`, in bounded memory."""
        places = [self.find_cut(text, end) for end in range(CHUNK, len(text), CHUNK)]
        edges = [0, *(place for place in places if place), len(text)]
        chunks = [text[begin:end] for begin, end in itertools.pairwise(edges)]
        befores = [end_of(before), *(text[i - CONTEXT : i] for i in edges[1:-1])]
        known = self.encode_all(befores)
        both = self.encode_all([a + b for a, b in zip(befores, chunks)])
        ids = []
        for i, (a, b) in enumerate(zip(known, both)):
            is_cut = b[: len(a)] == a
            ids += b[len(a) :] if is_cut else self.go_on(befores[i], chunks[i])
        return ids

    def encode_all(self, texts):
        """The ids of several texts, encoded side by side."""
        try:
            encode = self.library.encode_batch_fast
            encodings = guarded(encode, texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        except Exception:
            for word in " ".join(texts).split():
                self.encode(word)  # names the word that it does not know
            return [self.encode(text) for text in texts]

    def find_cut(self, text, near):
        """A place near this one where tokens end whatever follows; 0 if there is none."""
        low = max(CONTEXT, near - CONTEXT)
        places = sorted(range(low, min(near + CONTEXT, len(text))), key=lambda i: abs(i - near))
        spaces = [i for i in places if text[i].isspace() and not text[i - 1].isspace()]
        for i in [*spaces[:TRIES], *places[:TRIES]]:
            with contextlib.suppress(UserError):
                if self.after(text[i - CONTEXT : i], text[i : i + CONTEXT]) is not None:
                    return i
        return 0

    def what_cannot_be_cut(self, texts):
        """What this tokenizer cannot do with chunks of texts, as words; "" if it can do all."""
        faults = []
        if not any(map(self.letter_before, self.letters()[:TRIES:8])):
            faults.append("a gap cannot end within a word, nor directly before one")
        lengths = [
            (text, n) for text in texts for n in (2 * CONTEXT, 10 * CONTEXT) if n < len(text)
        ]
        if lengths and not any(self.find_cut(text, n) for text, n in lengths):
            faults.append("long texts are cut within tokens")
        return "; ".join(faults)

    # ---- Decoding
    def decode(self, ids):
        """The text of ids from the beginning of a text on."""
        with explain_errors("the tokenizer cannot decode what was written"):
            text = guarded(self.library.decode, ids, skip_special_tokens=False)
        return text.removeprefix(" ") if self.gains_space() else text

    def gains_space(self):
        """Whether encoding gives a text a space in front that decoding leaves there (RoBERTa)."""
        if self.cached_gain is None:
            self.cached_gain = False
            for letter in LETTERS:
                with contextlib.suppress(Exception):  # it is not known
                    ids = guarded(self.library.encode, letter, add_special_tokens=False).ids
                    text = guarded(self.library.decode, ids, skip_special_tokens=False)
                    if text.strip() == letter:
                        self.cached_gain = text.startswith(" ")
                        break
        return self.cached_gain

    def decode_after(self, before, ids):
        """The text of ids after others."""
        whole = self.decode([*before, *ids])
        return whole[shared(self.decode(before), whole) :]

    def decode_each(self, before, n):
        """The texts of the tokens 0 .. n - 1, each after some others."""
        all_ids = [[*before, i] for i in range(n)]
        with explain_errors("the tokenizer cannot decode its own tokens"):
            skip = guarded(self.library.decode, before, skip_special_tokens=False)
            wholes = guarded(self.library.decode_batch, all_ids, skip_special_tokens=False)
        return [whole[shared(skip, whole) :] for whole in wholes]

    def letter_ids(self):
        """Ids that stand for the text before a gap, [] if nothing can."""
        return self.encode(self.letters()[0]) if self.letters() else []

    def forgets_space_after(self, mark):
        """Whether ids do not tell if a space follows this character (WordPiece: punctuation)."""
        with contextlib.suppress(UserError, IndexError):  # no letter is known
            word = self.letters()[-1]
            ids = self.after(mark, word)
            return ids is not None and ids == self.after(mark, f" {word}")
        return False

    def bytes_of(self, id):
        """The bytes of a token that is a part of a character; None if it is not known."""
        token = self.library.id_to_token(id) or ""
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        byte = byte_of_letter()
        return bytes(byte[c] for c in token) if set(token) <= byte.keys() else None

    # ---- What is lost
    def unknown_id(self):
        """The id of what the tokenizer does not know, -1 if there is none."""
        if self.cached_unknown_id is None:
            model = self.library.model
            token = getattr(model, "unk_token", None)
            id = self.library.token_to_id(token) if token else None
            if not hasattr(model, "unk_token"):  # Unigram
                id = json.loads(self.content)["model"].get("unk_id")
            self.cached_unknown_id = -1 if id is None else id
        return self.cached_unknown_id

    def reads_unknown_as(self, id):
        """Whether characters that the tokenizer does not know get this id.

        A tokenizer that spells them in bytes may name such a token and never use it.
        """
        with contextlib.suppress(UserError):
            return id == self.unknown_id() and id in self.encode(LETTERS[0])
        return False

    def check_kept(self, text):
        """Raise UserError if encoding loses characters of a text, but for spaces and accents."""
        advice = "leave it out, or take another model"
        encoding = self.encoding(text)
        for id, (begin, end) in zip(encoding.ids, encoding.offsets):
            if id == self.unknown_id():
                lacks = f"the tokenizer does not know {text[begin:end][:20]!r}"
                raise UserError(f"{lacks} in {text[:40]!r}; {advice}")
        for c in sorted(set(text), key=text.index):
            if self.is_dropped(c):
                where = f"at position {text.index(c)} of {text[:40]!r}"
                raise UserError(f"the tokenizer drops {c!r} {where}; {advice}")

    def is_dropped(self, c):
        """Whether a character changes nothing between two letters."""
        if c not in self.cached_dropped:
            is_kept = c.isspace() or unicodedata.category(c) == "Mn"
            self.cached_dropped[c] = not is_kept and self.changes_nothing(c)
        return self.cached_dropped[c]

    def changes_nothing(self, c):
        """Whether `c` between two letters changes nothing; between two words, if letters fail."""
        x = self.letters()[0] if self.letters() else ""
        for space in ("", " "):
            with contextlib.suppress(UserError):  # no words are known with it
                ids = self.encode(x + space + c + space + x)
                if self.unknown_id() not in ids:
                    return ids == self.encode(x + space + x)
        return False


def byte_of_letter():
    """The letters that byte-level tokenizers write bytes as -> these bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
