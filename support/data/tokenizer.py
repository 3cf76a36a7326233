"""Tokenizers: characters, bytes, words, BPE, or a file of the tokenizers library."""

import bisect
import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from support.arguments import check_text, whole_ids
from support.data import tokenizer_json
from support.data.seams import BROKEN, CHUNK, Library, Panic, guarded, shared
from support.environment import optional
from support.errors import UserError
from support.files import most_bytes, read_json, read_small
from support.terminal import warn

KINDS = ("char", "byte", "word", "bpe")
WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # every character is part of exactly one match
TEXT, MASKED, END = range(3)  # what a stretch of ids is
ADDED = ("[MASK]", "[PAD]")  # by export.py, after all tokens
WINDOW = 4  # tokens; no character has more bytes
SAMPLE = 100 << 20  # characters of training text that words and BPE learn from
# Special tokens that end a document in files of the tokenizers library, unless --end names one.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "[END]")


def name_characters(counts, limit=20):
    """Characters and how often they occur, the most frequent first, in words."""
    named = ", ".join(f"{c!r} ({n})" for c, n in counts.most_common(limit))
    more = f" and {len(counts) - limit} more" if len(counts) > limit else ""
    return f"character{'s' * (len(counts) > 1)} {named}{more}"


class Tokenizer:
    """Text <-> ids below `vocab_size` (V; [MASK] is not counted).

    kind   vocab
    char   list of characters
    byte   None
    word   list of words, whose ids follow the 256 bytes; other words are spelled in bytes
    bpe    JSON of the tokenizers library, learned here: it gives any text back
    file   the same, made elsewhere: some change a text
    id     V itself: ids are shown as numbers, as their text is not known

    end: the id of [END], which follows each document and decodes to nothing; True: one after all
    others; False: there is none. mask_id: the id of [MASK]: V, after all tokens, or a token that
    the tokenizer of an encoder has for it, which no text may have (support/pretrained.py says so).
    """

    def __init__(self, kind, vocab=None, end=False):
        self.kind = kind
        self.vocab = vocab
        self.end = end
        self.spaces = None  # what space_tokens returns
        self.file = None  # what to_file returns
        if kind == "char":
            size = len(vocab)
            if not size:
                raise ValueError("its vocabulary is empty")
            self.table = np.full(max(map(ord, vocab)) + 2, -1, np.int32)  # code point -> id
            self.table[[ord(c) for c in vocab]] = np.arange(size)
        elif kind == "byte":
            size = 256
        elif kind == "word":
            size = 256 + len(vocab)
            self.index = {word: 256 + i for i, word in enumerate(vocab)}
        elif kind in ("bpe", "file"):
            self.library = Library(vocab)
            size = self.library.size
        elif kind == "id":
            size = vocab
        else:
            raise ValueError(f"its kind is {str(kind)[:40]!r}")
        self.drops_unknown = False  # whether unknown characters are left out, not refused
        self.end_id = size if end is True else end
        if end is False:
            self.end_id = None
        self.vocab_size = size + (end is True)
        self.mask_id = self.vocab_size

    def unknown_characters(self, text):
        """How often each character of a text occurs that has no id: a Counter."""
        if self.kind != "char":
            return Counter()
        known = set(self.vocab)
        return Counter({c: n for c, n in Counter(text).items() if c not in known})

    def encode_array(self, text, before=""):
        """Text -> (n,) integers without [END]. Raises UserError naming the first unknown character
        or id, and for a text that would have the id of [END].

        before: the end of the text before this one, on which the ids of a tokenizer.json depend.
        """
        return self.without_end(self.ids_of(text, before))

    def without_end(self, ids):
        """The ids of a text; raises UserError if one of them is [END] or [MASK].

        The library does not match special tokens in a text, but a model that sees the whole word
        may still have it in its vocabulary: Unigram, WordLevel, WordPiece, BPE with ignore_merges.
        """
        if type(self.end) is int and self.end in np.asarray(ids):
            token = self.spell([self.end])
            what = f"a part of the text is read as {token!r}, the token that ends a document"
            raise UserError(f"{what}; remove it from the text, or train with another --end")
        if self.mask_id < self.vocab_size and self.mask_id in np.asarray(ids):
            what = f"a part of the text is read as {self.spell([self.mask_id])!r}, which is [MASK]"
            raise UserError(f"{what}; remove it from the text")
        return ids

    def ids_of(self, text, before):
        """The ids of `encode_array`, [END] among them if the tokenizer has it for the text."""
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        if self.kind == "char":
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            ids = self.table[np.minimum(codes, len(self.table) - 1)]  # the last entry is always -1
            if (ids < 0).any():
                if self.drops_unknown:
                    return ids[ids >= 0]
                unknown = name_characters(Counter(text[i] for i in np.flatnonzero(ids < 0)))
                raise UserError(f"unknown {unknown}; remove them, or train on text that has them")
            return ids
        if self.kind == "word":
            ids = []
            for word in WORD.findall(text):
                ids += [self.index[word]] if word in self.index else word.encode()
        elif self.kind == "file":
            ids = self.library.encode_long(text, before)
        elif self.kind == "bpe":
            ids = list(itertools.chain(*self.library.encode_all(chunks_of(text))))
        else:
            ids = text.split()
            for i in ids:
                fine = re.fullmatch("[0-9]{1,10}", i) and int(i) < self.vocab
                if not fine or int(i) == self.end_id:
                    raise UserError(f"{i[:20]!r} is no id of a text; give ids below {self.vocab}")
        return np.array(ids, np.int64)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(check_text(text)).tolist()

    def encode_lossless(self, text, after_gap=False):
        """The ids of a user's text; raises UserError if encoding would lose some of it.

        after_gap: the text follows a gap, whose tokens are not known yet.
        """
        if self.kind != "file":
            return self.encode(text)
        self.library.check_kept(text)
        if after_gap:
            return self.without_end(self.library.encode_after_gap(text))
        return self.encode(text)

    def encode_template(self, text):
        """The ids of what a chat template wrote, special tokens among them; UserError for [END]."""
        return self.without_end(self.library.encode_template(text))

    def encode_pair(self, context, text):
        """The ids of two texts of a user, the second of which goes on after the first.

        A space between them may be the end of the first or the beginning of the second.
        """
        if self.kind not in ("word", "bpe", "file"):
            return self.encode(context), self.encode(text)
        self.encode_lossless(context)
        self.encode_lossless(text)
        stripped = context.rstrip()
        for before, after in ((context, text), (stripped, context[len(stripped) :] + text)):
            known = self.encode(before)
            ids = self.encode(before + after)
            if ids[: len(known)] == known:
                return known, ids[len(known) :]
        return self.encode(context), self.encode_lossless(text, after_gap=True)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; [MASK] is shown as █."""
        return self.locate(whole_ids(ids, self.last_id, self.mask_id), [])[0]

    @property
    def last_id(self):
        """The largest id of a token or [MASK]."""
        return max(self.vocab_size - 1, self.mask_id)

    def special_ids(self):
        """Special token -> its id, of a file of the tokenizers library."""
        if self.kind != "file":
            return {}
        added = self.library.library.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def cut(self, ids, edges):
        """The texts of ids[: edges[0]], ids[edges[0] : edges[1]] ...; joined they are decode(ids).

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
        text = self.locate([id], [], first)[0]
        known = None
        if BROKEN in text:
            is_byte = self.kind in ("byte", "word") and id < 256
            known = bytes([id]) if is_byte else None
            known = self.library.bytes_of(id) if self.kind in ("bpe", "file") else known
        return text if known is None else known.decode("utf-8", "backslashreplace")

    def space_tokens(self):
        """(V,) bool: which tokens begin with a space; none if no token has more than a space."""
        if self.spaces is None:
            texts = [""] * self.vocab_size
            if self.kind == "word":
                texts = [*map(chr, range(256)), *self.vocab]
            elif self.kind in ("bpe", "file"):
                texts = self.library.decode_each(self.context_ids(), self.library.size)
            texts += [""] * (self.vocab_size - len(texts))  # [END]
            spaced = np.array([text.startswith(" ") for text in texts])
            longer = any(text.startswith(" ") and text != " " for text in texts)
            self.spaces = spaced & longer
        return self.spaces

    def locate(self, ids, edges, first=True):
        """(the text of ids, where in it the tokens at `edges` begin); edges: in ascending order."""
        ids = [int(i) for i in ids]
        edges = list(edges)
        texts = []
        at = [0] * bisect.bisect_left(edges, 1)
        n = 0
        for what, start, stop in self.stretches(ids):
            inner = edges[bisect.bisect_right(edges, start) : bisect.bisect_right(edges, stop)]
            inner = [edge - start for edge in inner]
            if what == TEXT:
                text, places = self.spell_from(ids[start:stop], inner, first)
                first = False
            elif what == MASKED:
                lead = " " * (self.kind == "id" and not first)
                text = lead + "█" * (stop - start)
                places = [len(lead) + edge for edge in inner]
                first = False
            else:
                text = ""
                places = [0] * len(inner)
                first = first or self.kind != "id"  # another text begins
            texts.append(text)
            at += [n + place for place in places]
            n += len(text)
        return "".join(texts), at

    def stretches(self, ids):
        """Runs of tokens, of [MASK] and of [END]: (which, where they start, where they stop)."""

        def what(id):
            return END if id == self.end_id else MASKED if id == self.mask_id else TEXT

        start = 0
        for kind, run in itertools.groupby(ids, key=what):
            stop = start + len(list(run))
            yield kind, start, stop
            start = stop

    def spell_from(self, ids, edges, first):
        """`locate` for ids of text alone.

        first: they begin a text. Otherwise they follow other tokens, for which a letter stands.
        """
        before = [] if first else self.context_ids()
        skipped = self.spell(before)
        whole = self.spell([*before, *ids])
        skip = shared(skipped, whole)
        if self.kind == "char":
            return whole, edges
        if len(edges) <= 2 * WINDOW:
            starts = [shared(self.spell([*before, *ids[:edge]]), whole) for edge in edges]
        else:
            starts = self.starts_by_windows([*before, *ids], whole)
            starts = [starts[len(before) + edge] for edge in edges]
        starts = itertools.accumulate((max(skip, i) for i in starts), max)
        return whole[skip:], [i - skip for i in starts]

    def starts_by_windows(self, ids, whole):
        """The places in `whole`, the text of n ids, where each token begins, and its length: n + 1.

        The text of a token is what it adds to the text of the few tokens before it. Tokens that end
        within a character wait for those that complete it. If the texts of all tokens do not join
        to `whole`, every beginning of ids is decoded.
        """
        starts = [0]
        text = ""
        begin = known = 0  # the window, and how many of its tokens have been spelled
        waiting = []  # texts of the window up to each token that waits
        for stop in range(1, len(ids) + 1):
            both = self.spell(ids[begin:stop])
            waiting.append(both)
            if both.endswith(BROKEN) and stop - known <= WINDOW and stop < len(ids):
                continue
            start = shared(self.spell(ids[begin:known]), both)
            starts += [len(text) + max(0, shared(spelled, both) - start) for spelled in waiting]
            text += both[start:]
            waiting = []
            begin = known
            known = stop
        if text == whole:
            return starts
        return [shared(self.spell(ids[:stop]), whole) for stop in range(len(ids) + 1)]

    def context_ids(self):
        """Ids that stand for a text before others, where their text depends on that."""
        if self.kind == "file":
            return self.library.letter_ids()
        return [0] * (self.kind == "id")

    def spell(self, ids):
        """The text of ids without [MASK] and [END], as a text of its own."""
        if self.kind == "char":
            return "".join(self.vocab[i] for i in ids)
        if self.kind in ("bpe", "file"):
            return self.library.decode(ids)
        if self.kind == "id":
            return " ".join(map(str, ids))
        spelled = [bytes([i]) if i < 256 else self.vocab[i - 256].encode() for i in ids]
        return b"".join(spelled).decode("utf-8", "replace")

    def to_file(self):
        """The text of a tokenizer.json: a JSON of the tokenizers library, or else `to_json`."""
        if self.file is None:
            try:
                self.file = tokenizer_json.to_text(self.kind, self.vocab, self.end)
            except ValueError:  # the library has none
                self.file = self.to_json()
        return self.file

    def to_json(self):
        """The small format: earlier runs have it, and all checksums are of it.

        Raises UserError for more than tokenizer_from_json reads.
        """
        learned = dict(kind=self.kind, vocab=self.vocab, end=self.end)
        text = json.dumps(dict(format="mdlm-tokenizer", version=1, **learned))
        most = most_bytes("tokenizer.json")
        if len(text) > most:
            what = f"the tokenizer takes {len(text)} bytes in a checkpoint, more than {most}"
            raise UserError(f"{what}; take one with a smaller vocabulary")
        return text


