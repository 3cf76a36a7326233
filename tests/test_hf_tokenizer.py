"""Texts that are encoded and decoded in parts have the ids and the spaces of the whole."""

import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizer_kinds
import tokenizers
import torch
from conftest import TINY, Toy, run_mdlm
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import export
import mdlm
import sample
from nanomdlm.support.data import hf_tokenizer, sources
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.data.tokenizer import Tokenizer, build_tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import display, templates
from nanomdlm.support.web import viewer

OWN = ("char", "byte", "word", "bpe")
ALL = (*tokenizer_kinds.KINDS, *OWN)
SENTENCE = "The value of a class"
UNTOLD = -1


@pytest.fixture(scope="module")
def made(pydoc):
    """name -> Tokenizer, made when it is asked for, of 40,000 characters."""
    text = pydoc[:40_000] + f"\n{SENTENCE} (x) the val e"
    known = {}

    def make(name):
        if name not in known and name in OWN:
            known[name] = build_tokenizer(name, 700, False, lambda: [(text, False)], len(text))
        elif name not in known:
            make_kind = tokenizer_kinds.KINDS.get(name, tokenizer_kinds.unknown_words)
            known[name] = Tokenizer("file", make_kind(text).to_str())
        return known[name]

    return make


@functools.cache
def text_of_pydoc():
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))[:40_000]


def filled(made, name, template, text, gap):
    """(Tokenizer, ids of a template whose gap has the tokens of `gap`, its segments as texts)"""
    made = made(name)
    n = len(gap)
    segments = templates.parse(template.replace("█", "█" * n), made, 100)
    ids = templates.to_ids(segments, UNTOLD)
    at = ids.index(UNTOLD)
    ids[at : at + n] = gap
    return ids, templates.to_texts(segments, ids, made)


# ---- Long texts


@pytest.mark.parametrize("name", ALL)
def test_long_texts_have_the_ids_of_the_whole(made, pydoc, monkeypatch, name):
    more = "x" * 1500 + pydoc[:900]
    text = pydoc[:6000] + more * (name not in ("words", "bert", "bert_cased"))  # unknown words
    made = made(name)
    whole = made.library.encode(text) if name in tokenizer_kinds.KINDS else made.encode(text)
    monkeypatch.setattr(hf_tokenizer, "CHUNK", 700)
    ids = made.encode(text)
    if made.kind == "file":
        assert ids[: len(whole) // 2] == whole[: len(whole) // 2], "beyond it no place to cut"
    assert made.decode(ids) == made.decode(whole)


@pytest.mark.parametrize("name", tokenizer_kinds.KEEPS_TEXT)
def test_prepared_text_is_the_text(made, pydoc, tmp_path, name):
    """The training and the validation part are texts of their own."""
    made = made(name)
    text = pydoc[:9000]
    (tmp_path / "t.txt").write_text(text)
    prepare(mdlm.Config(data=str(tmp_path / "t.txt")), tmp_path, made)
    _, arrays, _, _ = sources.open_ids(tmp_path, 8, 0)
    assert "".join(made.decode(ids) for ids in arrays) == text


def test_training_text_ends_with_a_word(made, tmp_path):
    """Wherever nine tenths of the characters are: a tokenizer may know no part of a word."""
    for n in range(0, 30, 3):
        (tmp_path / "t.txt").write_text(f"{SENTENCE}\n" * 30 + "\n" * n)
        prepare(mdlm.Config(data=str(tmp_path / "t.txt")), tmp_path, made("words"))
        _, arrays, _, _ = sources.open_ids(tmp_path, 8, 0)
        assert np.concatenate(arrays).tolist() == made("words").encode(SENTENCE) * 30


# ---- Templates


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_gaps_have_the_ids_of_the_whole_text(made, name, data):
    """Of plain words in any tokenizer; of any text in those that keep it as it is."""
    start = data.draw(st.integers(0, 300))
    text = text_of_pydoc()[100 * start : 100 * start + 90]
    if name not in tokenizer_kinds.KEEPS_TEXT:
        text = " ".join([*re.findall(r"\b[A-Za-z]+\b", text)[1:-1], "the"])
    made = made(name)
    whole = made.encode(text)
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(first + 1, min(len(whole), first + 4)))
    before, gap, after = made.cut(whole, [first, last])
    if before + gap + after != text:
        assert name not in tokenizer_kinds.KEEPS_TEXT
        n = len(before)
        before, gap, after = text[:n], text[n : n + len(gap)], text[n + len(gap) :]
    cut = made.decode(whole[:first])[-1:] + made.decode(whole[:last])[-1:]
    if "\ufffd" in cut or (first and not before):
        return  # within a character, or after a space that the beginning of a text gains
    segments = [each for each in (before, templates.Gap(last - first), after) if each]
    segments = templates.encode_segments(segments, made)
    ids = templates.to_ids(segments, UNTOLD)
    known = [id for id in ids if id != UNTOLD]
    told = known == whole[:first] + whole[last:]
    if not told:  # a word's beginning that no gap precedes; a space that is a token of its own
        begun = before[-1:].strip() and gap[:1].strip()
        part_of_word = name == "word" and (begun or not after[:1].isspace())
        alone = before[-1:].isspace()
        marked = name == "qwen" and after[:1].isalpha()  # it reads a mark with the word after it
        assert part_of_word or alone or marked, (name, before, gap, after)
        return
    text_again = templates.joined(templates.to_texts(segments, whole, made))
    assert text_again == text or text_again.lower() == made.decode(whole).lower()


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "albert", "bert", "gpt2", "qwen"])
def test_words_go_on_after_a_gap(made, name):
    """ "val█e": what follows is no word of its own."""
    gap = made(name).library.after("the val", "u")
    gap = gap or made(name).library.encode_after_gap("u")
    ids, texts = filled(made, name, "the val█e of", "the value of", gap)
    assert templates.joined(texts) == made(name).decode(ids) == "the value of"


