"""The search for the likeliest fills: its lists, probabilities and certificates, by enumeration."""

import functools
import itertools
import json
import math
import re
import subprocess
import sys
import time

import pytest
import tokenizer_kinds as K
import tokenizers
import torch
from conftest import ROOT, Toy

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling, search, templates
from nanomdlm.support.infill.ensemble import Ensemble
from nanomdlm.support.infill.likelihood import chain_rule
from nanomdlm.support.run.calibration import calibrated

LETTERS = list("abc")
T = 8


def network(seed=0, V=3, end_id=None, **settings):
    """A small network with random weights that depends on all it sees."""
    settings = dict(n_layer=2, n_head=2, n_embd=16, block_size=T) | settings
    torch.manual_seed(seed)
    model = mdlm.make_model(mdlm.Config(**settings), V, kernels.select("torch"), end_id)
    for p in model.parameters():
        p.data += torch.randn_like(p) / 2
    if hasattr(model, "length_counts"):
        model.length_counts.copy_(torch.arange(T + 1) % 3)
    return mdlm.ready(model, "cpu").eval()


def ensemble():
    models = [network(1), network(2)]
    models[0].calibration = dict(temperature=1.5, source="a text")
    return mdlm.ready(Ensemble(models), "cpu").eval()


def hot():
    model = network(3)
    model.calibration = dict(temperature=1.5, source="a text")
    return model


MODELS = {
    "one": network,
    "calibrated": hot,
    "two networks": ensemble,
    "told the mask rate": functools.partial(network, time_conditioning=True),
}
JOINT = {
    "autoregressive": functools.partial(network, objective="ar"),
    # As the default network: all layers but the last have no attention.
    "autoregressive, deep": functools.partial(
        network, objective="ar", n_layer=3, attention_every=3, conv=3
    ),
    "blocks of 2": functools.partial(network, block_length=2),
    "blocks of 4": functools.partial(network, block_length=4),
}


def logp_at(model, ids):
    """(T, V) log-probabilities, float64, of one text of ids, masked where they are None."""
    mask = model.mask_id
    xt = torch.tensor([[mask if id is None else id for id in ids]])
    with torch.no_grad():
        return calibrated(model)(xt)[0].double().log_softmax(-1)


def enumerated(model, ids, allowed=lambda at, id: True):
    """({fill: log p}, the mass of what is not allowed) of all fills of a text with Nones, by the
    rule of the search: of the masks beside a token, the one of lowest entropy comes next."""
    open = [at for at, id in enumerate(ids) if id is None]
    found = {}
    excluded = 0.0

    def go_on(ids, total):
        nonlocal excluded
        masked = [at for at in open if ids[at] is None]
        if not masked:
            found[tuple(ids[at] for at in open)] = total
            return
        logp = logp_at(model, padded(model, ids))
        edges = [at for at in masked if not {at - 1, at + 1} <= {*masked}]
        at = min(edges, key=lambda at: torch.special.entr(logp[at].exp()).sum().item())
        for id, value in enumerate(logp[at].tolist()):
            if allowed(at, id):
                go_on([*ids[:at], id, *ids[at + 1 :]], total + value)
            else:
                excluded += math.exp(total + value)

    go_on(list(ids), 0.0)
    return found, excluded


def padded(model, ids):
    pad = model.objective.pad_id
    return [*ids, *[None if pad == model.mask_id else pad] * (T - len(ids))]


def ids_of(text, tokenizer):
    return [None if c == "█" else tokenizer.encode(c)[0] for c in text]


def likeliest(found, n):
    return sorted(found, key=lambda fill: -found[fill])[:n]