def chunks_of(text):
    return [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)]


def describe(path):
    """(kind, vocab, end) of the Tokenizer in a tokenizer.json, as it says; UserError if none is."""
    content = read_json(path, "tokenizer")
    if "format" not in content:
        return tokenizer_json.describe(read_small(path))
    ours = (content["format"], content.get("version")) == ("mdlm-tokenizer", 1)
    kind, vocab, end = (content.get(key) for key in ("kind", "vocab", "end"))
    if not ours or type(end) not in (bool, int):
        raise UserError(f"{path} is not a tokenizer that mdlm.py wrote (format version 1)")
    return kind, vocab, end


def tokenizer_from_json(path):
    """The Tokenizer in a file that to_file wrote; raises UserError for anything else."""
    kind, vocab, end = describe(path)
    try:
        tokenizer = Tokenizer(kind, vocab, end)
        texts = "".join(vocab) if kind in ("char", "word") else ""
        texts.encode()  # no halves of surrogate pairs
        if texts and not (type(vocab) is list and len(set(vocab)) == len(vocab)):
            raise ValueError("its vocabulary is no list of different texts")
        if kind == "id" and not (type(vocab) is int and 0 < vocab < 1 << 31):
            raise ValueError("its vocabulary is no number of ids")
        if type(end) is int and not 0 <= end < tokenizer.vocab_size:
            raise ValueError(f"[END] is {end}, which is no id")
        every_byte = "".join(map(chr, range(256)))
        if kind == "bpe" and tokenizer.decode(tokenizer.encode(every_byte)) != every_byte:
            raise ValueError("decoding does not restore the text")
    except Panic as e:
        raise UserError(f"{path} cannot be used: {e}") from None
    except UserError:  # that library is missing
        raise
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path} has a tokenizer that cannot be used: {e}") from e
    return tokenizer