@pytest.mark.parametrize("name", tokenizer_kinds.KINDS)
def test_no_space_comes_within_brackets(made, name):
    gap = made(name).library.after("(", "x")
    assert templates.joined(filled(made, name, "of (█) the", "of (x) the", gap)[1]) == "of (x) the"


def test_a_line_break_that_was_filled_is_shown():
    """Of characters without a space: nothing but a space is left out after a hyphen."""
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("ACGT-\n")}, []))
    every = tokenizers.Regex(r"[\s\S]")
    library.pre_tokenizer = pre_tokenizers.Split(every, "isolated")
    library.decoder = decoders.Fuse()
    tokenizer = Tokenizer("file", library.to_str())
    for text in ("AC-█GT", "AC-█"):
        segments = templates.parse(text, tokenizer, 16)
        ids = [5 if id == UNTOLD else id for id in templates.to_ids(segments, UNTOLD)]
        found = templates.joined(templates.to_texts(segments, ids, tokenizer))
        assert found == text.replace("█", "\n") == tokenizer.decode(ids)


def test_a_list_with_a_text_that_the_tokenizer_changes_is_refused(made):
    """Without capitals, "Value" would be left out and the rest proven."""
    pytest.importorskip("outlines_core")
    templates.parse("The [___|value|class] of", made("bert"), 100)
    with pytest.raises(UserError, match="Value"):
        templates.parse("The [___|Value|class] of", made("bert"), 100)


def test_words_that_cannot_go_on_are_refused(made):
    with pytest.raises(UserError):
        templates.parse("the█of a", made("words"), 100)


class Oracle(Toy):
    """A model that knows a text: at each position its token, before all others."""

    def __init__(self, ids, V, other=()):
        T = 24
        table = torch.zeros(T, V)
        table[range(len(ids)), ids] = 20.0
        for place, id in other:
            table[place, id] = 30.0
        super().__init__(lambda xt: table.expand(len(xt), T, V), V, T)

    def parameters(self):
        return iter([torch.zeros(1)])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("place", ["gap", "space", "prompt", "unknown length"])
def test_a_model_that_knows_a_text_writes_it(made, name, place):
    made = made(name)
    ids = made.encode(SENTENCE)
    n = len(made.encode_pair("The", " value")[1])
    template = dict(gap="The{} of a class", space="The {} of a class")
    template |= {"prompt": "The ", "unknown length": "The [___] of a class"}
    if made.space_tokens.any() or place == "gap":
        gap = "█" * n
    else:  # a space is a token of its own
        gap = "█" * (n - 1)
    model = Oracle(ids, made.vocab_size)
    more = {"prompt": dict(length=len(ids)), "unknown length": dict(max_gap=6)}.get(place, {})
    found = sample.write(model, made, template[place].format(gap), temperature=0, **more)
    assert found == [SENTENCE]


