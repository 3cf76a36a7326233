"""What the page of serve.py is told meanwhile: dicts, which support/web/assets/live.js reads."""

import math
import time

import torch

from nanomdlm.support.infill.templates import to_ids
from nanomdlm.support.web.viewer import HtmlRecorder

SHOWN = 5  # ranked fills on the page
TOLD = 4  # texts that the network sees in a search, after which the page is told their number


def show(writer, segments, job, emit):
    """Write a text; emit what each network call draws, and at last the whole film of it."""
    began = time.monotonic()
    mask = writer.model.mask_id
    (rows,) = writer.batches(segments, 1, job.kind == "template")
    ids = torch.tensor(to_ids(segments, mask), dtype=torch.int64)
    film = HtmlRecorder(writer.tokenizer, ids, mask)
    ids = rows.x[0].tolist()
    n = film.size(ids)
    tokens, given = film.shown()
    steps = sum(chunk.steps for chunk in rows.chunks())
    emit(0, dict(tokens=tokens[:n], given=given[:n], steps=steps))
    facts = dict(calls=0, seconds=0.0)
    for step in rows.steps():
        facts = dict(calls=int(step.calls[0]), seconds=time.monotonic() - began)
        if film.add(step, 0):
            emit(0, facts | dict(frame=film.newest()))
    emit(0, dict(done=True, sample=facts | film.page(rows.x[0].tolist())))


def show_fills(writer, segments, job, emit):
    """Emit the likeliest fills of a template, with the share of each among them."""
    n = SHOWN if job.rank else 1
    seen = 0

    def update(new):
        nonlocal seen
        seen += new
        if seen % TOLD < new:
            emit(0, dict(tried=seen))

    found = writer.filling(segments, n, job.max_tokens, update).finish()
    p = torch.tensor([one.logp for one in found], dtype=torch.float64).softmax(0).tolist()
    shown = [
        dict(share=q, p=one.p, logp=one.logp) | still(writer.tokenizer, one)
        for one, q in zip(found, p)
    ]
    about = dict(proven=found.proven, compares_lengths=found.compares_lengths)
    about |= dict(bound=max(found.bound, -1e300), tried=found.sequences, seconds=found.seconds)
    emit(0, dict(done=True, fills=shown) | about)


def still(tokenizer, one):
    """A filling.Candidate as a film of one frame."""
    tokens = tokenizer.pieces(one.ids)
    frame = [
        [i, tokens[i], round(math.exp(logp), 4), []]
        for i, logp in enumerate(one.drawn)
        if logp is not None
    ]
    given = [logp is None for logp in one.drawn]
    return dict(tokens=tokens, given=given, frames=[frame])
