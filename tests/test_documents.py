"""Documents of any length: [END] is given, texts see nothing but themselves, each counts right."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, Toy, corpus_of, counts_of, draw, losses, read_log, run_mdlm
from hypothesis import given, settings
from hypothesis import strategies as st

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import document_spans
from nanomdlm.support.cli.python_arguments import to_view
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.data.windows import cut_windows, pack_windows
from nanomdlm.support.infill.model_calls import end_documents

END = 2  # in the world of conftest: texts of 0 and 1, up to 4 of them


def rows_of_unequal_length():
    """(8, 4) int64: a text of each length twice, filled up with [END]."""
    x = torch.randint(2, (8, 4), generator=torch.Generator().manual_seed(1))
    return x.masked_fill(torch.arange(4) >= torch.tensor([4, 1, 2, 3, 1, 3, 4, 2])[:, None], END)


def toy(world, **settings):
    settings |= dict(batch_size=8, rate_margin=0.0, end_id=END)
    return Toy(world.random, world.V, world.T, **settings)


def exhaustive(world, row):
    """(nats of a row's text by the NELBO, its number of tokens), by enumeration."""
    n = int((row != END).sum())
    total = 0.0
    for size in range(1, n + 1):
        sets = list(itertools.combinations(range(n), size))
        for s in sets:
            xt = row.clone()
            xt[list(s)] = world.V
            logp = world.random(xt[None])[0].log_softmax(-1)
            total -= sum(logp[i, row[i]].item() for i in s) / size / len(sets)
    return total, n  # the mean over sizes, times n


def true_nelbo(world, x0):
    nats, tokens = zip(*(exhaustive(world, row) for row in x0))
    return sum(nats) / sum(tokens)


def test_training_loss_is_unbiased_for_unequal_lengths(world):
    x0 = rows_of_unequal_length()
    model = toy(world, mean_length=(x0 != END).sum(1).double().mean().item())
    values = []
    for step in range(3000):
        view, targets, weights, _ = model.objective.batch(model.ops, *draw(model, x0, step))
        assert len(view.rows) <= 8 * 5 // 2 and not (targets == END).any()
        ce = F.cross_entropy(model(view), targets, reduction="none")
        values.append((ce * weights).sum())
    values = torch.stack(values).double()
    error = values.std().item() / len(values) ** 0.5
    truth = true_nelbo(world, x0)
    assert abs(values.mean().item() - truth) < 4 * error
    assert error < 0.01 * truth, "so that a wrong weight would be seen"


def test_evaluation_is_the_nelbo_per_token(world):
    x0 = rows_of_unequal_length()
    r = mdlm.evaluate(toy(world), x0, passes=4000)
    assert r["nelbo"] == pytest.approx(true_nelbo(world, x0), rel=0.01)
    assert sum(r["by_window"]) / 8 == pytest.approx(r["nelbo"])
    uniform = toy(SimpleNamespace(V=3, T=4, random=lambda xt: torch.zeros(*xt.shape, 3)))
    r = mdlm.evaluate(uniform, x0, passes=4)
    assert r["nelbo"] == pytest.approx(math.log(3)) and r["se"] == pytest.approx(0, abs=1e-6)


def test_counts_are_uniform_up_to_the_length():
    config = mdlm.Config(block_size=16, batch_size=4)
    lengths = torch.tensor([16, 3, 1, 7])
    counts = torch.stack([counts_of(config, step, 0.0, lengths) for step in range(4000)])
    assert (counts >= 1).all() and (counts <= lengths).all()
    assert counts.view(-1, 2, 2).sum(2).max() <= 17, "more than the compiled shapes hold"
    for i, n in enumerate(lengths.tolist()):
        share = counts[:, i].bincount(minlength=n + 1)[1:] / 4000
        assert (share - 1 / n).abs().max() < 5 * (1 / n / 4000) ** 0.5
    early = counts_of(config, 0, 1.0, lengths)
    assert ((early - (lengths + 1) / 2).abs() <= 0.5).all()  # all rates are 1/2


def scrambled(**more):
    settings = dict(n_layer=2, n_head=2, n_embd=32, block_size=24, batch_size=8, dropout=0.0)
    config = mdlm.Config(**settings | more)
    model = mdlm.make_model(config, 10, kernels.select("torch"), end_id=9)
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=g)
    model.register_forward_pre_hook(to_view, with_kwargs=True)  # as mdlm.load does
    return model.eval()