@pytest.mark.parametrize(
    "name, template",
    [("llama", "The [___] of a █ class"), ("bert", "The █ of [___]"), ("word", "The █ of [___]")],
)
@pytest.mark.parametrize("end", [False, True])
def test_ranked_fills_show_no_space_that_no_id_has(made, name, template, end):
    """Also where every length puts the gap elsewhere, and the model prefers other tokens."""
    known = made(name)
    known = Tokenizer(known.kind, known.vocab, end)
    V = known.vocab_size
    T = 24
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    logits -= 50 * torch.from_numpy(known.space_tokens)  # hardly ever drawn
    if end:
        logits[:, known.end_id] = 9
    model = Toy(lambda xt: logits.expand(len(xt), T, V), V, T)
    model.parameters = lambda: iter([torch.zeros(1)])
    found = sample.search(model, known, template, top=40, max_gap=4, limit=60)
    assert found
    for one in found:
        at = templates.borrowing(one.segments)
        assert at and all(known.space_tokens[one.ids[i]] for i in at)
        shown = templates.joined(templates.to_texts(one.segments, one.ids, known))
        if name != "bert":  # which forgets capitals, and spaces at punctuation
            assert known.decode(one.ids) == shown
    for text in sample.write(model, known, template, n=2, max_gap=4):
        assert text.startswith("The ") and text != "The "


# ---- Pieces


@pytest.mark.parametrize("name", [*ALL, "id"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_text(made, name, data):
    made = Tokenizer("id", 40, 3) if name == "id" else made(name)
    V = made.vocab_size
    ids = data.draw(st.lists(st.integers(0, V), max_size=30))  # with [MASK]
    pieces = made.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == made.decode(ids)
    edges = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    assert "".join(made.cut(ids, edges)) == made.decode(ids)


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "roberta", "qwen", "byte", "bpe"])
def test_characters_of_several_tokens_are_whole(made, name):
    made = made(name)
    ids = made.encode("é 漢 👩‍👩‍👧 x")
    pieces = made.pieces(ids)
    assert "".join(pieces).strip() == "é 漢 👩‍👩‍👧 x" and "" in pieces
    assert "\ufffd" not in "".join(pieces)
    shown = [made.piece(id) for id in range(made.vocab_size)]
    assert "\ufffd" not in "".join(shown) and "\\xe6" in shown


