"""From text to ids on disk: sources, tokenizers, folders. Nothing here is about diffusion; see mdlm.py."""

import codecs
import json
import os
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from common import Refusal, download, read_json

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def read_text(path, size=1 << 24):
    """Stream a UTF-8 file as texts of about `size` characters, cut behind a line's end where there is one."""
    decoder, rest, raw = codecs.getincrementaldecoder("utf-8")(), "", True
    try:
        f = open(path, "rb")
    except OSError as e:
        raise Refusal(f"--data={path} cannot be read ({e.strerror}); give a text file") from None
    with f:
        if f.read(3) != codecs.BOM_UTF8:
            f.seek(0)
        while raw:
            at = f.tell() - len(decoder.getstate()[0])  # it may hold the first bytes of a character
            raw = f.read(size)
            try:
                rest += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:
                raise Refusal(f"--data={path} is not UTF-8 text (byte {at + e.start}); "
                              "convert it with iconv, or give a folder with train.bin and val.bin") from None
            cut = rest.rfind("\n") + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def make_patterns(n, seed):
    """(n, 64) uint8: each row a random pattern of 2 to 4 of the 15 symbols, repeated."""
    rng = np.random.default_rng(seed)
    length, symbols = rng.integers(2, 5, (n, 1)), rng.integers(0, 15, (n, 4), dtype=np.uint8)
    return np.take_along_axis(symbols, np.arange(64)[None] % length, 1)


def patterns_entropy():
    """Exact entropy of make_patterns, nats per token; sequences of two patterns ('ab', 'abab') are merged."""
    code, p = [], []
    for length in (2, 3, 4):
        symbols = np.indices((15,) * length).reshape(length, -1).astype(np.int64)
        code.append(sum(symbols[i % length] * 15**i for i in range(12)))  # 12 symbols tell sequences apart
        p.append(np.full(15**length, 1 / 3 / 15**length))
    _, which = np.unique(np.concatenate(code), return_inverse=True)
    p = np.bincount(which, np.concatenate(p))
    return float(-(p * np.log(p)).sum() / 64)