WINDOW = torch.tensor([[1, 10, 3, 9, 5, 6, 10, 7, 8, 9, 9, 4, 10, 2, 1, 9, *[3] * 7, 10]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(conv=0, pos="sinusoidal"),
        dict(conv=4, attention_every=2, time_conditioning=True),
        dict(pos="learned"),
    ],
)
def test_a_document_sees_no_other_one(more, dtype):
    model = scrambled(**more)
    spans = document_spans(WINDOW == 9)[0].tolist()
    assert spans[0][:12] == [0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 10, 11]
    assert spans[1][:12] == [4, 4, 4, 4, 10, 10, 10, 10, 10, 10, 11, 16]
    other = WINDOW.clone()
    other[0, 4:9] = torch.tensor([10, 1, 1, 10, 2])  # the second document
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
        before = model(WINDOW)[0]
        after = model(other)[0]
        changed = (before != after).any(1)
        assert changed[4:10].all() and not changed[:4].any() and not changed[10:].any()
        alone = torch.full_like(WINDOW, 9)
        alone[0, :6] = WINDOW[0, 4:10]
        close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0, atol=1)
        torch.testing.assert_close(model(alone)[0, :6], before[4:10], **close)


def test_gradients_stay_in_a_document():
    model = scrambled()
    x = model.embed(WINDOW).detach().requires_grad_()
    model.embed.forward = lambda ids: x
    model(WINDOW)[0, 4:10].square().sum().backward()
    touched = x.grad[0].abs().sum(1) > 0
    assert touched[4:10].all() and touched.sum() == 6


def test_autoregressive_model_learns_one_end(world):
    x0 = rows_of_unequal_length()
    model = toy(world, objective="ar")
    learned = model.objective.scored_mask(x0)
    assert learned.sum(1).tolist() == [4, 2, 3, 4, 2, 4, 4, 3]
    ce = F.cross_entropy(model(x0).mT, x0, reduction="none")
    r = mdlm.evaluate(model, x0)
    assert r["nll"] == pytest.approx(ce[learned].mean().item())
    shifted = ce[:, 1:][learned[:, 1:]].mean().item()
    assert r["ar_shifted"] == pytest.approx(shifted)
    mean_length = learned.sum(1).double().mean().item()
    model = toy(world, objective="ar", mean_length=mean_length)
    _, _, weights, _ = model.objective.batch(model.ops, *draw(model, x0))
    loss = (ce.flatten() * weights).sum().item()
    assert loss == pytest.approx(r["nll"])


def test_lengths_are_drawn_from_those_of_training():
    model = scrambled()
    model.length_counts[[2, 5, 24]] = torch.tensor([2.0, 1.0, 1.0])
    u = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    x = end_documents(model, torch.full((400, 24), 10), u)
    assert (x != 9).sum(1).bincount()[[2, 5, 24]].tolist() == [200, 100, 100]
    assert set(x.unique().tolist()) == {9, 10}
    x[:, :3] = 1  # a prompt of three tokens: no text of two is left
    begun = torch.cat((x[:, :3], torch.full((400, 21), 10)), 1)
    n = (end_documents(model, begun, u) != 9).sum(1)
    assert n.bincount()[[5, 24]].tolist() == [200, 200]
    tokenizer = Tokenizer("char", list("abcdefghi"), end=True)
    texts = sample.write(model, tokenizer, n=40, steps=2, generator=torch.Generator())
    assert {len(text) for text in texts} == {2, 5, 24}
    assert {len(t) for t in sample.write(model, tokenizer, "ab", n=5, steps=2, length=7)} == {7}


@pytest.fixture(scope="module")
def speeches(tmp_path_factory, pydoc):
    path = tmp_path_factory.mktemp("documents") / "text.txt"
    path.write_text(pydoc[:30_000], encoding="utf-8")
    return [f"--data={path}", "--separator=\\n\\n"]