@pytest.mark.parametrize("name", ["llama", "t5", "albert", "bert", "gpt2", "words"])
def test_what_is_shown_has_its_spaces(made, name, monkeypatch):
    """On the way, with masks; in the terminal, in a page, among the likeliest tokens."""
    made = made(name)
    ids = made.encode(SENTENCE)
    place = len(made.encode("The"))
    end = place + len(made.library.after("The", " value"))
    V = made.vocab_size
    begun = [*ids[:place], *[V] * (end - place), *ids[end:]]
    expected = made.decode(ids).replace(" value", "█" * (end - place))
    assert made.decode(begun) == expected
    watch = SimpleNamespace(tokenizer=made, mask=V, given=[True] * len(ids))
    nothing = [False] * len(ids)
    (line,) = display.TerminalPlayer.lines(watch, begun, nothing, nothing, 200)
    assert re.sub("\x1b.*?m", "", line) == expected.replace("█", "░")
    (line,) = display.TerminalPlayer.lines(watch, ids, nothing, nothing, 200)
    assert re.sub("\x1b.*?m", "", line) == made.decode(ids)
    p = torch.zeros(V)
    p[ids[end]] = 1
    assert display.likeliest(made, p, 1) == [(" of", 1.0)]
    film = viewer.HtmlRecorder(made, torch.tensor(begun), V)
    assert "".join(film.page(ids)["tokens"]) == made.decode(ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prompt, answer", [("The value of", " a class"), ("The value ", "of a")])
def test_prompt_and_answer_are_one_text(made, name, prompt, answer):
    first, second = made(name).encode_pair(prompt, answer)
    assert first + second == made(name).encode(prompt + answer)


# ---- What a tokenizer loses

LOST = {
    "bert": ["a 漢 b", "a\u200bb"],
    "t5": ["a 漢 b"],
    "words": ["the qqzzq of"],
    "unknown words": ["the qqzzq of"],
    "letters": ["a漢b"],
}


@pytest.mark.parametrize("name, text", [(name, text) for name in LOST for text in LOST[name]])
def test_texts_that_a_tokenizer_loses_are_refused(made, name, text):
    model = Oracle([0], made(name).vocab_size)
    for template in (text, f"{text}█", f"█ {text}", f"[___] {text}"):
        with pytest.raises(UserError, match=r"漢|200b|qqzzq"):
            sample.write(model, made(name), template)
    with pytest.raises(UserError):
        made(name).encode_pair(text, " of")


@pytest.mark.parametrize("name", [*tokenizer_kinds.KINDS, "unknown words"])
def test_texts_that_a_tokenizer_keeps_are_taken(made, name):
    """Small letters, accents that it removes and white space are no loss."""
    texts = [SENTENCE, "The  value\n of"]
    if name not in ("words", "unknown words", "letters", "t5", "bert_cased"):
        texts.append("cafe\u0301 of")
    for text in texts:
        assert made(name).encode_lossless(text) == made(name).encode(text)


def test_errors_of_the_library_are_sentences(made, tmp_path, capsys):
    path = tmp_path / "words.json"
    path.write_text(made("words").vocab)
    (tmp_path / "t.txt").write_text("The value of qqzzq\n" * 1000)
    flags = [f"--data={tmp_path / 't.txt'}", f"--tokenizer={path}", f"--out_dir={tmp_path / 'o'}"]
    assert run_mdlm(*TINY, *flags) == 2
    said = capsys.readouterr().err
    assert "t.txt, line 1: the tokenizer cannot encode 'qqzzq'" in said and "Traceback" not in said


@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "gpt2", "qwen", "words"])
def test_exported_tokenizers_gain_no_space_after_a_mask(made, name):
    content, _ = export.to_library(made(name))
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    cut = ("The █ of a class",) if name == "words" else ("The█ of a class", "the val█e of")
    for text in cut:
        ids = library.encode(text.replace("█", "[MASK]"), add_special_tokens=False).ids
        segments = templates.parse(text, made(name), 100)
        assert ids == templates.to_ids(segments, made(name).vocab_size)


# ---- Files that make the tokenizers library choose at random, or panic
def edited(name, **parts):
    """The text of a tokenizer.json of a kind, with settings of its parts changed."""
    content = json.loads(tokenizer_kinds.KINDS[name](text_of_pydoc()).to_str())
    for part, changed in parts.items():
        content[part] = (content[part] or {}) | changed
    return json.dumps(content)


def test_dropout_of_a_file_is_off_in_training_and_exports():
    text = edited("gpt2", model=dict(dropout=0.5))
    noisy = Tokenizer("file", text)
    without = Tokenizer("file", edited("gpt2"))
    assert {tuple(noisy.encode(SENTENCE)) for _ in range(20)} == {tuple(without.encode(SENTENCE))}
    assert noisy.to_file() == text, "a file is kept to the byte"
    content, _ = export.to_library(noisy)
    assert content["model"]["dropout"] is None
    assert content["model"] == export.to_library(without)[0]["model"]


def test_panics_with_some_texts_are_sentences(made, monkeypatch):
    """Other BaseExceptions, as Ctrl-C, are not taken for panics."""
    PanicException = type("PanicException", (BaseException,), {})
    tokenizer = Tokenizer("file", made("gpt2").vocab)
    for error, wanted in ((PanicException, UserError), (KeyboardInterrupt, KeyboardInterrupt)):

        def fails(*_, error=error, **__):
            raise error("no character")

        names = dict.fromkeys(["encode", "decode", "decode_batch", "get_vocab"], fails)
        monkeypatch.setattr(tokenizer.library, "library", SimpleNamespace(**names))
        for call in (tokenizer.encode, lambda _: tokenizer.decode([1])):
            with pytest.raises(wanted, match="no character"):
                call("a")
