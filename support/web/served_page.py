"""The live page of serve.py: that of export.py --to=page, whose texts the server computes."""

from nanomdlm.support import abilities
from nanomdlm.support.cli import environment
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.templates import GAP_OR_LINE, gap_pattern
from nanomdlm.support.proofread.proofreader import check_model
from nanomdlm.support.serving.requests import MOST_STEPS
from nanomdlm.support.web import live_page

PRIVACY = "The server logs no text."
SCRIPTS = ["crc.js", "viewer.js", "on_server.js", "live.js"]


def page(model, filler, tokenizer, about, device, has_key, most_tokens):
    """Return the page as HTML.

    model, filler: the model that goes on, and that fills gaps
    about: what the page says of the model. has_key: whether clients need one
    most_tokens: that may be written after a prompt
    """
    gap = gap_pattern(tokenizer)
    signs = ["█", "_"] if gap is GAP_OR_LINE else ["█"]
    fills = abilities.fills_gaps(filler) and not filler.config.prompt_column
    n = model.objective.n_texts
    steps = dict(max=128, value=32)
    if n > 1:  # a call for each block at least, eight as sample.py has it
        steps = dict(min=n, max=min(16 * n, MOST_STEPS // n * n), step=n, value=8 * n)
    live = dict(
        gap=gap.pattern,
        signs=signs,
        fills=fills,
        blocks=n,
        matches=environment.is_installed("outlines_core"),
        fixes=can_fix(filler, tokenizer),
        key=has_key,
        device=device,
        steps=None if abilities.is_causal(model) else steps,
        most_tokens=most_tokens,
    )
    can = dict(fills=fills, patterns=live["matches"], fixes=live["fixes"], open_gaps=True)
    can |= dict(begins=not model.config.prompt_column)
    live["examples"] = live_page.examples(tokenizer, model.config, signs[0], **can)
    values = dict(about=live_page.introduction(PRIVACY), program="serve.py")
    return live_page.compose(live, about, SCRIPTS, policy="; connect-src 'self'", **values)


def can_fix(model, tokenizer):
    try:
        check_model(model, tokenizer)
    except UserError:
        return False
    return True
