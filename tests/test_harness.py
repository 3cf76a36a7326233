"""lm-evaluation-harness asks our models, and gets the probabilities that they have."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Toy, exhaustive_nelbo, run_mdlm

import sample
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill import likelihood

pytest.importorskip("lm_eval", reason="no lm_eval")
from test_pretrained import folder_of, tokenizer_of

from studies import harness

folder_of, tokenizer_of = folder_of, tokenizer_of  # fixtures
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
doc_to_text: "{{{{question}}}}"
metadata:
  version: 1
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
WRITE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learned one sentence, and questions about it."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "text.txt").write_text("the cat sat on a mat.\n" * 400)
    flags = ["--max_steps=150", "--n_embd=64", "--batch_size=16", "--muon_lr=0.05"]
    args = [*TINY, *flags, f"--data={folder}/text.txt", f"--out_dir={folder}/out"]
    assert run_mdlm(*args) == 0
    questions = [
        dict(question="the cat sat on", choices=[" no mat.", " a mat.", " a cat."], answer=1),
        dict(question="the cat", choices=[" sat on", " tas on"], answer=0),
    ]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines)
    for name, kind in (("choice", CHOICE), ("write", WRITE)):
        task = TASK.format(name=f"mdlm_{name}", folder=folder) + kind
        (folder / f"{name}.yaml").write_text(task)
    return folder


def ask(asked, *pairs):
    return asked.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])


def test_probabilities_of_all_answers_sum_to_one(run):
    asked = harness.Harness(run / "out", device="cpu")
    model, tokenizer = asked.model, asked.tokenizer
    answers = list(map("".join, itertools.product(tokenizer.vocab, repeat=2)))
    logp, greedy = zip(*ask(asked, *(("the c", answer) for answer in answers)))
    assert torch.tensor(logp, dtype=torch.float64).exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert [a for a, is_greedy in zip(answers, greedy) if is_greedy] == ["at"]
    x = torch.tensor([tokenizer.encode("the cat")])
    exact = likelihood.chain_rule(model, x)[0, 5:7].sum().item()
    assert logp[answers.index("at")] == pytest.approx(exact, abs=1e-6)


def test_long_answers_get_the_bound(run, world):
    """Its mean over seeds is that of all sets of masks."""
    asked = harness.Harness(run / "out", draws=3, device="cpu")
    asked.model = Toy(world.random, world.V, world.T)
    asked.model.parameters = lambda: iter([torch.zeros(1)])
    asked.tokenizer = Tokenizer("id", 3)
    found = []
    for asked.seed in range(400):
        found.append(ask(asked, ("", "2 0 1 2"))[0][0])
    found = torch.tensor(found)
    exact = -4 * exhaustive_nelbo(world.random, torch.tensor([[2, 0, 1, 2]]), world.V).item()
    assert found.std() > 0, "three draws of four counts vary"
    assert abs(found.mean() - exact) < 4 * found.std() / 20


@pytest.mark.slow
def test_tasks_are_scored_by_one_command(run):
    flags = ["--model=mdlm", f"--model_args=out_dir={run}/out", f"--include_path={run}"]
    flags += ["--tasks=mdlm_choice,mdlm_write", f"--output_path={run}/r"]
    command = [sys.executable, ROOT / "studies" / "harness.py", "run", *flags]
    environment = os.environ | dict(HF_HOME=str(run / "cache"), HF_HUB_OFFLINE="1")
    r = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-2000:]
    (written,) = run.glob("r/**/results*.json")
    results = json.loads(written.read_text())["results"]
    assert results["mdlm_choice"]["acc,none"] == 1.0
    assert "mdlm_choice" in r.stdout and "exact_match,none" in results["mdlm_write"]


def test_text_is_written_up_to_its_end(run):
    asked = harness.Harness(run / "out", device="cpu")
    settings = dict(until=["\n", "."], max_gen_toks=12)
    (text,) = asked.generate_until([SimpleNamespace(args=("the cat sat on", settings))])
    greedy = dict(length=26, temperature=0, seed=0)
    whole = sample.write(asked.model, asked.tokenizer, "the cat sat on", **greedy)[0]
    assert text == whole[14:].split("\n")[0].split(".")[0] and len(text) < 12
    (logp,) = asked.loglikelihood_rolling([SimpleNamespace(args=("the cat sat on a mat.\n" * 3,))])
    assert -66 < logp < 0


# ---- Networks of others


def write(asked, prompt, **settings):
    return asked.generate_until([SimpleNamespace(args=(prompt, settings))])[0]


@pytest.mark.parametrize("mark", ["█", "[___]", "[MASK]", "_", "[___]█"])
def test_marks_of_gaps_are_text_of_a_prompt(run, mark):
    """As the model has these characters; what it has not is said before hours of work."""
    asked = harness.Harness(run / "out", device="cpu")
    with pytest.raises(ValueError, match=r"request 2, .*: unknown"):
        ask(asked, ("the", " cat"), ("the", mark))
    asked.tokenizer = Tokenizer("char", list("█[_]MASKab \n"))
    assert asked.tokenizer.vocab_size == asked.model.vocab_size
    prompt = f"ab {mark}"
    ids = asked.tokenizer.encode(prompt)
    x = torch.tensor([[*ids, *[asked.model.mask_id] * 8]])
    found = sample.generate(asked.model, x, temperature=0, seed=0)[0].tolist()
    assert found[: len(ids)] == ids
    assert write(asked, prompt, max_gen_toks=8) == asked.tokenizer.decode(found[len(ids) :])
    ((logp, _),) = ask(asked, ("ab", mark))
    x = torch.tensor([asked.tokenizer.encode("ab" + mark)])
    assert logp == pytest.approx(
        likelihood.chain_rule(asked.model, x)[0, 2:].sum().item(), abs=1e-4
    )


def test_generation_kwargs_are_those_of_the_harness(run, capsys):
    asked = harness.Harness(run / "out", device="cpu")
    eight = write(asked, "the cat", max_gen_toks=8)
    assert len(eight) == 8
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert write(asked, "the cat", **{name: 8}) == eight, "other names of the same"
    for until, wanted in (
        (None, eight),
        ("", eight),
        ([""], eight),
        ([eight[2:4], "\n"], eight[:2]),
    ):
        assert write(asked, "the cat", max_gen_toks=8, until=until) == wanted
    likeliest = dict(max_gen_toks=8, do_sample=True, temperature=2.0, top_k=1)
    assert write(asked, "the cat", **likeliest) == eight
    assert write(asked, "the cat", max_gen_toks=0) == ""
    capsys.readouterr()
    assert write(asked, "the cat", max_gen_toks=8, repetition_penalty=2, until=[]) == eight
    assert write(asked, "the cat", max_gen_toks=8, repetition_penalty=2) == eight
    assert capsys.readouterr().err.count("repetition_penalty are not known here; ignored") == 1


def test_end_stands_between_prompt_and_answer(tmp_path):
    """In a run on prompts and answers, which has learned them so."""
    lines = "".join(json.dumps(dict(q=q, a=a)) + "\n" for q, a in ("xy", "yx", "zz")) * 60
    (tmp_path / "qa.jsonl").write_text(lines)
    flags = [*TINY, "--max_steps=120", "--n_embd=64", "--prompt_column=q", "--text_column=a"]
    args = [*flags, f"--data={tmp_path}/qa.jsonl", f"--out_dir={tmp_path}/out"]
    assert run_mdlm(*args) == 0
    asked = harness.Harness(tmp_path / "out", device="cpu")
    logp, greedy = zip(*ask(asked, *(("x", answer) for answer in "xyz")))
    assert greedy == (False, True, False) and logp[1] > max(logp[0], logp[2]) + 0.5
    settings = dict(until="\n", max_gen_toks=4)
    assert asked.generate_until([SimpleNamespace(args=("x", settings))]) == ["y"]
    ((longest, _),) = ask(asked, ("x" * 9, "y" * 31))
    (whole,) = asked.loglikelihood_rolling([SimpleNamespace(args=("y" * 40,))])
    assert longest < -5 and whole < -5, "a context full of an answer is scored too"
    with pytest.raises(ValueError, match="1 to 31"):
        ask(asked, ("x", "y" * 32))
