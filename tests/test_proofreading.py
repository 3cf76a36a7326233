"""Proofreading: mistakes are found and repaired, and everything else comes back byte for byte."""

import io
import itertools
import json
import os
import sys

import pytest
import tokenizer_kinds
import torch
from conftest import ROOT, Toy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reliability import small_disk

import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.proofread import proofreader, races
from nanomdlm.support.proofread.proofreader import Proofreader, Words
from nanomdlm.support.proofread.races import Edit
from nanomdlm.support.proofread.tokens import Cutter, Token
from nanomdlm.support.run import folder as run_folder

LETTERS = "abcdefghijklmnopqrstuvwxyz\n"
V = len(LETTERS)
LINE = LETTERS * 4


def alphabet(T=32, letters=LETTERS, **config):
    """A model of a language that says the alphabet again and again, and its tokenizer.

    Each of the eight tokens around a position votes for what should stand there: nearer ones more,
    and those before it more, so that a missing token is doubtful.
    """

    def logits(xt):
        assert xt.shape[1] == T
        votes = torch.zeros(*xt.shape, V + 1)
        for d in (-4, -3, -2, -1, 1, 2, 3, 4):
            seen = xt.roll(d, 1)
            wanted = (seen + d) % V
            at = torch.arange(xt.shape[1])
            is_known = (seen != V) & (at >= d) & (at < xt.shape[1] + d)
            weight = (3.0 if d > 0 else 1.5) / abs(d) ** 0.5
            votes.scatter_add_(2, wanted[..., None], weight * is_known[..., None])
        return 3 * votes[..., :V]

    return Toy(logits, V, T, **config), Tokenizer("char", list(letters))


@pytest.mark.parametrize(
    "kind, wrong, before, after",
    [
        ("substitution", "abcdefghizklmnop", "z", "j"),
        ("insertion", "abcdefghiklmnop", "", "j"),
        ("deletion", "abcdefghijqklmnop", "q", ""),
        ("swap", "abcdefghjiklmnop", "ji", "ij"),
    ],
)
def test_every_kind_of_mistake_is_repaired(kind, wrong, before, after):
    text = LETTERS + wrong + "qrstuvwxyz\n" + LETTERS
    fixed = sample.fix(*alphabet(), text)
    assert fixed.text == LETTERS * 3
    [change] = fixed.changes
    assert (change.kind, change.before, change.after) == (kind, before, after)
    assert text[change.position :].startswith(before) and change.gain > 0
    assert (change.line, change.column) == (2, change.position - len(LETTERS) + 1)


def keep_all(monkeypatch):
    for name in ("PRUNE", "SLACK"):
        monkeypatch.setattr(proofreader, name, 1000.0)


def test_the_gain_is_the_exact_likelihood(monkeypatch):
    """log p(R | all others) by the chain rule, before and after, in a world where it is known."""
    V = 5
    T = 12
    table = torch.randn(997, T, V, generator=torch.Generator().manual_seed(0))
    power = torch.randint(1, 997, (T,), generator=torch.Generator().manual_seed(1))
    model = Toy(lambda xt: table[(xt * power).sum(-1) % 997], V, T)
    reader = Proofreader(model, Tokenizer("char", list("abcde")))
    ids = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]  # an insertion has room

    def direct(text, start, stop):
        """log p(text[start:stop] | the rest), term by term."""
        total = 0.0
        for i in range(start, stop):
            seen = torch.full((1, T), V)
            seen[0, : len(text)] = torch.tensor(text)
            seen[0, i:stop] = V
            total += model(seen)[0, i].log_softmax(-1)[text[i]].item()
        return total

    edits = [
        Edit(3, 5, (4, 3), "swap"),
        Edit(2, 3, (), "deletion"),
        Edit(9, 9, (2,), "insertion"),
        Edit(1, 2, (4,), "substitution", single=0.5),
    ]
    keep_all(monkeypatch)
    for edit in edits:
        [decided], _ = reader.decide(ids, [edit])
        after = ids[: edit.start] + list(edit.ids) + ids[edit.stop :]
        stop = min(len(ids), edit.stop + races.REACH)
        gain = direct(after, edit.start, stop + edit.growth) - direct(ids, edit.start, stop)
        if edit.kind == "substitution":
            gain = (gain + 0.5) / 2
        assert decided.gain == pytest.approx(gain, abs=1e-5)


def test_edits_that_share_calls_gain_what_they_gain_alone(monkeypatch):
    keep_all(monkeypatch)
    model, tokenizer = alphabet(T=128)
    reader = Proofreader(model, tokenizer)
    ids = [LETTERS.index(c) for c in LINE]
    edits = [
        Edit(5, 6, (), "deletion"),
        Edit(40, 40, (3,), "insertion"),
        Edit(75, 77, (1, 2), "swap"),
    ]
    alone = [reader.decide(ids, [edit])[0][0].gain for edit in edits]
    assert [edit.gain for edit in reader.decide(ids, edits)[0]] == pytest.approx(alone, abs=1e-5)


