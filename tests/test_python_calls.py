"""The Python calls of README.md and docs/python.md: their code runs, and they say their types."""

import inspect
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import mdlm
import sample
from support import kernels
from support.data.tokenizer import Tokenizer
from support.infill.likelihood import chain_rule
from support.training.checkpoint import SHIPPED

PUBLIC = [
    mdlm.load,
    mdlm.generate,
    mdlm.evaluate,
    sample.write,
    sample.generate,
    sample.unmask,
    Tokenizer.encode,
    Tokenizer.decode,
    chain_rule,
    kernels.mask_tokens_ref,
    kernels.linear_cross_entropy_ref,
    kernels.attention_ref,
    kernels.norm_conv_ref,
]


def code_of(path):
    """The Python of a page, one string for each block."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"(?ms)^```python\n(.*?)^```", text)


@pytest.fixture
def in_clone(tmp_path, monkeypatch):
    """A folder with a model in out/ and a text my.txt, as the pages assume."""
    shutil.copytree(SHIPPED, tmp_path / "out")
    (tmp_path / "my.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    monkeypatch.chdir(tmp_path)


def test_code_of_the_python_page_runs(in_clone):
    names = {}
    blocks = code_of("docs/python.md")
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert len(blocks) >= 7
    assert names["best"] == "t", "of: To be, or no█ to be"
    assert names["logp"] < 0 < names["result"]["nelbo"]
    assert names["loss"].requires_grad and names["W"].grad.isfinite().all()
    assert (names["tokens"] != names["model"].mask_id).all()


def test_code_of_the_readme_runs(in_clone):
    """Its loss and its sampler, with the model that comes with the repository; its first lines of
    Python. What it shows of how to change the program is a part of a line each: not run."""
    blocks = code_of("README.md")
    loss = next(b for b in blocks if "loss.backward" in b)
    sampler = next(b for b in blocks if "multinomial" in b)
    calls = next(b for b in blocks if "mdlm.load" in b)
    names = {}
    exec(compile(calls, "README.md", "exec"), names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert len(names["texts"]) == 3 and all(t.startswith("To be") for t in names["texts"])
    B, T = 8, 48
    torch.manual_seed(0)
    text = "To be, or not to be, that is the question of all".ljust(T)[:T]
    x0 = torch.tensor([tokenizer.encode(text)]).repeat(B, 1)
    names |= dict(F=F, B=B, T=T, x0=x0)
    exec(compile(loss, "README.md", "exec"), names)
    assert 0.1 < names["loss"].item() < 4, "nats per token of a text that the model knows"
    exec(compile(sampler, "README.md", "exec"), names)
    assert names["x"].shape == (B, T) and (names["x"] < model.mask_id).all()


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_public_calls_say_their_types(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for name, parameter in signature.parameters.items():
        is_free = name == "self" or parameter.kind is inspect.Parameter.VAR_KEYWORD
        assert is_free or parameter.annotation is not inspect.Parameter.empty, name
