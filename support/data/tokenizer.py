"""Tokenizers: characters, bytes, words, BPE, or a file of the tokenizers library."""

import codecs
import contextlib
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable

import numpy as np

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.files import read_json, read_small
from nanomdlm.support.cli.python_arguments import check_text, whole_ids
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data import tokenizer_json
from nanomdlm.support.data.hf_tokenizer import CHUNK, HFTokenizer, explained
from nanomdlm.support.errors import UserError

KINDS = ("char", "byte", "word", "bpe")
LEARNED = ("char", "word", "bpe")  # from a text, which takes a pass over it
WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # every character is part of exactly one match
ADDED = ("[MASK]", "[PAD]")  # by export.py, after all tokens
SAMPLE = 100 << 20  # characters of training text that words and BPE learn from
MANY = 1000  # different characters, more than a few scripts have
TRIED = 1 << 20  # characters of training text with which a file is tried
# Special tokens that end a document in files of the tokenizers library, unless --end names one.
MASKS = ("[MASK]", "<mask>", "<|mask|>")  # tokens that stand for a hidden one, in encoders
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "[END]")


def name_characters(counts, limit=20):
    """Characters and how often they occur, the most frequent first, in words."""
    named = ", ".join(f"{c!r} ({n})" for c, n in counts.most_common(limit))
    more = f" and {len(counts) - limit} more" if len(counts) > limit else ""
    return f"character{'s' * (len(counts) > 1)} {named}{more}"


