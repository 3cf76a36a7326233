"""A tokenizer as JSON of the tokenizers library, written and read without that library.

kind   in the library
char   a WordLevel model of characters
byte   a byte-level BPE without merges
word   the same with whole words; the bytes spell all others
bpe    what the library has learned
file   a file made elsewhere, as it is; if documents end in one of its tokens, a post-processor that
       changes nothing names it
id     a WordLevel model of numbers, for exports alone: V of them may be too many for a file

All but files have the special tokens [END] (if there are documents), [MASK] = V and [PAD] = V + 1.
The library refuses keys that it does not know, so a file cannot name its kind: `describe` takes one
that writes the same file.
"""

import contextlib
import json
import re

# The library writes each byte as a visible letter: one of Latin-1, or one after them.
VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
BYTES = sorted(BYTE_OF, key=BYTE_OF.get)
SPELLS = "##"  # in front of a byte that spells a word
WHOLE = "▁"  # in front of a word that is a token
W = r"\p{L}\p{N}_"  # \w and \s of Python
S = r"\s\x1c-\x1f"
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)


def dumps(content):
    """JSON as the library writes it on one line."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


# ---- Writing
def to_content(kind, vocab, end):
    """The JSON of any kind but a file, as a dict; kind, vocab and end are those of a Tokenizer.

    Raises ValueError if it cannot have [MASK].
    """
    write = dict(char=characters, byte=byte_level, word=words, bpe=json.loads, id=numbers)[kind]
    content = write(vocab)
    tokens = content["model"]["vocab"]
    if kind == "id" and type(end) is int:
        content["model"]["vocab"] = {"[END]" if i == end else t: i for t, i in tokens.items()}
    add_specials(content, tokens, end)
    return content


def add_specials(content, tokens, end=False, names=("[MASK]", "[PAD]")):
    """Add special tokens to the JSON, as a dict, of a file that has these tokens: name -> id.

    end: whether [END] is added too, before them, or its id. Raises ValueError if there is no room.
    """
    V = len(tokens)
    if names and sorted(tokens.values()) != list(range(V)):
        raise ValueError(f"some ids below {V} are unused; train with a tokenizer without gaps")
    named = ["[END]"] * (end is True) + [*names]
    added = {name: V + i for i, name in enumerate(named)}
    for name in added.keys() & tokens.keys():
        raise ValueError(f"the vocabulary has a token {name} of its own; train without it")
    if type(end) is int:
        added = {"[END]": end} | added
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    special = [dict(id=i, content=name) | flags for name, i in added.items()]
    content["added_tokens"] = [*(content.get("added_tokens") or []), *special]


def prepend(name, id):
    """A post-processor that puts a special token in front of a text."""
    first = dict(SpecialToken=dict(id=name, type_id=0))
    text, more = (dict(Sequence=dict(id=which, type_id=0)) for which in "AB")
    tokens = {name: dict(id=name, ids=[id], tokens=[name])}
    sequences = dict(single=[first, text], pair=[first, text, more])
    return dict(type="TemplateProcessing", special_tokens=tokens) | sequences


def library(model, pre_tokenizer, decoder):
    """The JSON of the library, of these parts."""
    parts = dict.fromkeys(("truncation", "padding", "added_tokens", "normalizer"))
    parts |= dict(added_tokens=[], pre_tokenizer=pre_tokenizer, post_processor=None)
    return dict(version="1.0") | parts | dict(decoder=decoder, model=model)


def word_level(tokens):
    vocab = {token: i for i, token in enumerate(tokens)}
    return dict(type="WordLevel", vocab=vocab, unk_token="[UNK]")  # not there: unknown is an error


def bpe(tokens, prefix=None, whole=False):
    """A BPE model without merges."""
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=prefix)
    model |= dict(end_of_word_suffix=None, fuse_unk=False, byte_fallback=False)
    vocab = {token: i for i, token in enumerate(tokens)}
    return model | dict(ignore_merges=whole, vocab=vocab, merges=[])


def split(pattern):
    """A pre-tokenizer that cuts a text at the matches of a pattern."""
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


def characters(vocab):
    return library(word_level(vocab), split(r"[\s\S]"), dict(type="Fuse"))


def numbers(V):
    return library(word_level(map(str, range(V))), dict(type="WhitespaceSplit"), None)


def byte_level(vocab):
    return library(bpe(BYTES), BYTE_LEVEL | dict(add_prefix_space=False), BYTE_LEVEL)


def words(vocab):
    """Words whose ids follow the 256 bytes, which spell all others.

    Each word, in the letters of its bytes, gets a mark in front: with it a known one is in the
    vocabulary. Of an unknown one the mark is dropped, and ## tells its bytes from words of a byte.
    """
    tokens = [SPELLS + letter for letter in BYTES]
    tokens += [WHOLE + "".join(BYTES[byte] for byte in word.encode()) for word in vocab]
    mark = dict(type="Metaspace", replacement=WHOLE, prepend_scheme="always", split=False)
    bytes_of = BYTE_LEVEL | dict(add_prefix_space=False, use_regex=False)
    steps = [split(rf" ?[{W}]+| ?[^{W}{S}]+|[{S}]"), bytes_of, mark]
    unmark = dict(type="Replace", pattern=dict(Regex=f"^({WHOLE}|{SPELLS})"), content="")
    return library(
        bpe(tokens, SPELLS, whole=True),
        dict(type="Sequence", pretokenizers=steps),
        dict(type="Sequence", decoders=[unmark, BYTE_LEVEL]),
    )


# ---- Reading
def describe(content):
    """The (kind, vocab, end) of the Tokenizer whose JSON, by to_content, this is; None: a file."""
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # other parts
        for guess in guesses(content):
            if to_content(*guess) == content:
                return guess
    return None


def guesses(content):
    """The tokenizers, as (kind, vocab, end), of which one may have this JSON."""
    end = content["added_tokens"][0]["content"] == "[END]"
    tokens = content["model"]["vocab"]
    tokens = sorted(tokens, key=tokens.get)
    if content["model"]["type"] == "WordLevel":
        yield "char", tokens, end
    elif content["decoder"]["type"] == "Sequence":
        spelled = [token.removeprefix(WHOLE) for token in tokens[256:]]
        yield "word", [bytes(map(BYTE_OF.get, word)).decode() for word in spelled], end
    else:
        yield "byte", None, end
        parts = [content[name]["type"] for name in ("model", "pre_tokenizer", "decoder")]
        changes = content["normalizer"] or content["post_processor"]
        if parts == ["BPE", "ByteLevel", "ByteLevel"] and not changes:
            yield "bpe", dumps(content | dict(added_tokens=[])), end


# ---- The [END] of a file
def name_end(text, end):
    """The text of a file with the post-processor that names a token, by its id, as [END].

    In front of the file's own one it changes nothing. Raises ValueError if that is not possible.
    """
    added = json.loads(text).get("added_tokens") or []
    (name,) = (token["content"] for token in added if token["id"] == end)
    key = re.search(r'"post_processor"\s*:\s*(?=null|\{)', text)
    if not key:
        raise ValueError("it has no place for a post-processor")
    own, stop = json.JSONDecoder().raw_decode(text, key.end())
    before = "," + text[key.end() : stop] if own else ""
    return f"{text[: key.end()]}{namer(name, end)}{before}]}}{text[stop:]}"


def namer(name, end):
    """The beginning of the post-processor that names [END]; a list goes on."""
    first, second = (dict(Sequence=dict(id=name, type_id=i)) for i, name in enumerate("AB"))
    token = {name: dict(id=name, ids=[end], tokens=[name])}
    template = dict(type="TemplateProcessing", single=[first], pair=[first, second])
    return f'{{"type":"Sequence","processors":[{dumps(template | dict(special_tokens=token))}'


def without_name(text, content):
    """(the text of a file before name_end, the id of its [END] or False); content: its JSON."""
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # no such name
        ((name, token),) = content["post_processor"]["processors"][0]["special_tokens"].items()
        (end,) = token["ids"]
        mark = namer(name, end)
        start = text.index(mark)
        _, stop = json.JSONDecoder().raw_decode(text, start)
        own = text[start + len(mark) : stop].removeprefix(",").removesuffix("]}")
        return text[:start] + (own or "null") + text[stop:], end
    return text, False
