"""A tokenizer as a JSON of the tokenizers library, written and read without that library.

kind   in the library
char   a WordLevel model of characters
byte   a byte-level BPE without merges
word   the same with whole words; the bytes spell all others
bpe    what the library has learned
file   the text of a file made elsewhere, as it is; if documents end in one of its tokens, a
       post-processor that changes nothing names it
id     a WordLevel model of numbers, for exports alone: V of them may be too many for a file

All but files have the special tokens [END] (if there are documents), [MASK] = V and [PAD] = V + 1.
The library refuses keys that it does not know, so a file does not name its kind: `describe` guesses
one from the vocabulary, and takes it if this writes the same file.
"""

import contextlib
import json
import re

from support.data.seams import byte_of_letter

# The library writes each byte as a visible letter.
LETTER_OF_BYTE = {byte: letter for letter, byte in byte_of_letter().items()}
BYTES = [LETTER_OF_BYTE[byte] for byte in range(256)]
SPELLS = "##"  # in front of a byte that spells a word
WHOLE = "▁"  # in front of a word that is a token
W = r"\p{L}\p{N}_"  # \w and \s of Python
S = r"\s\x1c-\x1f"
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)


def dumps(content):
    """JSON as the library writes it on one line."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


# ---- Writing
def to_text(kind, vocab, end):
    """The text of a tokenizer.json; kind, vocab and end are those of a Tokenizer.

    Raises ValueError for what the library has no JSON for, or for what `describe` would not give
    back.
    """
    if kind == "id":
        raise ValueError("ids have no text")
    if kind == "file":
        text = vocab if end is False else name_end(vocab, end)
    else:
        text = dumps(to_content(kind, vocab, end))
    if describe(text) != (kind, vocab, end):
        raise ValueError("it is read as another one")
    return text


def to_content(kind, vocab, end):
    """The JSON of any kind but a file, as a dict. Raises ValueError if it cannot have [MASK]."""
    write = dict(char=characters, byte=byte_level, word=words, bpe=json.loads, id=numbers)[kind]
    content = write(vocab)
    if kind == "bpe" and not is_learned(content):
        raise ValueError("it is no byte-level BPE that was learned here")
    tokens = content["model"]["vocab"]
    if kind == "id" and type(end) is int:
        tokens = {"[END]" if i == end else token: i for token, i in tokens.items()}
        content["model"]["vocab"] = tokens
    elif type(end) is not bool:
        raise ValueError("its [END] is one of its own tokens")
    add_specials(content, tokens, end)
    return content


def add_specials(content, tokens, end=False):
    """Add [MASK] and [PAD] to the JSON, as a dict, of a file that has these tokens: name -> id.

    end: whether [END] is added too, before them, or its id. Raises ValueError if there is no room.
    """
    V = len(tokens)
    if sorted(tokens.values()) != list(range(V)):
        raise ValueError(f"some ids below {V} are unused; train with a tokenizer without gaps")
    added = {}
    if end is not False:
        added["[END]"] = V if end is True else end
        V += end is True
    added |= {"[MASK]": V, "[PAD]": V + 1}
    for name, i in added.items():
        if tokens.get(name, i) != i:
            raise ValueError(f"the vocabulary has a token {name} of its own; train without it")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    special = [dict(id=i, content=name) | flags for name, i in added.items()]
    content["added_tokens"] = [*(content.get("added_tokens") or []), *special]


def add_mask(content, tokens, name):
    """Add [MASK] alone, as V, to the JSON of a file that has these tokens: name -> id.

    Raises ValueError if there is no room.
    """
    V = len(tokens)
    if sorted(tokens.values()) != list(range(V)):
        raise ValueError(f"some ids below {V} are unused; train with a tokenizer without gaps")
    if name in tokens:
        raise ValueError(f"the vocabulary has a token {name} of its own; train without it")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    content["added_tokens"] = [
        *(content.get("added_tokens") or []),
        dict(id=V, content=name) | flags,
    ]


def prepend(name, id):
    """A post-processor that puts a special token in front of a text."""
    first = dict(SpecialToken=dict(id=name, type_id=0))
    text, more = (dict(Sequence=dict(id=which, type_id=0)) for which in "AB")
    tokens = {name: dict(id=name, ids=[id], tokens=[name])}
    sequences = dict(single=[first, text], pair=[first, text, more])
    return dict(type="TemplateProcessing", special_tokens=tokens) | sequences


def library(model, pre_tokenizer, decoder):
    """The JSON of the library, of these parts."""
    content = dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None)
    return content | dict(
        pre_tokenizer=pre_tokenizer, post_processor=None, decoder=decoder, model=model
    )


def word_level(tokens):
    vocab = {token: i for i, token in enumerate(tokens)}
    return dict(type="WordLevel", vocab=vocab, unk_token="[UNK]")  # not there: unknown is an error


def bpe(tokens, **settings):
    """A BPE model without merges."""
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None)
    model |= dict(end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, ignore_merges=False)
    vocab = {token: i for i, token in enumerate(tokens)}
    return model | settings | dict(vocab=vocab, merges=[])


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
        bpe(tokens, continuing_subword_prefix=SPELLS, ignore_merges=True),
        dict(type="Sequence", pretokenizers=steps),
        dict(type="Sequence", decoders=[unmark, BYTE_LEVEL]),
    )


def is_learned(content):
    """Whether this is the JSON of a BPE that was learned here."""
    names = ("model", "pre_tokenizer", "decoder")
    types = [(content.get(name) or {}).get("type") for name in names]
    others = ("added_tokens", "normalizer", "post_processor")
    return types == ["BPE", "ByteLevel", "ByteLevel"] and not any(map(content.get, others))


# ---- Reading
def describe(text):
    """The kind, vocab and end of a Tokenizer, from the text of a JSON of the tokenizers library.

    Raises ValueError for what is no JSON. Any JSON that is not written here is a file.
    """
    content = json.loads(text)
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # other parts
        for guess in guesses(content):
            if to_content(*guess) == content:
                return guess
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # no such name
        names = content["post_processor"]["processors"][0]["special_tokens"].values()
        (end,) = (name["ids"][0] for name in names)
        start, stop = span_of(text, "post_processor")
        own = text[start:stop].removeprefix(opening(content, end)).removesuffix("]}")
        before = text[:start] + (own.removeprefix(",") or "null") + text[stop:]
        if name_end(before, end) == text:
            return "file", before, end
    return "file", text, False


def guesses(content):
    """The tokenizers, as (kind, vocab, end), of which one may have this JSON."""
    added = [token["content"] for token in content["added_tokens"]]
    end = added == ["[END]", "[MASK]", "[PAD]"]
    if added[end:] != ["[MASK]", "[PAD]"]:
        return
    tokens = content["model"]["vocab"]
    tokens = sorted(tokens, key=tokens.get)
    if content["model"]["type"] == "WordLevel":
        yield "char", tokens, end
    elif content["decoder"]["type"] == "Sequence":
        byte = byte_of_letter()
        spelled = [token.removeprefix(WHOLE) for token in tokens[256:]]
        yield "word", [bytes(byte[letter] for letter in word).decode() for word in spelled], end
    else:
        yield "byte", None, end
        yield "bpe", dumps(content | dict(added_tokens=[])), end


# ---- The [END] of a file
def name_end(text, end):
    """The text of a file with the post-processor that names a token, by its id, as [END].

    In front of the file's own one it changes nothing. Raises ValueError if that is not possible.
    """
    start, stop = span_of(text, "post_processor")
    before = "" if text[start:stop] == "null" else "," + text[start:stop]
    return f"{text[:start]}{opening(json.loads(text), end)}{before}]}}{text[stop:]}"


def opening(content, end):
    """The beginning of the post-processor that names [END]."""
    added = content.get("added_tokens") or []
    names = [token["content"] for token in added if token["id"] == end]
    if not names:
        raise ValueError(f"{end} is no special token")
    first, second = (dict(Sequence=dict(id=name, type_id=i)) for i, name in enumerate("AB"))
    token = {names[0]: dict(id=names[0], ids=[end], tokens=names[:1])}
    template = dict(type="TemplateProcessing", single=[first], pair=[first, second])
    return f'{{"type":"Sequence","processors":[{dumps(template | dict(special_tokens=token))}'


def span_of(text, name):
    """Where in the text of a JSON object the value of a name is: (start, stop)."""
    space = re.compile(r"\s*")
    read = json.JSONDecoder().raw_decode
    at = text.index("{")
    while True:
        key, at = read(text, space.match(text, at + 1).end())
        colon = space.match(text, at).end()
        start = space.match(text, colon + 1).end()
        _, stop = read(text, start)
        if key == name:
            return start, stop
        at = space.match(text, stop).end()  # a comma, or the end: no key follows that