class Tokenizer:
    """Text <-> ids below `vocab_size` (V; [MASK] is not counted); Tokenizer(kind, ...) is one of

    kind   class         vocab
    char   Characters    list of characters
    byte   Bytes         None
    word   Words         list of words, whose ids follow the 256 bytes; others are spelled in bytes
    bpe    FromLibrary   JSON of the tokenizers library, learned here: it gives any text back
    file   FromLibrary   the same, made elsewhere: some change a text
    id     Numbers       V itself: ids are shown as numbers, as their text is not known

    end: the id of [END], which follows each document and decodes to nothing; True: one after all
    others; False: there is none. mask_id: V, or the [MASK] that the tokenizer of an encoder has,
    which no text may have (networks/network.py sets it).

    Each class has read_vocab() -> the number of tokens, apart from an [END] after all others;
    encode_array(text) -> (n,) integers without [END], or a UserError that names characters without
    an id; and `spelled`: the bytes of all tokens within a text, and at the beginning of one.
    """

    dropped = None  # a Counter, if unknown characters are left out, not refused

    def __new__(cls, kind=None, vocab=None, end=False):
        return super().__new__(CLASSES[kind] if cls is Tokenizer else cls)

    def __init__(self, kind, vocab=None, end=False):
        self.kind = kind
        self.vocab = vocab
        self.end = end
        size = self.read_vocab()
        self.end_id = {True: size, False: None}[end] if isinstance(end, bool) else end
        self.vocab_size = size + (end is True)
        self.mask_id = self.vocab_size

    @staticmethod
    def learn(pieces, size, train_characters):
        """The vocab for the text of pieces(), as build_tokenizer has it."""

    def special_ids(self):
        """Special token -> its id, of a file of the tokenizers library."""
        return {}

    def not_text(self):
        """The ids that are no text of a user: [END], [MASK], and in a file special and unknown."""
        return {self.end_id, self.mask_id}

    # ---- Encoding
    def encode(self, text: str) -> list[int]:
        return self.encode_array(check_text(text)).tolist()

    def encode_lossless(self, text, after_gap=False):
        """The ids of a user's text, which may follow a gap; UserError if they lose some of it."""
        return self.encode(text)

    def encode_pair(self, context, text):
        """The ids of two texts of a user, the second of which continues the first."""
        known = self.encode_lossless(context)
        self.encode_lossless(text)
        ids = self.encode(context + text)
        # How many tokens at the beginning are the same.
        same = min(len(known), len(ids))
        n = next((i for i in range(same) if known[i] != ids[i]), same)
        # A space between them may belong to either. Any other token must not be a part of both.
        if self.decode(known[n:]).strip():
            return known, self.encode_lossless(text, after_gap=True)
        return ids[:n], ids[n:]

    # ---- Decoding
    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; [MASK] is shown as █."""
        largest = max(self.vocab_size - 1, self.mask_id)
        return self.locate(whole_ids(ids, largest), [])[0]

    def cut(self, ids, edges):
        """decode(ids) in parts, cut before the tokens at `edges`, which ascend.

        A character of several tokens belongs to the last of them.
        """
        text, at = self.locate(ids, edges)
        return [text[i:j] for i, j in itertools.pairwise([0, *at, len(text)])]

    def pieces(self, ids, start=0):
        """The text of each token, or of those from `start` on."""
        ids = list(ids)
        return self.cut(ids, range(start, len(ids)))[1:]

    def piece(self, id, first=False):
        """The text of one token, at the beginning of a text or in it; bytes show as \\xe6."""
        return self.token(id, first).decode("utf-8", "backslashreplace")

    def locate(self, ids, edges):
        """(the text of ids, where in it the tokens at `edges` begin); edges: in ascending order."""
        tokens = []
        first = True
        for id in map(int, ids):
            tokens.append(self.token(id, first))
            first = self.begins_text(id, first)
        text = b"".join(tokens).decode("utf-8", "replace")
        if not edges:
            return text, []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begins = [0]
        n = 0  # characters that are complete
        for token in tokens:
            n += len(decoder.decode(token))
            is_broken = decoder.getstate()[0] and text.startswith("\ufffd", n)
            begins.append(n + bool(is_broken))
        return text, [begins[edge] for edge in edges]

    def begins_text(self, before, first):
        """Whether the token after this one begins a text; first: whether this one does."""
        return before == self.end_id

    def token(self, id, first):
        """The bytes of a token, at the beginning of a text or in it. [MASK]: █; [END]: none."""
        if id == self.end_id:
            return b""
        return "█".encode() if id == self.mask_id else self.spelled[first][id]

    @functools.cached_property
    def space_tokens(self):
        """(V,) bool: which tokens of text begin with a space; none if none has more than that."""
        texts = self.spelled[0]
        spaced = np.zeros(self.vocab_size, bool)
        spaced[[i for i, text in enumerate(texts) if text.startswith(b" ")]] = True
        if self.end_id is not None:
            spaced[self.end_id] = False
        longer = any(text.startswith(b" ") and text != b" " for text in texts)
        return spaced & longer

    # ---- Files
    def to_file(self):
        """The text of a tokenizer.json: a JSON of the tokenizers library, or else `to_json`."""
        with contextlib.suppress(ValueError):  # the library has none
            content = tokenizer_json.to_content(self.kind, self.vocab, self.end)
            return tokenizer_json.dumps(content)
        return self.to_json()

    def to_json(self):
        """The small format: earlier runs have it, and all checksums are of it."""
        learned = dict(kind=self.kind, vocab=self.vocab, end=self.end)
        return json.dumps(dict(format="mdlm-tokenizer", version=1, **learned))


class Characters(Tokenizer):
    """A token is a character; others are unknown."""

    def read_vocab(self):
        self.table = np.full(max(map(ord, self.vocab)) + 2, -1, np.int32)  # code point -> id
        self.table[[ord(c) for c in self.vocab]] = np.arange(len(self.vocab))
        return len(self.vocab)

    @staticmethod
    def learn(pieces, size, train_characters):
        seen = np.zeros(0x110000, bool)
        for text, _ in pieces():
            seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
        if (n := seen.sum()) > MANY:
            what = f"the text has {n:,} different characters, each of them a token"
            warn(f"{what}; --tokenizer=bpe learns tokens that are parts of words")
        return [chr(c) for c in seen.nonzero()[0]]

    def encode_array(self, text):
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = self.table[np.minimum(codes, len(self.table) - 1)]  # the last entry is always -1
        if (ids < 0).any():
            unknown = Counter(map(chr, codes[ids < 0].tolist()))
            if self.dropped is None:
                what = f"unknown {name_characters(unknown)}"
                raise UserError(f"{what}; remove them, or train on text that has them")
            self.dropped.update(unknown)
        return ids[ids >= 0]

    @functools.cached_property
    def spelled(self):
        known = [text.encode() for text in self.vocab]
        return known, known


class Bytes(Tokenizer):
    """A token is a byte of UTF-8."""

    spelled = ([bytes([i]) for i in range(256)],) * 2

    def read_vocab(self):
        return 256

    def encode_array(self, text):
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)


class Words(Tokenizer):
    """A token is a frequent word with the space before it, or a byte of another word."""

    def read_vocab(self):
        self.index = {word: 256 + i for i, word in enumerate(self.vocab)}
        return 256 + len(self.vocab)

    @staticmethod
    def learn(pieces, size, train_characters):
        counts = Counter()
        for text in first_chunks(pieces(), min(train_characters, SAMPLE)):
            counts.update(WORD.findall(text))
        return [word for word, n in counts.most_common(size - 256) if n > 1]

    def encode_array(self, text):  # five times as fast as the library
        ids = []
        for word in WORD.findall(text):
            ids += [self.index[word]] if word in self.index else word.encode()
        return np.array(ids, np.int64)

    @functools.cached_property
    def spelled(self):
        known = Bytes.spelled[0] + [text.encode() for text in self.vocab]
        return known, known


class Numbers(Tokenizer):
    """Ids of which no text is known; they are shown with spaces between them."""

    spelled = ([], [])

    def read_vocab(self):
        return self.vocab

    def encode_array(self, text):
        ids = [int(i) if i.isdecimal() else -1 for i in text.split()]
        if any(not 0 <= i < self.vocab or i == self.end_id for i in ids):
            raise UserError(f"{text[:40]!r} is not a list of ids below {self.vocab}")
        return np.array(ids, np.int64)

    def encode_pair(self, context, text):
        return self.encode(context), self.encode(text)

    def begins_text(self, before, first):
        return first and before == self.end_id

    def token(self, id, first):
        if id == self.end_id:
            return b""
        shown = "█" if id == self.mask_id else str(id)
        return (shown if first else f" {shown}").encode()

    def to_file(self):  # V of them may be too many for the library's format
        return self.to_json()


class FromLibrary(Tokenizer):
    """A tokenizer of the tokenizers library. library: its HFTokenizer"""

    def read_vocab(self):
        self.library = HFTokenizer(self.vocab, in_context=self.kind == "file")
        return self.library.size

    @staticmethod
    def learn(pieces, size, train_characters):
        return train_bpe(first_chunks(pieces(), min(train_characters, SAMPLE)), size)

    def encode_array(self, text):
        ids = self.library.encode_long(text)
        self.check_no_end(ids)
        return np.array(ids, np.int64)

    def check_no_end(self, ids):
        """Raise UserError if one of the ids of a text is [END] or [MASK].

        The library finds no special token in a text, but models that see whole words may have it
        in their vocabulary: Unigram, WordLevel, WordPiece, BPE with ignore_merges.
        """
        for id in {self.end_id, self.mask_id}.intersection(ids):
            token = self.library.library.id_to_token(id)
            use = "ends a document" if id == self.end_id else "is [MASK]"
            raise UserError(f"a part of the text is read as {token!r}, which {use}; remove it")

    def encode_lossless(self, text, after_gap=False):
        if self.kind == "file":
            self.library.check_kept(text)
        if self.kind == "bpe" or not after_gap:
            return self.encode(text)
        ids = self.library.encode_after_gap(text)
        self.check_no_end(ids)
        return ids

    def encode_template(self, text):
        """The ids of what a chat template wrote, special tokens among them; UserError for [END]."""
        ids = self.library.encode_template(text)
        self.check_no_end(ids)
        return ids

    def special_ids(self):
        added = self.library.library.get_added_tokens_decoder() if self.kind == "file" else {}
        return {token.content: id for id, token in added.items() if token.special}

    def not_text(self):
        return super().not_text() | {*self.special_ids().values(), self.library.unknown_id}

    @functools.cached_property
    def spelled(self):
        return self.library.spellings(first=False), self.library.spellings(first=True)

    def to_file(self):
        if self.kind == "bpe":
            return super().to_file()
        with contextlib.suppress(ValueError):  # [END] is not a special token of the file
            return (
                self.vocab if self.end is False else tokenizer_json.name_end(self.vocab, self.end)
            )
        return self.to_json()


CLASSES = dict(
    char=Characters, byte=Bytes, word=Words, bpe=FromLibrary, file=FromLibrary, id=Numbers
)


# ---- Files
def describe(path):
    """(kind, vocab, end) of the Tokenizer in a tokenizer.json, as it says; UserError if none is."""
    content = read_json(path, "tokenizer")
    if "format" not in content:
        if ours := tokenizer_json.describe(content):
            return ours
        return "file", *tokenizer_json.without_name(read_small(path), content)
    ours = (content["format"], content.get("version")) == ("mdlm-tokenizer", 1)
    kind, vocab, end = (content.get(key) for key in ("kind", "vocab", "end"))
    if not ours or type(end) not in (bool, int):
        raise UserError(f"{path} is not a tokenizer that mdlm.py wrote (format version 1)")
    return kind, vocab, end


def tokenizer_from_json(path, *described):
    """The Tokenizer in a file that to_file wrote; raises UserError for anything else.

    described: kind, vocab, end to use instead of those in the file
    """
    described = described or describe(path)
    try:
        return Tokenizer(*described)
    except Exception as e:  # whatever a vocabulary of another form leads to
        why = " ".join(str(e).split())[:200]
        raise UserError(f"{path} has a tokenizer that cannot be used ({why})") from None


def tokenizer_of(folder):
    """The Tokenizer of a checkpoint, of an export by export.py --to=hf, or of another model."""
    config = read_json(folder / "config.json", "config")
    kind = config.get("model_type")
    if kind == "mdlm":
        return tokenizer_of_export(folder)
    if kind is not None:
        return tokenizer_of_network(folder, config)
    return tokenizer_from_json(folder / "tokenizer.json")


def tokenizer_of_network(folder, config):
    """Of a model of the transformers library, with this config.json."""
    tokenizer = open_tokenizer(folder / "tokenizer.json", False)
    specials = tokenizer.special_ids()
    end = next((specials[name] for name in END_TOKENS if name in specials), None)
    if "mdlm_shift" in config:  # an export of ours says it
        end = config.get("eos_token_id") if config.get("is_causal") else None
    elif {*MASKS} & {*specials}:  # an encoder, which ends no texts
        end = None
    return tokenizer if end is None else Tokenizer(tokenizer.kind, tokenizer.vocab, end)


def tokenizer_of_export(folder):
    """Of our own network, as export.py has written it: a file has two more special tokens."""
    path = folder / "tokenizer.json"
    tokenizer = tokenizer_from_json(path)
    if tokenizer.kind != "file":
        return tokenizer
    content = read_json(path, "tokenizer")
    added = [each for each in content.get("added_tokens") or [] if each["content"] not in ADDED]
    vocab = tokenizer_json.dumps(content | dict(added_tokens=added))
    name = read_json(folder / "tokenizer_config.json", "tokenizer").get("eos_token")
    end = next((each["id"] for each in added if each["content"] == name), False)
    return tokenizer_from_json(path, "file", vocab, end)


def open_tokenizer(path, end, end_token=""):
    """The Tokenizer of a file of the tokenizers library; end: with the id of [END].

    The tokenizer.json of a run gives the run's tokenizer, with an [END] or without.
    """
    kind, vocab, _ = describe(path)
    tokenizer = tokenizer_from_json(path, kind, vocab, False)
    specials = tokenizer.special_ids() if kind == "file" else {"[END]": True}
    names = [end_token] if end_token else END_TOKENS
    ends = [specials[name] for name in names if name in specials]
    if not ends and (end or end_token):
        raise UserError(f"{path} has no special token {', '.join(names)}; give one as --end")
    return Tokenizer(kind, vocab, ends[0]) if end else tokenizer


# ---- Learning
def build_tokenizer(kind, size, end, pieces, train_characters, end_token=""):
    """A Tokenizer for the text of pieces(): pairs (text, whether a document ends)."""
    if kind.endswith(".json"):
        return open_and_try(kind, end, pieces, end_token)
    if kind in ("word", "bpe") and size <= 256:
        raise UserError(f"--vocab_size={size} is too small; give more than the 256 bytes need")
    return Tokenizer(kind, CLASSES[kind].learn(pieces, size, train_characters), end)


def open_and_try(path, end, pieces, end_token):
    """open_tokenizer, with a warning if it changes the text of pieces()."""
    tokenizer = open_tokenizer(path, end, end_token)
    tokenizer.piece(0)  # refuses one whose ids cannot be shown as text
    with contextlib.suppress(UserError):  # `Source.encode` says where that text is
        for text in first_chunks(pieces(), TRIED):
            if tokenizer.decode(tokenizer.encode(text)) != text:
                what = f"the tokenizer {path} changes the text"
                warn(f"{what}: its likelihood is that of what is left")
                break
    return tokenizer


def first_chunks(pieces, characters):
    """The first `characters` of an iterable of (text, ends a document), in small chunks."""
    for text, _ in pieces:
        text = text[:characters]
        yield from (text[i : i + CHUNK] for i in range(0, len(text), CHUNK))
        characters -= len(text)
        if not characters:
            return


def train_bpe(texts, size):
    """A byte-level BPE of `size` ids, as JSON. A terminal shows the bars of the library."""
    tokenizers = optional("tokenizers", "--tokenizer=bpe")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    settings = dict(initial_alphabet=byte_level.alphabet(), show_progress=sys.stderr.isatty())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, **settings)
    with explained("--tokenizer=bpe cannot be learned"):
        bpe.train_from_iterator(texts, trainer)
    return bpe.to_str()