# ---- One length
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("text", ["a██b", "██", "c█a█b█", "ab███", "█"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_list_is_that_of_an_enumeration(kind, text, rows, monkeypatch):
    """The likeliest fills with their probabilities, proven, whatever is computed in one call; what
    is listed, excluded and left adds up to one, and the bound holds for all that is not listed."""
    monkeypatch.setattr(search, "rows_per_call", lambda *_: rows)
    model = MODELS[kind]()
    tokenizer = Tokenizer("char", LETTERS)
    wanted, _ = enumerated(model, ids_of(text, tokenizer))
    assert sum(map(math.exp, wanted.values())) == pytest.approx(1)
    for n in (1, 3, 100):
        found = sample.search(model, tokenizer, text, top=n, limit=1000)
        best = likeliest(wanted, n)
        assert [one.ids for one in found] == [placed(text, fill, tokenizer) for fill in best]
        assert [one.logp for one in found] == pytest.approx([wanted[b] for b in best], abs=1e-5)
        assert [one.p for one in found] == pytest.approx([math.exp(one.logp) for one in found])
        assert found.proven and found.excluded == 0
        assert sum(one.p for one in found) + found.rest == pytest.approx(1)
        others = [value for fill, value in wanted.items() if fill not in best]
        assert max(others, default=-math.inf) <= found.bound + 1e-6
        for one in found:
            assert sum(p for p in one.drawn if p is not None) == pytest.approx(one.logp)


def placed(text, fill, tokenizer):
    fill = iter(fill)
    return [next(fill) if id is None else id for id in ids_of(text, tokenizer)]


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_search_that_stops_has_a_list_and_a_bound(limit, rows, monkeypatch):
    monkeypatch.setattr(search, "rows_per_call", lambda *_: rows)
    text = "a████b"
    tokenizer = Tokenizer("char", LETTERS)
    for seed in range(3):
        model = network(seed)
        wanted, _ = enumerated(model, ids_of(text, tokenizer))
        found = sample.search(model, tokenizer, text, top=3, limit=limit)
        assert 0 < len(found) <= 3 and found.sequences <= max(limit, 4 + rows)
        listed = {tuple(one.ids[1:5]): one.logp for one in found}
        for fill, logp in listed.items():
            assert logp == pytest.approx(wanted[fill], abs=1e-5)
        others = [value for fill, value in wanted.items() if fill not in listed]
        assert max(others) <= found.bound + 1e-6
        if found.proven:
            assert list(listed) == likeliest(wanted, 3)
        assert sum(map(math.exp, listed.values())) + found.rest == pytest.approx(1)


def test_a_search_ends_at_a_deadline():
    found = sample.search(network(), Tokenizer("char", LETTERS), "a██████b", seconds=0)
    assert found and not found.proven and found.sequences <= 6


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("rows", [1, 8])
def test_children_are_made_when_they_may_win(width, rows, monkeypatch):
    """A vocabulary of 50,000 is not copied for each partial fill; the list is the same."""
    monkeypatch.setattr(search, "rows_per_call", lambda *_: rows)
    model = network(V=9)
    tokenizer = Tokenizer("char", list("abcdefghi"))
    wanted = sample.search(model, tokenizer, "a██b", top=20, limit=1000)
    monkeypatch.setattr(search, "WIDTH", width)
    found = sample.search(model, tokenizer, "a██b", top=20, limit=1000)
    assert [one.text for one in found] == [one.text for one in wanted] and found.proven
    assert [one.logp for one in found] == pytest.approx([one.logp for one in wanted])
    assert found.rest == pytest.approx(wanted.rest)


@pytest.mark.parametrize("rows", [1, 8])
def test_equal_fills_are_listed_in_one_order(rows, monkeypatch):
    monkeypatch.setattr(search, "rows_per_call", lambda *_: rows)
    model = Toy(lambda xt: torch.zeros(*xt.shape, 3), 3, T)
    found = sample.search(model, Tokenizer("char", LETTERS), "c██c", top=5, limit=1000)
    assert [one.fills[0] for one in found] == ["aa", "ab", "ac", "ba", "bb"]
    assert [one.p for one in found] == pytest.approx([1 / 9] * 5) and found.proven


def test_an_unlikely_text_between_two_gaps_leaves_the_probabilities():
    """A start of a thousand nats, whose exponential is no number, as of a hundred odd words."""
    tokenizer = Tokenizer("char", LETTERS)
    segments = templates.encode_segments(["a", templates.Gap(2), "b"], tokenizer)
    model = network()
    found = []
    for start in (0.0, 1000.0):
        frame = filling.frame_of(model, tokenizer, segments, False, None)
        frame.start = start
        found.append(search.Search([frame], 3))
        search.run(model, found[-1:])
    plain, far = found
    assert [one.p for one in far.fills] == pytest.approx([one.p for one in plain.fills])
    assert far.rest(0) == pytest.approx(plain.rest(0)) and far.is_proven
    assert far.fills[0].logp == pytest.approx(plain.fills[0].logp - 1000)


# ---- What may not stand there
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pattern, n", [("a[bc]", 2), ("(ab|c)*", 3), ("[^c]+c?", 3)])
def test_a_pattern_leaves_what_matches(kind, pattern, n):
    """In any order of filling; the probability of everything else is said."""
    pytest.importorskip("outlines_core")
    model = MODELS[kind]()
    tokenizer = Tokenizer("char", LETTERS)
    text = "b" + "█" * n + "a"
    wanted, _ = enumerated(model, ids_of(text, tokenizer))
    matching = {f: p for f, p in wanted.items() if re.fullmatch(pattern, tokenizer.decode(f))}
    marked = f"b[{'█' * n}:{pattern}]a"
    found = sample.search(model, tokenizer, marked, top=100, limit=1000)
    best = likeliest(matching, 100)
    assert [tuple(one.ids[1 : 1 + n]) for one in found] == best and found.proven
    assert [one.logp for one in found] == pytest.approx([wanted[f] for f in best], abs=1e-5)
    assert found.excluded == pytest.approx(1 - sum(map(math.exp, matching.values())), abs=1e-6)
    assert found.bound == -math.inf and found.rest == pytest.approx(0, abs=1e-9)


def test_a_list_of_texts_is_compared_exactly():
    pytest.importorskip("outlines_core")
    model = network()
    tokenizer = Tokenizer("char", LETTERS)
    wanted, _ = enumerated(model, ids_of("b██a", tokenizer))
    found = sample.search(model, tokenizer, "b[██|ab|ca|cc]a", top=9)
    of_list = {fill: wanted[fill] for fill in ((0, 1), (2, 0), (2, 2))}
    assert [tuple(one.ids[1:3]) for one in found] == likeliest(of_list, 3)
    assert found.excluded == pytest.approx(1 - sum(map(math.exp, of_list.values())), abs=1e-6)


def test_what_is_no_text_is_excluded():
    """[END] does not stand within a template; half a character is not shown."""
    model = network(V=4)
    tokenizer = Tokenizer("char", LETTERS, end=True)
    model.config.end = ""
    wanted, excluded = enumerated(
        model, ids_of("a██b", tokenizer), allowed=lambda at, id: id != tokenizer.end_id
    )
    found = sample.search(model, tokenizer, "a██b", top=100)
    assert len(found) == len(wanted) == 9 and found.proven
    assert found.excluded == pytest.approx(excluded, abs=1e-6) and excluded > 0
    bytes_model = network(V=256)
    found = sample.search(bytes_model, Tokenizer("byte"), "a██", top=3, limit=50)
    assert all(one.text.isprintable() or "\ufffd" not in one.text for one in found)
    assert found.excluded > 0


def test_ids_with_one_text_share_a_row():
    """Of a vocabulary of subwords: the row has the probability of all of them."""
    vocab = dict(a=0, b=1, aa=2, ab=3, ba=4)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    library.decoder = tokenizers.decoders.Fuse()
    tokenizer = Tokenizer("file", library.to_str())
    model = network(V=5)
    found = sample.search(model, tokenizer, "a███b", top=1000, limit=1000)
    wanted, _ = enumerated(model, [0, None, None, None, 1])
    by_text = {}
    for fill, logp in wanted.items():
        text = tokenizer.decode([0, *fill, 1])
        by_text[text] = by_text.get(text, 0) + math.exp(logp)
    assert {one.text: one.p for one in found} == pytest.approx(by_text, abs=1e-6)
    assert len(by_text) < len(wanted)


# ---- Models that do not see what follows
@pytest.mark.parametrize("text", ["a██b", "b█a█", "██cab", "a█bc█"])
@pytest.mark.parametrize("kind", JOINT)
def test_models_that_do_not_see_what_follows_score_it(kind, text):
    """It finds the largest log p(gap, after | before), the chain rule from left to right."""
    model = JOINT[kind]()
    tokenizer = Tokenizer("char", LETTERS)
    ids = ids_of(text, tokenizer)
    open = [at for at, id in enumerate(ids) if id is None]
    wanted = {}
    for fill in itertools.product(range(3), repeat=len(open)):
        x = list(ids)
        for at, id in zip(open, fill):
            x[at] = id
        logp = chain_rule(model, torch.tensor([x]))[0]
        wanted[fill] = logp[open[0] : len(ids)].sum().item()
    found = sample.search(model, tokenizer, text, top=100, limit=10_000)
    best = likeliest(wanted, 100)
    assert [one.ids for one in found] == [placed(text, fill, tokenizer) for fill in best]
    assert [one.logp for one in found] == pytest.approx([wanted[b] for b in best], abs=1e-4)
    assert found.proven and found.compares_lengths
    few = sample.search(model, tokenizer, text, top=2, limit=10_000)
    assert few.proven and [one.ids for one in few] == [one.ids for one in found[:2]]


# ---- Lengths
def before_gap(model, ids, places):
    """log p of the given tokens at `places`, each given those before it, masks for all else."""
    total = 0.0
    for at in places:
        seen = [id if i < at else None for i, id in enumerate(ids)]
        total += logp_at(model, padded(model, seen))[at, ids[at]].item()
    return total


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("before, after", [("ab", "ca"), ("", "b"), ("c", "bab")])
def test_lengths_compete_by_the_gap_and_what_follows(kind, before, after):
    """log p(gap, after | before), the text after the gap first: a list of all lengths, proven."""
    model = MODELS[kind]()
    tokenizer = Tokenizer("char", LETTERS)
    wanted = {}
    for n in (1, 2, 3):
        ids = ids_of(before + "█" * n + after, tokenizer)
        start = len(before) + n
        context = before_gap(model, ids, range(start, len(ids)))
        for fill, logp in enumerated(model, ids)[0].items():
            wanted[before + tokenizer.decode(fill) + after] = context + logp
    found = sample.search(model, tokenizer, f"{before}[___]{after}", top=50, max_gap=3, limit=1000)
    best = likeliest(wanted, 50)
    assert [one.text for one in found] == best and found.proven
    assert [one.logp for one in found] == pytest.approx([wanted[b] for b in best], abs=1e-4)
    few = sample.search(model, tokenizer, f"{before}[___]{after}", top=2, max_gap=3)
    assert [one.text for one in few] == best[:2]


@pytest.mark.parametrize("settings", [dict(objective="ar"), dict(block_length=4)], ids=str)
def test_models_that_do_not_see_what_follows_choose_good_lengths(settings, monkeypatch):
    """Three of eight lengths are searched; the best fill of all lengths is among their fills."""
    tokenizer = Tokenizer("char", LETTERS)
    same = 0
    for seed in range(6):
        model = network(seed, block_size=12, **settings)
        text = "bcab"[: seed % 3] + "[___]" + "acb"
        search_all = functools.partial(sample.search, model, tokenizer, text, top=1, max_gap=6)
        monkeypatch.setattr(filling, "N_LENGTHS", 100)
        best = search_all(limit=10_000)
        monkeypatch.undo()
        same += search_all(limit=10_000)[0].text == best[0].text
    assert same >= 5, same


@pytest.mark.parametrize(
    "text", ["abc[___:[ab]{1,2}]", "abca[___:b?]", "[___:[ab]{3,5}]", "abca[___|b|]"]
)
def test_a_gap_may_end_where_the_context_does(text):
    """Of an autoregressive model whose context has five tokens."""
    pytest.importorskip("outlines_core")
    model = JOINT["autoregressive"](block_size=5)
    tokenizer = Tokenizer("char", LETTERS)
    found = sample.search(model, tokenizer, text, top=3, max_gap=5, limit=500)
    for one in found:
        x = torch.tensor([tokenizer.encode(one.text)])
        wanted = chain_rule(model, x)[0, text.index("[") :].sum().item()
        assert one.logp == pytest.approx(wanted, abs=1e-5)


def test_several_gaps_of_unknown_length_are_one_search():
    model = network(5)
    tokenizer = Tokenizer("char", LETTERS)
    wanted = {}
    for n, m in itertools.product((1, 2), repeat=2):
        ids = ids_of("a" + "█" * n + "b" + "█" * m + "c", tokenizer)
        context = before_gap(model, ids, [1 + n, len(ids) - 1])
        for fill, logp in enumerated(model, ids)[0].items():
            text = tokenizer.decode([0, *fill[:n], 1, *fill[n:], 2])
            wanted[text] = max(wanted.get(text, -math.inf), context + logp)
    found = sample.search(model, tokenizer, "a[___]b[___]c", top=200, max_gap=2, limit=5000)
    best = likeliest(wanted, len(found))
    assert [one.text for one in found] == best and found.proven and len(found) == len(wanted)


@pytest.mark.parametrize("before", ["ab", "", "█b"])
def test_a_gap_at_the_end_of_a_text_may_end_anywhere(before):
    """With a line break, or [END], or nowhere in max_gap tokens: all of it is one distribution."""
    tokenizer = Tokenizer("char", ["a", "b", "\n"], end=True)
    model = network(V=4)
    wanted = {}

    def go_on(ids, total):
        n = len(ids) - len(before)
        if n and (ids[-1] == 3 or (n > 1 and ids[-1] == 2)):
            shown = ids[:-1]
        elif n == 3:
            shown = ids
        else:
            logp = logp_at(model, padded(model, [*ids, *[None] * (3 - n)]))[len(ids)]
            for id, value in enumerate(logp.tolist()):
                go_on([*ids, id], total + value)
            return
        text = tokenizer.decode(shown)
        wanted[text] = wanted.get(text, 0) + math.exp(total)

    excluded = 0.0
    if before == "█b":  # a gap before it does not end the text
        logp = logp_at(model, padded(model, [None, 1, None, None, None]))[0]
        excluded = logp[3].exp().item()
        for id in range(3):
            go_on([id, 1], logp[id].item())
    else:
        go_on(tokenizer.encode(before), 0.0)
    assert sum(wanted.values()) + excluded == pytest.approx(1)
    found = sample.search(model, tokenizer, before + "[___]", top=1000, max_gap=3, limit=10_000)
    assert {one.text: one.p for one in found} == pytest.approx(wanted, abs=1e-6)
    assert found.proven and found.rest == pytest.approx(0, abs=1e-9)


def test_documents_of_given_lengths_are_seen_with_their_end():
    """log p of the length counts, and [END] fills up the window, as in training."""
    tokenizer = Tokenizer("char", LETTERS, end=True)
    model = network(V=4, end_id=3)
    p = (model.length_counts.double() + 1) / (model.length_counts + 1).sum()
    wanted = {}
    for n in (1, 2):
        ids = ids_of("a" + "█" * n + "b", tokenizer)
        context = p[len(ids)].log().item()
        seen = [0, *[None] * n, None]
        context += logp_at(model, padded(model, seen))[1 + n, 1].item()
        fills, _ = enumerated(model, ids, allowed=lambda at, id: id != 3)
        wanted |= {tokenizer.decode([0, *fill, 1]): context + v for fill, v in fills.items()}
    found = sample.search(model, tokenizer, "a[___]b", top=100, max_gap=2)
    assert {one.text: one.logp for one in found} == pytest.approx(wanted, abs=1e-4)


# ---- What a sampler draws
def test_more_than_a_search_can_fill_is_drawn_and_compared(monkeypatch):
    monkeypatch.setattr(filling, "LONG", 2)
    model = network()
    tokenizer = Tokenizer("char", LETTERS)
    wanted, _ = enumerated(model, ids_of("a████b", tokenizer))
    found = sample.search(model, tokenizer, "a████b", top=3)
    assert 1 <= len(found) <= 3 and not found.proven
    assert [one.logp for one in found] == sorted((one.logp for one in found), reverse=True)
    for one in found:
        assert one.logp == pytest.approx(wanted[tuple(one.ids[1:5])], abs=1e-5)
    assert found.rest == pytest.approx(1 - sum(one.p for one in found))


def test_long_texts_of_a_list_are_all_compared(monkeypatch):
    """They are not drawn; a text that the model cannot spell is refused, not left out."""
    pytest.importorskip("outlines_core")
    monkeypatch.setattr(filling, "LONG", 1)
    tokenizer = Tokenizer("char", LETTERS)
    found = sample.search(network(), tokenizer, "a[___|bc|ca|bb|abc]b", top=9)
    assert len(found) == 4 and found.proven and found.bound == -math.inf
    with pytest.raises(UserError, match="d"):
        sample.search(network(), tokenizer, "a[___|bc|d]b")


def test_texts_without_a_gap_are_refused():
    with pytest.raises(UserError, match="has no gap"):
        sample.search(network(), Tokenizer("char", LETTERS), "abc")
    assert issubclass(UserError, ValueError)


# ---- The shipped weights
def test_the_fill_of_the_readme_is_proven(capsys):
    folder = ROOT / "weights" / "shakespeare"
    flags = ["--infill=I lo██ thee", "--candidates=5", "--json=-"]
    sample.main([f"--out_dir={folder}", "--device=cpu", *flags])
    found = json.loads(capsys.readouterr().out)
    texts = [one["text"] for one in found["candidates"]]
    assert texts[0] == "I love thee" and found["candidates"][0]["p"] > 0.85
    assert found["proven"] and found["calls"] <= 20
    assert templates.GAP.search(found["template"])


def test_a_batch_that_is_killed_goes_on_after_its_last_line(short_run, tmp_path):
    """Nothing is searched twice, and the file is that of one run; another's file is kept."""
    batch = tmp_path / "batch"
    batch.write_text("".join(f"the{c}██ of█\n" for c in 6 * "abcdefgh"), encoding="utf-8")
    whole, stopped = tmp_path / "whole.json", tmp_path / "stopped.json"
    flags = [f"--out_dir={short_run}", "--device=cpu", f"--batch={batch}"]
    assert sample.main([*flags, f"--json={whole}"]) == 0
    command = [sys.executable, str(ROOT / "sample.py"), *flags, f"--json={stopped}"]
    part = tmp_path / "stopped.json.part"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
        while not part.exists() or len(part.read_bytes().splitlines()) < 20:
            assert run.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        run.kill()
    with open(part, "ab") as f:
        f.write(b'{"text": "cut o')  # as a machine may leave it
    done = part.read_bytes().splitlines()[1:-1]
    assert not stopped.exists() and 10 < len(done) < 48
    assert sample.main([*flags, f"--json={stopped}"]) == 0
    lines = stopped.read_bytes().splitlines()
    assert lines[: len(done)] == done and not part.exists()
    texts = [
        [json.loads(line)["text"] for line in p.read_text().splitlines()] for p in (whole, stopped)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 48
    for others in (b"another job\n{}\n", b"half a line"):
        part.write_bytes(others)
        with pytest.raises(UserError, match=r"json\.part"):
            sample.main([*flags, f"--json={stopped}"])
        assert part.read_bytes() == others and not [*tmp_path.glob("*.lock")]


@pytest.mark.parametrize("text", ["a[___||b]ca", "a[___:b?]ca", "a[___||c]b█a", "a[___]b[___]c"])
@pytest.mark.parametrize("kind", JOINT)
def test_what_follows_a_gap_counts_where_its_fill_is_empty(kind, text):
    """log p(gap, after | before) of each fill is that of the chain rule, and they are in order."""
    if "|" in text or ":" in text:
        pytest.importorskip("outlines_core")
    model = JOINT[kind]()
    found = sample.search(model, Tokenizer("char", LETTERS), text, top=5, max_gap=2, limit=5000)
    for one in found:
        before = text.index("[")
        logp = chain_rule(model, torch.tensor([one.ids]))[0, before : len(one.ids)].sum().item()
        assert one.logp == pytest.approx(logp, abs=1e-5)
    assert found.proven and [one.logp for one in found] == sorted(o.logp for o in found)[::-1]


@pytest.mark.parametrize("text", ["ab[___]ba[___]ab", "a" + 40 * "█" + "b", "ab[___]ba"])
def test_a_search_ends_in_time(text):
    """What comes before the search, and a first fill, take at most about as long again."""

    def logits(xt):
        time.sleep(0.02 * len(xt))
        return torch.stack([torch.sin(xt * k + 1.0) for k in (1, 2, 3)], -1).double()

    model = Toy(logits, 3, 64)
    began = time.monotonic()
    found = sample.search(model, Tokenizer("char", LETTERS), text, seconds=0.5)
    assert found and time.monotonic() - began < 2


@pytest.mark.parametrize("text", ["中███文", "中████文", "中[___]文[___]文"])
def test_bytes_that_are_no_text_do_not_hold_a_search_up(text):
    """The network prefers bytes of half characters."""

    def logits(xt):
        likely = torch.zeros(256)
        likely[0x80:] = 5
        return likely.expand(*xt.shape, 256).clone()

    found = sample.search(Toy(logits, 256, 32), Tokenizer("byte"), text, limit=20)
    assert found and found.sequences < 400
    assert all("\ufffd" not in one.text for one in found)


def test_a_list_needs_a_text_of_the_length_that_is_given():
    pytest.importorskip("outlines_core")
    tokenizer = Tokenizer("file", K.KINDS["gpt2"]("the function of a statement " * 9).to_str())
    model = Toy(lambda xt: torch.zeros(*xt.shape, tokenizer.vocab_size), tokenizer.vocab_size, 32)
    with pytest.raises(UserError, match="5 tokens"):
        sample.search(model, tokenizer, "the [█████|function|statement] of")