def test_run_of_documents_resumes_samples_and_scores(speeches, tmp_path, capsys):
    flags = [*TINY, *speeches, "--eval_interval=3", "--rate_margin=0"]
    assert run_mdlm(*flags, "--max_steps=6", f"--out_dir={tmp_path / 'a'}") == 0
    assert "documents of given lengths" in capsys.readouterr().out
    model, tokenizer, _ = mdlm.load(tmp_path / "a")
    assert model.length_counts.sum() > 100 and model.objective.pad_id == tokenizer.end_id
    assert read_log(tmp_path / "a")[-1]["val_nelbo"] < 5
    again = tmp_path / "b"
    assert run_mdlm(*flags, "--max_steps=3", f"--out_dir={again}", "--lr_schedule=constant") == 0
    assert run_mdlm("--resume", "--max_steps=6", f"--out_dir={again}") == 0
    constant = [*flags, "--max_steps=6", f"--out_dir={tmp_path / 'c'}", "--lr_schedule=constant"]
    assert run_mdlm(*constant) == 0
    assert losses(again) == losses(tmp_path / "c")
    finer = [f"--init_from={tmp_path / 'a'}", *speeches, *TINY, "--max_steps=1", "--block_size=24"]
    assert run_mdlm(*finer, f"--out_dir={tmp_path / 'd'}") == 0
    assert len(mdlm.load(tmp_path / "d")[0].length_counts) == 25


def packed_by_hand(sizes, T):
    found = [[]]
    for size in sizes:
        if sum(found[-1]) + size > T:
            found.append([])
        found[-1].append(size)
    return [sum(window) for window in found]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_packed_windows_hold_all_that_fits(sizes):
    ids = [i for size in sizes for i in (*[1] * (size - 1), 9)]
    config = mdlm.Config(block_size=12, document_length="predicted")  # no document is empty here
    starts, taken, _ = windows = cut_windows(torch.tensor(ids).numpy(), config, 9)
    learned = taken - 1
    found = [part.tolist() for part in pack_windows(starts, taken, learned, 12)]
    assert found[1] == packed_by_hand(sizes, 12)
    assert found[0] == [0, *torch.tensor(found[1]).cumsum(0).tolist()[:-1]]
    assert sum(found[2]) == int(learned.sum()) and len(windows[0]) == len(sizes)


def test_packed_documents_have_the_same_bound(speeches, tmp_path):
    text = speeches[0].removeprefix("--data=")
    shape = dict(data=text, separator="\\n", block_size=128, batch_size=8, n_embd=32)
    configs = [mdlm.Config(**shape, n_head=2, n_layer=2, pack=pack) for pack in (False, True)]
    prepare(configs[0], tmp_path)
    loose, packed = (corpus_of(tmp_path, config, torch.device("cpu")) for config in configs)
    assert packed.mean_length > 1.1 * loose.mean_length
    assert torch.equal(loose.length_counts, packed.length_counts)
    assert loose.length_counts.sum() == (loose.ids["train"] == loose.tokenizer.end_id).sum()
    tokenizer = loose.tokenizer
    end_id = tokenizer.end_id
    model = mdlm.make_model(configs[0], tokenizer.vocab_size, kernels.select("torch"), end_id)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    results = []
    for corpus in (loose, packed):
        windows, _ = corpus.take("train", torch.arange(corpus.W), 0)
        results.append(mdlm.evaluate(model, windows, passes=8))
    nelbo, se = ([r[key] for r in results] for key in ("nelbo", "se"))
    assert abs(nelbo[0] - nelbo[1]) < 4 * (se[0] ** 2 + se[1] ** 2) ** 0.5
    assert se[0] < 0.02 * nelbo[0]
    flags = [*TINY, *speeches, "--pack=false", "--max_steps=3", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags) == 0


def test_the_rate_is_that_of_a_documents_text():
    """Not of what ends it, nor of the documents beside it."""
    config = mdlm.Config(block_size=8, n_layer=1, n_head=2, n_embd=16, time_conditioning=True)
    model = mdlm.make_model(config, 3, kernels.REFERENCES, end_id=END)
    mask = model.mask_id
    view = model.objective.view(torch.tensor([[mask, 1, END, mask, mask, 0, 1, END]]))
    assert view.rate[0, :, 0].tolist() == [0.5] * 3 + [0.5] * 5
    view = model.objective.view(torch.tensor([[mask, mask, END, mask, 1, 0, 1, END]]))
    assert view.rate[0, :, 0].tolist() == [1.0] * 3 + [0.25] * 5