# ---- What mistakes are likely


def test_what_is_proposed_is_what_was_probably_meant():
    """Of letters that are as likely there, the one beside the wrong one on a keyboard."""
    logits = torch.full((V,), -20.0)
    logits[[LETTERS.index(c) for c in "bo"]] = torch.tensor([0.3, 0.0])
    model = Toy(lambda xt: logits.expand(*xt.shape, V), V, 8)
    reader = Proofreader(model, Tokenizer("char", list(LETTERS)))
    p = LETTERS.index("p")
    answers = reader.ask([[V] * 8], [0, 0, 0], [1, 2, 3], [p, V - 1, -1])
    assert [LETTERS[i] for i in answers.best] == ["o", "b", "b"]
    assert answers.best_logp == pytest.approx(logits.log_softmax(0)[answers.best].tolist())


def test_repairs_of_a_place_count_together():
    """Each less likely than no mistake, but not all: the best of them is kept."""
    reader = Proofreader(*alphabet())
    window = [Token(LETTERS.index(c), c.encode()) for c in LINE[:30]]
    one, other, far = (
        Edit(start, start + 1, (0,), "substitution", cost=8.0, gain=gain)
        for start, gain in ((5, 7.5), (7, 7.6), (20, 7.9))
    )
    assert reader.best_apart(window, [one]) == reader.best_apart(window, [other, far]) == []
    assert reader.best_apart(window, [one, other, far]) == [other]
    reader.caution = 0.5
    assert reader.best_apart(window, [one, other, far]) == []


def test_names_that_a_text_has_elsewhere_stay():
    """Nobody misspells a name twice alike, if what would stand there is in no other place."""
    line = LINE[:30]
    text = f"{line}\nkate\nand\nkate\nhath\nhate\nthat\nkate"
    window = [Token(LETTERS.index(c), c.encode()) for c in text]
    at = text.index("kate\nand")
    one = Edit(at, at + 1, (LETTERS.index("h"),), "substitution", cost=8.0, gain=9.0)
    new = Edit(at, at + 1, (LETTERS.index("l"),), "substitution", cost=8.0, gain=9.0)
    reader = Proofreader(*alphabet())
    assert reader.best_apart(window, [new]) == [new], "of a text whose words are not known"
    reader.words = Words(text)
    assert reader.best_apart(window, [new]) == []
    assert reader.best_apart(window, [one]) == [one], "a word that it has, too"
    reader.words = Words(text.replace("\nkate", "\nkato").replace("\nkato", "\nkate", 1))
    assert reader.best_apart(window, [new]) == [new], "it stands there alone"
    sure = new._replace(gain=15.0)
    assert reader.best_apart(window, [sure]) == [sure], "what is likelier than this still changes"


@pytest.mark.parametrize(
    "text, right, is_kept",
    [
        ("when Oswin", "P", True),
        ("Oswin", "P", False),  # any word begins a line with a capital
        ("OSWIN PSWIN", "P", False),  # a word that the text has
    ],
)
def test_a_name_costs_more_to_change(text, right, is_kept):
    letters = "OSWINPhenoswip,: \n"
    letters = "".join(dict.fromkeys(letters))
    model, _ = alphabet(T=64)
    model.vocab_size = model.mask_id = len(letters)
    reader = Proofreader(model, Tokenizer("char", list(letters)))
    reader.words = Words(text)
    window = [Token(letters.index(c), c.encode()) for c in text]
    at = text.lower().index("oswin")
    edit = Edit(at, at + 1, (letters.index(right),), "substitution", 8.0, gain=9.0, logp=-1.0)
    assert (reader.best_apart(window, [edit]) == []) == is_kept
    assert reader.best_apart(window, [edit._replace(gain=15.0)]), "what is likelier than this"
    unknown = edit._replace(gain=50.0, logp=-20.0)  # no name that the network knows either
    assert (reader.best_apart(window, [unknown]) == []) == is_kept


# ---- What stays
@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.booleans())
def test_what_is_not_doubtful_stays_byte_for_byte(odd, has_end):
    """Characters that the model never saw, all kinds of line ends, none at the end."""
    odd = "".join(c for c in odd if c not in LETTERS[:-1])
    text = "".join(a + b for a, b in itertools.zip_longest([LINE], [odd], fillvalue=""))
    text = text.replace("\n", "\r\n") + "\n" * has_end
    fixed = sample.fix(*alphabet(), text, caution=1000)
    assert (fixed.text, fixed.changes) == (text, [])