def shakespeare():
    """The path of tiny Shakespeare, downloaded once. Raises OSError or RuntimeError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "mdlm" / "tinyshakespeare.txt"
    download(SHAKESPEARE_URL, SHAKESPEARE_SHA256, path)
    return path


def find_text(name):
    """The value of --data -> a function that streams its texts, or None for patterns."""
    if name == "shakespeare":
        try:
            path = shakespeare()
            return lambda: read_text(path)
        except (OSError, RuntimeError) as e:
            name = "pydoc"
            print(f"Shakespeare cannot be downloaded ({e}); training on pydoc, Python's own reference",
                  file=sys.stderr)
    if name == "pydoc":
        try:
            from pydoc_data.topics import topics
            return lambda: ["\n\n".join(topics[key] for key in sorted(topics))]
        except ImportError:
            name = "patterns"
            print("this Python has no pydoc_data; training on synthetic patterns", file=sys.stderr)
    if name != "patterns" and not Path(name).is_file():
        raise Refusal(f"--data={name} does not exist; give a text file, a folder with train.bin and val.bin, "
                      "shakespeare, patterns or pydoc")
    return None if name == "patterns" else lambda: read_text(name)


def split_documents(texts, separator, size=1 << 24):
    """Stream (piece, ends a document) of a stream of texts; empty documents vanish.

    A document longer than `size` characters comes in several pieces, so that memory is bounded.
    """
    if not separator:
        yield from ((text, False) for text in texts)
        return
    rest = ""
    for text in texts:
        *documents, rest = (rest + text).split(separator)
        yield from ((d, True) for d in documents if d)
        if len(rest) > size + len(separator):  # its end may be the beginning of a separator
            yield rest[:-len(separator)], False
            rest = rest[-len(separator):]
    if rest:
        yield rest, True


# ------------------------------------------------------------------------------------------------------------
# Tokenizers


class Tokenizer:
    """Text <-> ids below `vocab_size` (V, without [MASK]).

    kind   char, byte, word (lossless: an unseen word is spelled in bytes), bpe, or id: numbers without a text
    vocab  the characters; the words, whose ids follow 256 bytes; BPE as JSON; for id how many there are
    end    the last id is [END], which follows each document and decodes to nothing
    """

    WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # every character belongs to exactly one match

    def __init__(self, kind, vocab=None, end=False):
        self.kind, self.vocab = kind, vocab
        if kind == "char":
            self.table = np.full(max(map(ord, vocab)) + 2, -1, np.int32)  # the last serves all higher codes
            self.table[[ord(c) for c in vocab]] = np.arange(len(vocab))
        elif kind == "word":
            self.index = {w: 256 + i for i, w in enumerate(vocab)}
        elif kind == "bpe":
            from tokenizers import Tokenizer as BPE
            self.bpe = BPE.from_str(vocab)
            if sorted(self.bpe.get_vocab().values()) != list(range(self.bpe.get_vocab_size())):
                raise ValueError("its ids have holes")
        size = {"char": lambda: len(vocab), "byte": lambda: 256, "word": lambda: 256 + len(vocab),
                "bpe": lambda: self.bpe.get_vocab_size(), "id": lambda: vocab}[kind]()
        self.end_id = size if end else None
        self.vocab_size = size + end

    def encode_array(self, text):
        """Text -> (n,) integer array. Raises Refusal naming the first unknown character and its position."""
        if self.kind == "char":
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            ids = self.table[np.minimum(codes, len(self.table) - 1)]
            if (ids < 0).any():
                i = int((ids < 0).argmax())
                raise Refusal(f"the character {text[i]!r} at position {i} is none of the {len(self.vocab)} "
                              "that the model knows; leave it out, or train on a text that has it")
            return ids
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        if self.kind == "word":
            words = self.WORD.findall(text)
            return np.array([i for w in words
                             for i in ([self.index[w]] if w in self.index else w.encode())], np.int64)
        if self.kind == "bpe":  # in parts: the memory that BPE takes grows with the length of a text
            parts = re.findall(r"(?s).{1,65536}", text)
            return np.array([i for e in self.bpe.encode_batch_fast(parts) for i in e.ids], np.int64)
        wrong = [i for i in text.split() if not re.fullmatch("[0-9]{1,10}", i) or int(i) >= self.vocab]
        if wrong:
            raise Refusal(f"{wrong[0][:20]!r} is none of this model's ids; give numbers below {self.vocab}, "
                          "separated by spaces")
        return np.array(text.split(), np.int64)

    def encode(self, text):
        return self.encode_array(text).tolist()

    def knows(self, text):
        try:
            return bool(self.encode(text))
        except Refusal:
            return False

    def decode(self, ids):
        ids = [int(i) for i in ids if i != self.end_id]
        if self.kind == "char":
            return "".join(self.vocab[i] for i in ids)
        if self.kind == "bpe":
            return self.bpe.decode(ids)
        if self.kind == "id":
            return " ".join(map(str, ids))
        return b"".join(bytes([i]) if i < 256 else self.vocab[i - 256].encode()
                        for i in ids).decode("utf-8", "replace")

    def to_json(self):
        return json.dumps(dict(format="mdlm-tokenizer", version=1, kind=self.kind, vocab=self.vocab,
                               end=self.end_id is not None))


def tokenizer_from_json(path):
    """The Tokenizer that to_json wrote to a file; anything else is refused."""
    d = read_json(path, "tokenizer")
    kind, vocab, end = str(d.get("kind")), d.get("vocab"), d.get("end")
    strings = (isinstance(vocab, list) and all(isinstance(v, str) for v in vocab)
               and len(set(vocab)) == len(vocab) and not re.search("[\ud800-\udfff]", "".join(vocab)))
    fits = dict(char=strings and vocab and all(len(v) == 1 for v in vocab), word=strings,
                bpe=isinstance(vocab, str), byte=vocab is None, id=type(vocab) is int and 0 < vocab < 1 << 31)
    if (d.get("format"), d.get("version")) == ("mdlm-tokenizer", 1) and type(end) is bool and fits.get(kind):
        probe = "".join(map(chr, range(256)))
        try:
            tokenizer = Tokenizer(kind, vocab, end)
            if kind == "bpe" and tokenizer.decode(tokenizer.encode(probe)) != probe:
                raise ValueError("it does not give text back as it was")
            return tokenizer
        except ImportError:
            raise Refusal("this model's tokenizer is BPE, which needs: pip install tokenizers") from None
        except Exception as e:  # for JSON of another kind the tokenizers library raises a bare Exception
            raise Refusal(f"{path} holds no BPE that can be read: {e}") from e
    raise Refusal(f"{path} is no tokenizer of this program, version 1; take the one that mdlm.py wrote")


def build_tokenizer(kind, size, end, pieces, train_characters):
    """A Tokenizer for pieces() of (text, ends a document); words and BPE learn from the training part."""
    if kind == "byte":
        return Tokenizer("byte", None, end)
    if kind == "char":
        seen = np.zeros(0x110000, bool)
        for text, _ in pieces():
            seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
        return Tokenizer("char", [chr(c) for c in seen.nonzero()[0]], end)
    if size <= 256:
        raise Refusal(f"--vocab_size={size} is too small for --tokenizer={kind}, "
                      "where 256 ids are the bytes; give more")

    def training_text():
        left = min(train_characters, 100 << 20)
        for text, _ in pieces():
            for i in range(0, max(0, min(left, len(text))), 1 << 16):  # in small parts, as in encode_array
                yield text[i:min(i + (1 << 16), left)]
            left -= len(text)

    if kind == "word":
        counts = Counter()
        for text in training_text():
            counts.update(Tokenizer.WORD.findall(text))
        return Tokenizer("word", [w for w, n in counts.most_common(size - 256) if n > 1], end)
    try:
        import tokenizers
    except ImportError:
        raise Refusal("--tokenizer=bpe needs the package tokenizers: pip install tokenizers") from None
    bpe, alphabet = (tokenizers.Tokenizer(tokenizers.models.BPE()),
                     tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(training_text(), trainer)
    return Tokenizer("bpe", bpe.to_str(), end)


# ------------------------------------------------------------------------------------------------------------
# Folders of ids


def open_ids(folder, T, V):
    """What is in a folder of ids: (meta.json as a dict, [train, val] memory-mapped, tokenizer, checksum).

    One in nanoGPT's format has no meta.json, {}, and maybe no tokenizer.json: then ids are shown, below V or,
    if that is 0, up to the largest. Raises Refusal for foreign ids and for files missing, damaged or shorter
    than T tokens.
    """
    folder, arrays = Path(folder), []
    meta = read_json(folder / "meta.json", "data") if (folder / "meta.json").exists() else {}
    dtype, entropy, characters = meta.get("dtype", "uint16"), meta.get("entropy"), meta.get("characters")
    if (dtype not in ("uint8", "uint16", "int32") or type(entropy) not in (float, type(None))
            or characters is not None and (type(characters) is not list or
                                           [type(n) for n in characters] != [int, int])):
        raise Refusal(f"{folder}/meta.json is not one of ours (dtype, characters or entropy); remove it")
    dtype = np.dtype(dtype)
    for file in (folder / "train.bin", folder / "val.bin"):
        size = file.stat().st_size if file.is_file() else -1
        if size < 0 or size % dtype.itemsize:
            raise Refusal(f"{file} is {'missing' if size < 0 else 'cut off within an id'}; "
                          f"a folder of data holds train.bin and val.bin, {dtype} ids")
        if size < T * dtype.itemsize:
            raise Refusal(f"--block_size={T} is longer than {file.name}, which has "
                          f"{size // dtype.itemsize} tokens; give more text or a smaller block")
        arrays.append(np.memmap(file, dtype, mode="c"))  # copy on write: torch wants writable arrays
    parts = [a[i:i + (1 << 24)] for a in arrays for i in range(0, len(a), 1 << 24)]
    smallest, largest = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
    known = folder / "tokenizer.json"
    tokenizer = tokenizer_from_json(known) if known.exists() else Tokenizer("id", V or largest + 1)
    if smallest < 0 or largest >= tokenizer.vocab_size:
        raise Refusal(f"{folder} has ids {smallest} to {largest}, but V is {tokenizer.vocab_size}; "
                      "check tokenizer.json or --vocab_size")
    checksum = zlib.crc32(tokenizer.to_json().encode())  # a run resumes on exactly its data
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return meta, arrays, tokenizer, checksum
