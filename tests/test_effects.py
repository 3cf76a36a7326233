"""No flag is silently without effect: with it something else comes out, or it is refused.

Every flag of sample.py, eval.py, bench.py, export.py and the lessons' programs, in every context.
"""

import dataclasses
import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_mdlm, tiny_flags
from test_arguments import lesson

import bench
import eval
import export
import mdlm
import sample
from studies import frontier
from support import cli, ensemble
from support.errors import NoEffect
from support.infill.calls import to_context
from support.training import checkpoint, runs
from support.web import live_page

slow = pytest.mark.slow

# What a model learned: flags of mdlm.py.
KINDS = {
    "default": "--data={text}",
    "ar": "--data={text} --objective=ar",
    "blocks": "--data={text} --block_length=4",
    "blocks of 1": "--data={text} --block_length=1",
    "whole": "--data={text} --block_length=4 --infill_share=0.5",
    "documents": "--data={records}",
    "learned lengths": "--data={records} --document_length=predicted",
    "documents ar": "--data={records} --objective=ar",
    "prompts": "--data={pairs} --prompt_column=prompt",
}


@pytest.fixture(scope="session")
def kinds(pydoc, tmp_path_factory):
    """A function: name of a kind -> the folder of a run with random weights."""
    at = tmp_path_factory.mktemp("kinds")
    words = re.findall(r"[a-z]+", pydoc)[:900]
    files = dict(text=at / "text.txt", records=at / "records.jsonl", pairs=at / "pairs.jsonl")
    files["text"].write_text(" ".join(words))
    (at / "other.txt").write_text(" ".join(words[::-1]))
    groups = [words[i : i + 2 + i % 2] for i in range(0, 800, 3)]
    texts = [" ".join(group)[:7] for group in groups]
    records = [json.dumps(dict(text=text)) for text in texts]
    pairs = [json.dumps(dict(prompt=text[:2], text=text[2:5])) for text in texts]
    files["records"].write_text("\n".join(records))
    files["pairs"].write_text("\n".join(pairs))
    made = {}

    def make(name):
        if name in made:
            return made[name]
        flags = [flag.format_map(files) for flag in KINDS[name].split()]
        out = at / name.replace(" ", "_")
        size = ["--n_embd=16", "--block_size=8", "--n_layer=1", f"--out_dir={out}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mdlm, "report", lambda run: None)
            # The run takes no step; the first optimizer that is made loads torch.compile.
            patch.setattr(mdlm, "make_optimizers", lambda *_: [])
            run = mdlm.setup(mdlm.parse_args(tiny_flags(*size, *flags)), 0.0)
            g = torch.Generator().manual_seed(0)
            for key, tensor in run.averaged.state_dict().items():
                if tensor.is_floating_point() and key != "length_counts":
                    tensor += torch.randn(tensor.shape, generator=g) / 2
            runs.save(run)
        checkpoint.release()
        made[name] = str(out)
        return made[name]

    make.files = files
    return make


@pytest.fixture
def tried(kinds, monkeypatch, tmp_path, capfd):
    """A function: main and argv -> what came out, files too; None: refused in one sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_text("th██ i\na█\n")
    (tmp_path / "gaps").write_text("th██ i\na[___]b\n")
    loaded = {}

    def read_once(path, read):
        key = (path, str(read.keywords))
        if key not in loaded:
            loaded[key] = ensemble.read_newest(path, read)
        return loaded[key]

    monkeypatch.setattr(sample, "read_newest", read_once)
    monkeypatch.setattr(sample.word_statistics, "training_text", lambda *_: "")

    def run(main, argv):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code = cli.run(main, argv, checkpoint.release)
        said = capfd.readouterr()
        files = {}
        for path in tmp_path.rglob("*"):
            if path.is_file() and path not in before:
                files[path.name] = comparable(path.read_bytes().decode(errors="replace"))
                path.unlink()
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        if code:
            assert code == 2 and said.err.count("\n") == 1, (argv, said.err)
            return None, said.err
        return (comparable(said.out), files), said.err

    run.known = {}
    return run


def comparable(text):
    """Output without what differs from run to run, and without what only repeats a flag."""
    text = text.partition("\nsetting ")[0]  # of --compare: the texts, not the table
    return re.sub(r'"(seconds|tokens/s|steps|setting)": [^,}]+', "", text)


def has_effect(run, main, base, flag):
    """Whether a flag changes what comes out; also if it is refused."""
    name = flag.partition("=")[0]
    argv = [word for word in base if word.partition("=")[0] != name]
    if str(argv) not in run.known:
        run.known[str(argv)] = run(main, argv)
    plain, said = run.known[str(argv)]
    if plain is None:  # it needs what the flag replaces
        plain, said = run(main, base)
    assert plain is not None, (argv, said)
    with_flag, said = run(main, [*argv, flag])
    return with_flag is None or with_flag != plain


# ---- sample.py

SAMPLE = [
    "--steps=2",
    "--correct=1",
    "--redraw=sweep",
    "--spacing=1",
    "--order=random",
    "--order=confidence",
    "--order=one_shot",
    "--threshold=0.3",
    "--entropy_bound=0.5",
    "--block=3",
    "--temperature=0.3",
    "--top_k=2",
    "--top_p=0.4",
    "--cfg=3",
    "--seed=7",
    "--length=3",
    "--num_samples=4",
    "--candidates=5",
    "--max_gap=2",
    "--prompt=an",
    "--html=page.html",
    "--infill=o██e",
    "--batch=batch",
    "--compare=temperature=1,2",
    "--json=out.json",
    "--logprobs=2",
]
ABSENT = {
    "--out_dir": "another model, as all other tests show",
    "--device": "the same texts on any device",
    "--watch": "what it shows is no text (test_watch_is_plain_lines_in_a_pipe)",
    "--trust_remote_code": "who may run code (test_remote_code.py)",
    "--fix": "another task (test_changes_are_shown_and_the_file_stays)",
    "--output": "of --fix (test_output_may_be_the_file_itself)",
    "--caution": "of --fix (test_caution_keeps_surer_changes_alone)",
}
# Of these the effect cannot show.
UNSEEN = {
    ("ordered", "--block"): "one token a call, from left to right, in chunks or not",
    ("one gap", "--steps"): "at most so many calls: one is enough",
    ("one gap", "--seed"): "16 draws for a gap find the same three likeliest fills",
    ("drawn", "--order"): "an order of three gaps may draw the same tokens",
    ("ranked", "--order"): "16 draws for three gaps may find the same likeliest fill",
    ("steps", "--num_samples"): "the first text is shown, and counts in a table",
    ("orders", "--num_samples"): "the first text is shown, and counts in a table",
    ("blocks", "--order=confidence"): "the default in small blocks",
    ("whole", "--order=confidence"): "the default in small blocks",
}


CONTEXTS = {
    "nothing": "",
    "few": "--steps=3",
    "one": "--steps=1",
    "greedy": "--temperature=0",
    "top": "--top_k=1",
    "reveals": "--correct=0",
    "ordered": "--order=left_to_right --correct=0 --temperature=0",
    "one shot": "--order=one_shot",
    "short": "--length=6",
    "long": "--length=14",
    "prompt": "--prompt=the",
    "several": "--num_samples=2",
    "page": "--html=page.html",
    "chunks of 1": "--block=1",
    "ranked": "--infill=t███_i",
    "one gap": "--infill=th█_i",
    "drawn": "--infill=t███_i --num_samples=1",
    "unknown": "--infill=th[___]i",
    "unknown drawn": "--infill=[___] --num_samples=2",
    "open": "--infill=th[___]",
    "both": "--infill=t█[___]o",
    "batch": "--batch=batch",
    "gaps": "--batch=gaps",
    "steps": "--compare=steps=4,8 --num_samples=2",
    "orders": "--compare=order=random,one_shot --num_samples=2",
}
ELSEWHERE = ("nothing", "greedy", "long", "ranked")
PLACES = [
    (kind, context)
    for kind in KINDS
    for context in (CONTEXTS if kind == "default" else ELSEWHERE)
    if (kind, context) != ("prompts", "long")  # which is refused
    if kind in ("default", "whole", "documents", "learned lengths")
    or "infill" not in CONTEXTS[context]
]


def sample_base(kinds, kind, context):
    words = [word.replace("_i", " i") for word in CONTEXTS[context].split()]
    base = [f"--out_dir={kinds(kind)}", "--device=cpu", *words]
    if not {"infill", "batch", "num_samples", "page.html"} & {
        *re.findall(r"[\w.]+", " ".join(words))
    }:
        base += ["--num_samples=5"]
    base += ["--json=-"] * ("compare" not in CONTEXTS[context])
    if kind not in ("ar", "documents ar", "blocks of 1") and "steps" not in CONTEXTS[context]:
        base += ["--steps=8"] * (context not in ("one shot", "chunks of 1", "orders"))
    if kind == "prompts" and context != "prompt":
        base.append("--prompt=the")
    return base


def check_sample(kinds, tried, kind, context, flags):
    base = sample_base(kinds, kind, context)
    found = [flag for flag in flags if not has_effect(tried, sample.main, base, flag)]
    names = [(flag, flag.partition("=")[0]) for flag in found]
    silent = [
        flag
        for flag, name in names
        if not {(where, x) for where in (kind, context) for x in (flag, name)} & UNSEEN.keys()
    ]
    assert not silent, (base, silent)


@pytest.mark.parametrize("context", [*CONTEXTS])
def test_flags_of_sample_have_an_effect(kinds, tried, context):
    n = [*CONTEXTS].index(context)
    check_sample(kinds, tried, "default", context, SAMPLE[n % 7 :: 7])


@slow
@pytest.mark.parametrize("kind, context", PLACES)
def test_every_flag_of_sample_has_an_effect(kinds, tried, kind, context):
    check_sample(kinds, tried, kind, context, SAMPLE)


def test_every_flag_of_sample_is_tried():
    named = {flag.partition("=")[0] for flag in SAMPLE} | ABSENT.keys()
    assert named == {f"--{field.name}" for field in dataclasses.fields(sample.Options)}


# ---- Python callers


@pytest.mark.parametrize(
    "kind, settings, name",
    [
        ("default", dict(correct=0, redraw="sweep"), "redraw"),
        ("default", dict(steps=4, spacing=2), "spacing"),
        ("default", dict(steps=1, order="random"), "order"),
        ("default", dict(temperature=0, top_p=0.5), "top_p"),
        ("default", dict(top_k=1, temperature=0.5), "temperature"),
        ("default", dict(top_k=1000), "top_k"),
        ("default", dict(block=1, correct=2), "correct"),
        ("default", dict(cfg=1.0), "cfg"),
        ("ar", dict(steps=4), "steps"),
        ("ar", dict(redraw="sweep"), "redraw"),
        ("ar", dict(block=4), "block"),
        ("blocks of 1", dict(order="random"), "order"),
    ],
)
def test_python_callers_get_the_same(kinds, kind, settings, name):
    model, tokenizer, config = mdlm.load(kinds(kind))
    x = torch.full((1, config.block_size), model.mask_id)
    for call in (
        partial(sample.generate, model, x),
        partial(sample.unmask, model, x),
        partial(sample.write, model, tokenizer),
    ):
        with pytest.raises(NoEffect, match=f"^--{name} has no effect"):
            call(**settings)
    assert not sample.has_effect(model, **settings) or name == "cfg"


def test_limits_of_write_have_an_effect(kinds):
    model, tokenizer, _ = mdlm.load(kinds("default"))
    with pytest.raises(ValueError, match="max_gap=3 has no effect"):
        sample.write(model, tokenizer, "th█", max_gap=3)
    assert sample.write(model, tokenizer, ["th█", "a[___]b"], max_gap=1, seed=1)


def test_former_names_work(kinds, tried):
    model, _, config = mdlm.load(kinds("default"))
    x = torch.full((4, config.block_size), model.mask_id)
    now = sample.generate(model, x, seed=1, redraw="low_confidence", spacing=2)
    assert torch.equal(now, sample.generate(model, x, seed=1, redraw="doubtful", distance=2))
    base = [f"--out_dir={kinds('default')}", "--json=-"]
    now = tried(sample.main, [*base, "--spacing=2", "--redraw=low_confidence"])
    assert now[0] == tried(sample.main, [*base, "--distance", "2", "--redraw", "doubtful"])[0]
    both = ["--compare=distance=2,3", "--compare=redraw=doubtful,sweep"]
    assert all(tried(sample.main, [*base, flag])[0] for flag in both)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--compare=steps=0,32", "write the same texts"),
        ("--compare=correct=9,9", "twice"),
        ("--compare=temperature=0,1 --temperature=0.5", "--temperature has no effect"),
        ("--compare=spacing=2,4 --correct=0", "write the same texts"),
        ("--compare=order=one_shot,random --steps=1", "contradict|write the same texts"),
        ("--compare=cfg=0,1", "write the same texts"),
    ],
)
def test_rows_of_a_comparison_differ(kinds, tried, flags, words):
    found, said = tried(sample.main, [f"--out_dir={kinds('default')}", *flags.split()])
    assert found is None and re.search(words, said), said


# ---- eval.py

EVAL = [
    "--windows=2",
    "--passes=3",
    "--temperature=1.5",
    "--whole",
    "--exact",
    "--dtype=bfloat16",
    "--rate=0.9",
    "--text=another",
    "--json=out.json",
    "--pictures=pictures",
    "--device=cpu",
]
EVAL_CONTEXTS = [
    *((kind, "--windows=3") for kind in KINDS if kind != "prompts"),
    ("default", "--exact --windows=2"),
    ("whole", "--whole --windows=2"),
    ("default", "--text=these"),
]
EXACT = "autoregressive models are exact in any case, which their results say"
EVAL_UNSEEN = {("ar", "--exact"): EXACT, ("documents ar", "--exact"): EXACT}


@pytest.mark.parametrize(
    "kind, words",
    [
        EVAL_CONTEXTS[0],
        EVAL_CONTEXTS[-1],
        *(pytest.param(*c, marks=slow) for c in EVAL_CONTEXTS[1:-1]),
    ],
)
def test_flags_of_eval_have_an_effect(kinds, tried, kind, words, monkeypatch):
    monkeypatch.setattr(eval, "read_newest", sample.read_newest)
    monkeypatch.setattr(eval.plots, "save", write_pictures)
    base = [f"--out_dir={kinds(kind)}", "--json=-", *words.split()]
    for flag in [*EVAL, f"--data={kinds.files['text']}"]:
        if (kind, flag) in EVAL_UNSEEN or flag == "--device=cpu":
            continue
        if flag.startswith("--data") and KINDS[kind].startswith("--data={text}"):
            flag = f"--data={ROOT / 'README.md'}"
        assert has_effect(tried, eval.main, base, flag), (base, flag)


def write_pictures(draw, folder, verbose, **more):
    """Stands in for plots.save, which takes long."""
    if str(folder) == "pictures":
        Path(folder, "loss.png").touch()


@pytest.mark.parametrize("flag", EVAL)
def test_a_comparison_reads_logs_alone(tried, tmp_path, flag, monkeypatch):
    monkeypatch.setattr(eval.plots, "save", write_pictures)
    run = tmp_path / "run"  # a log, and nothing else
    run.mkdir()
    record = dict(step=4, tokens=1024, seconds=1.0, val_nelbo=2.0, val_nelbo_se=0.1, val_bpc=2.9)
    (run / "log.jsonl").write_text(json.dumps(record) + "\n")
    assert has_effect(tried, eval.main, [f"--compare={run}", "--json=-"], flag)


# ---- bench.py


def test_a_mode_of_bench_takes_its_own_flags_alone(tried, monkeypatch):
    """On a CPU kernels are refused in any case; without a mode it trains."""
    begun = []
    monkeypatch.setattr(
        bench, "MODES", {mode: lambda *args: begun.append(1) for mode in bench.MODES}
    )
    monkeypatch.setattr(bench.ResultsTable, "close", lambda table: 0)
    monkeypatch.setattr(bench.proven, "show", lambda table: None)  # takes 20 s
    for mode in ("", "train", "sample"):
        own = bench.names_of(mode or "train")
        for field in dataclasses.fields(bench.Options):
            value = field.metadata["choices"][-1] if field.metadata["choices"] else field.default
            value = dict(json="-", device="cpu").get(field.name, "x" if value == "" else value)
            flag = f"--{field.name}={value}"
            argv = [mode] * bool(mode) + ["--device=cpu", flag]
            begun.clear()
            found, said = tried(bench.main, argv)
            assert bool(begun) == (found is not None) == (field.name in own), (argv, said)
            assert found or f"--{field.name} has no effect in bench.py" in said


def test_help_of_a_mode_shows_its_flags(capsys):
    for mode in bench.MODES:
        with pytest.raises(SystemExit):
            bench.main([mode, "--help"])
        shown = {*re.findall(r"(?m)^  --(\w+)", capsys.readouterr().out)}
        assert shown - {"help"} == {*bench.names_of(mode)}


@slow
def test_flags_of_bench_sample_have_an_effect(kinds, tried, monkeypatch):
    """But for --dtype, whose digits are too few to change a text here, and --time_limit, which
    test_bench_without_a_time_is_no_success has."""
    monkeypatch.setattr(frontier, "CALLS", (6,))
    base = [
        "sample",
        f"--out_dir={kinds('default')}",
        "--num_samples=2",
        "--json=-",
        "--device=cpu",
    ]
    for flag in (
        *("--num_samples=3", "--seed=5", "--seeds=1"),
        *(
            f"--ar_dir={kinds('ar')}",
            f"--data={kinds.files['text'].with_name('other.txt')}",
            "--json=out.json",
        ),
    ):
        assert has_effect(tried, bench.main, base, flag), flag


# ---- export.py


@pytest.mark.parametrize("to", ["hf", "page", "checkpoint"])
def test_flags_of_export_have_an_effect(kinds, tried, to, monkeypatch):
    monkeypatch.setattr(
        live_page, "contents_of", lambda *args: {"page": args[3].encode()}
    )  # weights
    base = [f"--to={to}", f"--out_dir={kinds('default')}", "--dest=new"]
    number = "bfloat16" if to == "checkpoint" else "float32"
    for flag in ("--pad_to_context", f"--weights={number}", "--to=page", "--to=checkpoint"):
        if flag != f"--to={to}":
            assert has_effect(tried, export.main, base, flag), flag


def test_padding_that_nothing_sees_is_refused(kinds, tried):
    for kind in ("documents", "ar"):
        flags = [f"--out_dir={kinds(kind)}", "--dest=new", "--pad_to_context"]
        assert "has no effect on a model that does not see" in tried(export.main, flags)[1]
    model, tokenizer, config = mdlm.load(kinds("documents"))
    x = torch.tensor([[0, model.mask_id, 1, tokenizer.end_id]])
    padded = to_context(model, x)
    assert len(padded[0]) == config.block_size > 4
    assert torch.allclose(model(x), model(padded)[:, :4], atol=1e-5)


# ---- The lessons' programs


@pytest.mark.parametrize("name", ["pictures", "patterns", "animate"])
def test_flags_of_lessons_have_an_effect(name, kinds, tried, monkeypatch):
    """(minimal.py: --seconds and --template are tested where it trains, in test_lessons.py.)"""
    program = lesson(name)
    drawn = []
    for part in vars(program):
        if part.startswith("draw"):
            monkeypatch.setattr(
                program, part, lambda *args, part=part: drawn.append((part, len(args[0])))
            )
    argv = ["new.png"]
    flags = [[], ["--text=a█"], ["--text=a█", f"--run={kinds('whole')}"]]
    if name == "patterns":
        config = SimpleNamespace(data="patterns")
        monkeypatch.setattr(program.mdlm, "load", lambda path: (None, None, config))
        monkeypatch.setattr(program, "measure", lambda *args: ([args[2:]], *args[2:]))
        monkeypatch.setattr(program, "draw", lambda *args: drawn.append(args))
        argv = [kinds("default"), "new.png"]
        flags = [[], ["--seeds=2"], ["--sequences=17"]]
    if name == "animate":
        Path("page.html").touch()
        monkeypatch.setattr(program, "read_sample", lambda path: {})
        monkeypatch.setattr(program, "draw", lambda sample, theme: drawn.append(theme) or theme)
        argv = ["page.html", "new.svg"]
        flags = [[], ["--dark"]]
    for more in flags:
        assert cli.run(program.main, [*argv, *more]) == 0
    assert len(drawn) == len(flags)


@pytest.mark.parametrize("flag", ["--text_column=auto", "--separator=auto"])
def test_auto_is_a_value_like_others_where_no_choice_has_it(text_file, tmp_path, capsys, flag):
    """Refused as any other text is: of a text there are no columns, of records no separators."""
    data = text_file
    if flag.startswith("--separator"):
        data = tmp_path / "docs.jsonl"
        data.write_text('{"text": "some words"}\n' * 400)
    flags = [f"--data={data}", *tiny_flags("--max_steps=1"), f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags, flag) == 2
    assert f"{flag.partition('=')[0]} has no effect" in capsys.readouterr().err