def tokenizer_of(folder):
    """The Tokenizer of a checkpoint, or of what export.py --to=hf wrote of a network of ours."""
    path = folder / "tokenizer.json"
    config = read_json(folder / "config.json", "config")
    tokenizer = tokenizer_from_json(path)
    if config.get("model_type") != "mdlm" or tokenizer.kind != "file":
        return tokenizer
    content = read_json(path, "tokenizer")
    added = [
        token for token in (content.get("added_tokens") or []) if token["content"] not in ADDED
    ]
    bare = Tokenizer("file", tokenizer_json.dumps(content | dict(added_tokens=added)))
    name = read_json(folder / "tokenizer_config.json", "tokenizer").get("eos_token")
    specials = bare.special_ids()
    return with_end(bare, specials[name], name) if name in specials else bare


def open_tokenizer(path, end, end_token=""):
    """The Tokenizer of a file of the tokenizers library; end: with the id of [END].

    The tokenizer.json of a run gives the run's tokenizer, with an [END] or without.
    """
    try:
        content = read_small(path)
        if "mdlm-tokenizer" in content[:100]:  # of an earlier run
            earlier = tokenizer_from_json(path)
            if earlier.kind == "id":
                raise UserError(f"{path} shows numbers, no text; give another tokenizer.json")
            kind, vocab = earlier.kind, earlier.vocab
        else:
            kind, vocab, _ = tokenizer_json.describe(content)
        tokenizer = Tokenizer(kind, vocab)
        specials = {"[END]": True}
        if kind == "file":
            specials = tokenizer.special_ids()
    except Panic as e:
        raise UserError(f"{path} cannot be used: {e}") from None
    except UserError:  # it cannot be read, or that library is missing
        raise
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path} is no file of the tokenizers library: {str(e)[:200]}") from None
    ends = [token for token in ((end_token,) if end_token else END_TOKENS) if token in specials]
    if end_token and not ends:
        raise UserError(f"--end={end_token} is no special token of {path}; give one")
    if end and not ends:
        raise UserError(f"{path} has none of {', '.join(END_TOKENS)}; name its --end")
    return with_end(tokenizer, specials[ends[0]], ends[0]) if end else tokenizer


