"""Tokenizers: characters, bytes, words, BPE, or a file of the tokenizers library."""

import itertools
import json
import re
from collections import Counter

import numpy as np

from support.arguments import check_text, whole_ids
from support.cli import UserError, warn
from support.files import read_json, read_small

KINDS = ("char", "byte", "word", "bpe")
WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # every character is part of exactly one match
BPE_PART = 1 << 16  # characters; the memory that BPE takes grows with the length of a text
SAMPLE = 100 << 20  # characters of training text that words and BPE learn from
# What follows a document in files of the tokenizers library, if --end_token does not say it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


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
    others; False: there is none.
    """

    def __init__(self, kind, vocab=None, end=False):
        self.kind = kind
        self.vocab = vocab
        self.end = end
        if kind == "char":
            size = len(vocab)
            self.table = np.full(max(map(ord, vocab)) + 2, -1, np.int32)  # code point -> id
            self.table[[ord(c) for c in vocab]] = np.arange(size)
        elif kind == "byte":
            size = 256
        elif kind == "word":
            size = 256 + len(vocab)
            self.index = {word: 256 + i for i, word in enumerate(vocab)}
        elif kind in ("bpe", "file"):
            import tokenizers

            self.bpe = tokenizers.Tokenizer.from_str(vocab)
            self.bpe.no_padding()
            self.bpe.no_truncation()
            self.bpe.encode_special_tokens = True  # a text that spells one is a text
            size = max(self.bpe.get_vocab().values()) + 1
        elif kind == "id":
            size = vocab
        else:
            raise ValueError(f"its kind is {str(kind)[:40]!r}")
        self.end_id = size if end is True else end
        if end is False:
            self.end_id = None
        self.vocab_size = size + (end is True)

    def encode_array(self, text):
        """Text -> (n,) integers. Raises UserError naming the first unknown character or id."""
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        if self.kind == "char":
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            ids = self.table[np.minimum(codes, len(self.table) - 1)]  # the last entry is always -1
            if (ids < 0).any():
                i = int((ids < 0).argmax())
                found = f"the character {text[i]!r} at position {i}"
                raise UserError(f"{found} is unknown; remove it, or train on text that has it")
            return ids
        if self.kind == "word":
            ids = []
            for word in WORD.findall(text):
                ids += [self.index[word]] if word in self.index else word.encode()
        elif self.kind in ("bpe", "file"):
            parts = self.bpe.encode_batch_fast(parts_of(text), add_special_tokens=False)
            ids = [i for part in parts for i in part.ids]
        else:
            ids = text.split()
            for i in ids:
                fine = re.fullmatch("[0-9]{1,10}", i) and int(i) < self.vocab
                if not fine or int(i) == self.end_id:
                    raise UserError(f"{i[:20]!r} is no id of a text; give ids below {self.vocab}")
        return np.array(ids, np.int64)

    def encode(self, text):
        return self.encode_array(check_text(text)).tolist()

    def decode(self, ids):
        """Ids -> text; [MASK], the id after the last token, is shown as █."""
        ids = [i for i in whole_ids(ids, self.vocab_size) if i != self.end_id]
        runs = itertools.groupby(ids, key=lambda i: i == self.vocab_size)
        texts = ["█" * len(list(run)) if masked else self.spell(list(run)) for masked, run in runs]
        return (" " if self.kind == "id" else "").join(texts)

    def spell(self, ids):
        if self.kind == "char":
            return "".join(self.vocab[i] for i in ids)
        if self.kind in ("bpe", "file"):
            return self.bpe.decode(ids, skip_special_tokens=False)
        if self.kind == "id":
            return " ".join(map(str, ids))
        spelled = [bytes([i]) if i < 256 else self.vocab[i - 256].encode() for i in ids]
        return b"".join(spelled).decode("utf-8", "replace")

    def to_json(self):
        learned = dict(kind=self.kind, vocab=self.vocab, end=self.end)
        return json.dumps(dict(format="mdlm-tokenizer", version=1, **learned))


def parts_of(text):
    return [text[i : i + BPE_PART] for i in range(0, len(text), BPE_PART)]


def tokenizer_from_json(path):
    """The Tokenizer in a file that to_json wrote; raises UserError for anything else."""
    content = read_json(path, "tokenizer")
    ours = (content.get("format"), content.get("version")) == ("mdlm-tokenizer", 1)
    kind, vocab, end = (content.get(key) for key in ("kind", "vocab", "end"))
    if not ours or type(end) not in (bool, int):
        raise UserError(f"{path} is not a tokenizer that mdlm.py wrote (format version 1)")
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
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path} has a tokenizer that cannot be used: {e}") from e
    return tokenizer


def open_tokenizer(path, end, end_token=""):
    """The Tokenizer of a file of the tokenizers library; end: with the id of [END]."""
    try:
        content = read_small(path)
        tokenizer = Tokenizer("file", content)
        added = tokenizer.bpe.get_added_tokens_decoder()
        specials = {token.content: id for id, token in added.items() if token.special}
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{path} is no file of the tokenizers library: {str(e)[:200]}") from None
    found = [token for token in ((end_token,) if end_token else END_TOKENS) if token in specials]
    if end_token and not found:
        raise UserError(f"--end_token={end_token} is no special token of {path}; give one")
    if end and not found:
        raise UserError(f"{path} has none of {', '.join(END_TOKENS)}; name its --end_token")
    return Tokenizer("file", content, specials[found[0]]) if end else tokenizer


def build_tokenizer(kind, size, end, pieces, train_characters, end_token=""):
    """A Tokenizer for the text of pieces(): pairs (text, whether a document ends)."""
    if kind.endswith(".json"):
        tokenizer = open_tokenizer(kind, end, end_token)
        some = [piece[:BPE_PART] for piece, _ in itertools.islice(pieces(), 100)]
        if any(tokenizer.decode(tokenizer.encode(text)) != text for text in some):
            warn(f"--tokenizer={kind} changes the text: its likelihood is that of what is left")
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
    sample = first_parts(pieces(), min(train_characters, SAMPLE))
    if kind == "bpe":
        return Tokenizer("bpe", train_bpe(sample, size), end)
    counts = Counter()
    for part in sample:
        counts.update(WORD.findall(part))
    words = [word for word, n in counts.most_common(size - 256) if n > 1]
    return Tokenizer("word", words, end)


def first_parts(pieces, characters):
    """The first `characters` of an iterable of (text, ends a document), in small parts."""
    for text, _ in pieces:
        yield from parts_of(text[:characters])
        characters -= min(characters, len(text))


def train_bpe(texts, size):
    """A byte-level BPE of `size` ids, as JSON."""
    import tokenizers

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    settings = dict(initial_alphabet=byte_level.alphabet(), show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, **settings)
    bpe.train_from_iterator(texts, trainer)
    return bpe.to_str()