def test_line_ends_and_unknown_characters_stay_beside_changes():
    text = LINE.replace("\n", "\r\n")
    wrong = text.replace("mno", "mo", 1).replace("z\r\na", "za", 1)  # a lost line end, too
    assert sample.fix(*alphabet(), wrong).text.count("\r\n") == text.count("\r\n")
    text = LETTERS + "abcdéfghizklm€opqrstuvwxyz\n" + LETTERS
    assert sample.fix(*alphabet(), text).text == text.replace("izk", "ijk")


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe", *tokenizer_kinds.KINDS])
def test_tokens_join_to_the_text(kind, pydoc):
    """Of every kind of tokenizer, also of those that change a text."""
    text = "A tuple, é 🙂\r\nnot  a List\u2028 of  things.\n\t(x_1 == 3)\r\n" + pydoc[:3000]
    if kind in tokenizer_kinds.KINDS:
        library = tokenizer_kinds.KINDS[kind](pydoc[:20_000])
        tokenizer = Tokenizer("file", library.to_str())
    else:
        tokenizer = Tokenizer(kind, sorted(set(pydoc))) if kind == "char" else small(kind, pydoc)
    cutter = Cutter(tokenizer)
    tokens = list(cutter.tokens(text))
    assert b"".join(token.lead + token.own for token in tokens) == text.encode()
    assert sum(token.id != tokenizer.mask_id for token in tokens) > 100


def small(kind, text):
    from nanomdlm.support.data.tokenizer import build_tokenizer

    return build_tokenizer(kind, 600, False, lambda: [(text[:20_000], False)], 20_000)


def test_words_are_replaced_by_words():
    """Of a tokenizer of words the tokens are substituted, with the spaces that they had."""
    words = [" one", " two", " three", " four"]
    tokenizer = Tokenizer("word", words)
    n = tokenizer.vocab_size

    def logits(xt):
        out = torch.zeros(*xt.shape, n)
        for d in (-2, -1, 1, 2):
            seen = xt.roll(d, 1)
            is_known = (seen >= 256) & (seen < n)
            wanted = (seen - 256 + d) % 4 + 256
            out.scatter_add_(2, wanted[..., None], 6.0 * is_known[..., None])
        return out

    text = " one two three four" * 3
    wrong = text.replace("two three", "two two", 1)
    fixed = sample.fix(Toy(logits, n, 16), tokenizer, wrong)
    assert fixed.text == text
    assert [(c.before.strip(), c.after.strip()) for c in fixed.changes] == [("two", "three")]


# ---- Files
@pytest.fixture
def proofread(monkeypatch, tmp_path, capfdbinary):
    """A function: flags -> (exit code, standard output, standard error) of sample.py."""
    model, tokenizer = alphabet()
    monkeypatch.chdir(tmp_path)
    loaded = ([tmp_path], (model, tokenizer, model.config))
    monkeypatch.setattr(sample, "read_newest", lambda *_: loaded)
    monkeypatch.setattr(sample.checkpoint_score, "introduce", lambda *_: None)
    monkeypatch.setattr(sample, "default_run", lambda out: out)

    def run(*flags):
        code = entry.run(sample.main, list(flags), run_folder.release)
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


WRONG = LETTERS + "abcdefghizklmnopqrstuvwxyz\n" + LETTERS


def test_changes_are_shown_and_the_file_stays(proofread, tmp_path):
    (tmp_path / "a.txt").write_bytes(WRONG.encode())
    code, out, err = proofread("--fix=a.txt")
    assert (code, out) == (0, "2: abcdefghi[-z-]{+j+}klmnopqrstuvwxyz\n")
    assert err == f"1 change in {len(WRONG)} characters\n"
    assert (tmp_path / "a.txt").read_bytes() == WRONG.encode()


def test_a_full_disk_is_named_and_the_file_is_whole(proofread, tmp_path):
    wrong = WRONG * 200
    with small_disk(tmp_path / "disk", "24k") as disk:
        (disk / "a.txt").write_text(wrong)
        code, _, err = proofread(f"--fix={disk}/a.txt", f"--output={disk}/a.txt", "--caution=1000")
        assert code == 2 and f"{disk}/a.txt cannot be written (No space left" in err
        assert (disk / "a.txt").read_text() == wrong and os.listdir(disk) == ["a.txt"]


def test_output_may_be_the_file_itself(proofread, tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / "a.txt").write_bytes(WRONG.encode())
        assert proofread("--fix=a.txt", f"--output={name}")[0] == 0
        assert (tmp_path / name).read_text() == LETTERS * 3
    (tmp_path / "link").symlink_to("a.txt")
    code, _, err = proofread("--fix=a.txt", "--output=link")
    assert code == 2 and "--output=link" in err and (tmp_path / "a.txt").read_text() == LETTERS * 3
    code, out, _ = proofread("--fix=b.txt", "--output=-")
    assert (code, out) == (0, LETTERS * 3)