def with_end(tokenizer, end, name):
    """The Tokenizer of a file with this id as [END], or with True.

    name: how --end may call it. Raises UserError if it stands for unknown characters: each of them
    would end a document.
    """
    if tokenizer.kind == "file" and end is not True and tokenizer.library.reads_unknown_as(end):
        what = f"--end={name} is the token of all characters that the tokenizer does not know"
        raise UserError(f"{what}: each would end a document; give another token")
    return Tokenizer(tokenizer.kind, tokenizer.vocab, end)


def changes(tokenizer, text):
    """Whether a tokenizer does not give a text back; False if it cannot encode the text."""
    with contextlib.suppress(UserError):  # `Source.encode` says where that text is
        return tokenizer.decode(tokenizer.encode(text)) != text
    return False


def build_tokenizer(kind, size, end, pieces, train_characters, end_token=""):
    """A Tokenizer for the text of pieces(): pairs (text, whether a document ends)."""
    if kind.endswith(".json"):
        tokenizer = open_tokenizer(kind, end, end_token)
        some = [piece[:CHUNK] for piece, _ in itertools.islice(pieces(), 100)]
        if any(changes(tokenizer, text) for text in some):
            warn(f"the tokenizer {kind} changes the text: its likelihood is that of what is left")
        if tokenizer.kind != "file":  # it gives any text back, in chunks too
            return tokenizer
        if cannot := tokenizer.library.what_cannot_be_cut(some[:3]):
            warn(f"the tokenizer {kind}: {cannot}")
        return tokenizer
    if kind == "byte":
        return Tokenizer("byte", None, end)
    if kind == "char":
        seen = np.zeros(0x110000, bool)
        for text, _ in pieces():
            seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
        return Tokenizer("char", [chr(c) for c in seen.nonzero()[0]], end)
    if size <= 256:
        raise UserError(f"--vocab_size={size} is too small; give more than the 256 bytes take")
    sample = first_chunks(pieces(), min(train_characters, SAMPLE))
    if kind == "bpe":
        return Tokenizer("bpe", train_bpe(sample, size), end)
    counts = Counter()
    for text in sample:
        counts.update(WORD.findall(text))
    words = [word for word, n in counts.most_common(size - 256) if n > 1]
    return Tokenizer("word", words, end)


def first_chunks(pieces, characters):
    """The first `characters` of an iterable of (text, ends a document), in small chunks."""
    for text, _ in pieces:
        yield from chunks_of(text[:characters])
        characters -= min(characters, len(text))


def train_bpe(texts, size):
    """A byte-level BPE of `size` ids, as JSON."""
    tokenizers = optional("tokenizers", "--tokenizer=bpe")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    settings = dict(initial_alphabet=byte_level.alphabet(), show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, **settings)
    guarded(bpe.train_from_iterator, texts, trainer)
    return bpe.to_str()
