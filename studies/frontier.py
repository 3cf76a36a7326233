"""How well samplers write, by their network calls (python bench.py sample).

No number says it alone (Pynadath et al., 2604.02718): a low negative log-likelihood under other
models may be bought with dull texts. So beside it stand the entropy that this model expects along
the text, distinct words, and how well a classifier tells the texts from real ones (told_apart.py);
and the same for real text, and for texts that the autoregressive model wrote itself. Short words
are nearly always known, so only those of five letters and more count.
"""

import time
from functools import partial

import torch

import eval
import mdlm
import sample
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import word_statistics
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.numerics import standard_error
from nanomdlm.support.run import ranks
from studies import told_apart

# name -> settings of sample.unmask; the first is the default
SAMPLERS = {
    "default": dict(),
    "sweep": dict(redraw="sweep", spacing=8),
    "random order": dict(order="random", correct=0),
    "confidence": dict(order="confidence", correct=0),
}
CALLS = (4, 8, 16, 32, 64)


def judge_by(twin, x):
    """The mean nats per token of texts x (B, T) under an autoregressive model, its error, and the
    mean entropy of what the model expects along them: both are equal for its own texts.

    They are ids: the text of some, encoded again, would have others.
    """
    entropy = []

    def observe(at, targets, logits):
        p = logits.float().softmax(-1)
        entropy.append(torch.special.entr(p).sum(-1).double().cpu())

    device = next(twin.parameters()).device
    r = mdlm.evaluate(twin, x.to(device), batch_size=8, observe=observe)
    each = torch.tensor(r["by_window"], dtype=torch.float64)
    expected = torch.cat(entropy).mean().item()
    return dict(twin=each.mean().item(), twin_se=standard_error(each), expected=expected)


def telling(x, real):
    """How often a classifier tells texts x from real ones (B, T), and its standard error."""
    told, error = told_apart.accuracy(x, real)
    return dict(told=told, told_se=error)


def write(model, n, seeds, dtype, settings):
    """The ids (B, T) of n texts from nothing with each seed, and the seconds that one took."""
    device = next(model.parameters()).device
    x = torch.full((n, model.config.block_size), model.mask_id, device=device)
    began = time.monotonic()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        ids = torch.cat([sample.generate(model, x, seed=seed, **settings) for seed in seeds])
    return ids.cpu(), (time.monotonic() - began) / len(ids)


def bench_sampling(options, device, table):
    """Every sampler over numbers of calls; real text and the autoregressive twin beside them."""
    models = dict(ar=(None, None, None))
    folders = {}
    for flag, objective in (("out_dir", "mdlm"), ("ar_dir", "ar")):
        path = getattr(options, flag)
        if objective == "ar" and not path:
            continue
        trusted = options.trust_remote_code
        loaded = read_newest(path, partial(mdlm.load, device=device, trust_remote_code=trusted))
        (folders[objective], *_), models[objective] = loaded
        c = models[objective][2]
        if c.objective != objective or c.prompt_column:
            raise UserError(f"--{flag}={path} is no run of --objective={objective} on texts")
    model, tokenizer, config = models["mdlm"]
    twin = models["ar"][0]
    with eval.open_data(options.data, folders["mdlm"], tokenizer, config, device) as (corpus, _):
        training = tokenizer.decode(corpus.ids["train"][:2_000_000].tolist())
        windows = corpus.windows().long()
    by_text = word_statistics.WordStatistics(training, shortest=5)

    def statistics(x):
        texts = [tokenizer.decode(ids) for ids in x.tolist()]
        return by_text(texts) | (judge_by(twin, x) if twin else {})

    seeds = range(options.seed, options.seed + options.seeds)
    n = options.num_samples
    table.note(f"{n} texts of {config.block_size} tokens for each of the seeds {list(seeds)}")
    real = statistics(windows.cpu())
    halves = windows.cpu()[::2], windows.cpu()[1::2]
    table.add(dict(sampler="real text", calls=None, seconds=None) | real | telling(*halves))
    calls = dict.fromkeys(min(n, config.block_size) for n in CALLS)
    cases = [
        (model, name, settings | dict(steps=n), n)
        for name, settings in SAMPLERS.items()
        for n in calls
    ]
    if twin:
        cases.insert(0, (twin, "AR twin", {}, config.block_size))
    for writer, name, settings, steps in cases:
        if ranks.is_late(table.until):
            table.note(f"the time is up: nothing measured from {name}, {steps} calls on")
            break
        x, seconds = write(writer, n, seeds, options.dtype, settings)
        facts = dict(sampler=name, calls=steps, seconds=seconds)
        by_seed = [statistics(texts) for texts in x.split(n)]
        found = statistics(x) | telling(x, windows.cpu())
        table.add(facts | found | dict(by_seed=by_seed))
    if options.picture:
        table.draw(options.picture)