def test_json_has_an_object_for_each_change(proofread, tmp_path):
    (tmp_path / "a.txt").write_bytes(WRONG.encode())
    code, out, _ = proofread("--fix=a.txt", "--json=-")
    [line] = out.splitlines()
    [change] = sample.fix(*alphabet(), WRONG).changes
    assert code == 0 and json.loads(line) == change._asdict()
    assert 0 < change.p_before < 0.01 < 0.9 < change.p_after <= 1


def test_the_page_shows_text_as_text(proofread, tmp_path):
    text = WRONG + "<B>&\x1b"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert proofread("--fix=a.txt", "--html=page.html", "--caution=1")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<del>z</del><ins>j</ins>" in page and page.endswith("</html>\n")
    assert "&lt;B&gt;&amp;\\x1b" in page and "<B>" not in page


def test_caution_keeps_surer_changes_alone(proofread, tmp_path):
    wrong = LETTERS + LETTERS.replace("ij", "ji") + LETTERS
    (tmp_path / "a.txt").write_bytes(wrong.encode())
    [change] = sample.fix(*alphabet(), wrong).changes
    excess = change.gain - Proofreader(*alphabet()).prior.each
    for caution, n in ((excess - 0.1, 1), (excess + 0.1, 0)):
        assert proofread("--fix=a.txt", f"--caution={caution}")[2].startswith(f"{n} change")


def test_standard_input(proofread, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WRONG.encode())))
    code, out, _ = proofread("--fix=-", "--output=-")
    assert (code, out) == (0, LETTERS * 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WRONG.encode() + b"\xff")))
    code, _, err = proofread("--fix=-", "--output=b.txt")
    assert code == 2 and "line 4 of standard input" in err and not os.path.exists("b.txt")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "--fix=a.txt"),
        (b"abc\ndef\n\xff\xfe", "line 3 of --fix=a.txt"),
    ],
    ids=["empty", "bytes"],
)
def test_what_is_no_text_is_refused(proofread, tmp_path, content, said):
    (tmp_path / "a.txt").write_bytes(content)
    code, out, err = proofread("--fix=a.txt", "--output=b.txt", "--json=c.json")
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.txt"]
    (tmp_path / "a.txt").write_bytes(content[-60:].decode("latin-1").encode() or b"abc")
    assert proofread("--fix=a.txt", "--output=b.txt", "--caution=1000")[0] == 0
    assert (tmp_path / "b.txt").read_bytes() == (tmp_path / "a.txt").read_bytes()


# ---- Models
def test_models_that_cannot_are_refused():
    for config in (dict(objective="ar"), dict(block_length=8), dict(prompt_column="prompt")):
        with pytest.raises(UserError, match="model"):
            sample.fix(*alphabet(**config), "abc")
    whole, tokenizer = alphabet(block_length=8, infill_share=0.5)
    whole.objective = alphabet()[0].objective  # as mdlm.load(path, whole=True) has it
    assert sample.fix(whole, tokenizer, "abc").text == "abc"
    with pytest.raises(ValueError, match="caution"):
        sample.fix(*alphabet(), "abc", caution=1e9)
    with pytest.raises(ValueError, match="string"):
        sample.fix(*alphabet(), b"abc")
    with pytest.raises(ValueError, match="ids"):
        sample.fix(Toy(None, 9, 8), Tokenizer("id", 9), "1 2")


@pytest.mark.parametrize("T", [1, 2, 3, 5, 8])
def test_a_short_context_loses_nothing(T):
    """Windows of one token, too; changes only where the context shows enough."""
    text = LETTERS + "é" + LETTERS
    fixed = sample.fix(*alphabet(T=T), text, caution=1000)
    assert fixed.text == text
    sample.fix(*alphabet(T=T), text[::2])  # as many insertions as there is room for


def test_more_insertions_than_a_context_has_room_for():
    text = LETTERS * 6
    wrong = "".join(c for i, c in enumerate(text) if i < 8 or i % 10)
    fixed = sample.fix(*alphabet(T=64), wrong)
    assert len(wrong) < len(fixed.text) <= len(text)


def test_the_shipped_weights_repair_a_sentence():
    model, tokenizer, _ = mdlm.load(ROOT / "weights" / "shakespeare")
    fixed = sample.fix(model, tokenizer, "My lord, I will not spaek of it again.\n")
    assert fixed.text == "My lord, I will not speak of it again.\n"
    [change] = fixed.changes
    assert (change.position, change.kind, change.before, change.after) == (22, "swap", "ae", "ea")
