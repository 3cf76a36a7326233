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


def page(writer, about, device, options):
    """Return the page as HTML.

    writer: a serving.writing.Writer. about: what the page says of the model
    options: serve.Options
    """
    model, filler, tokenizer = writer.model, writer.filler, writer.tokenizer
    gap = gap_pattern(tokenizer)
    signs = ["█", "_"] if gap is GAP_OR_LINE else ["█"]
    n = model.objective.n_texts
    steps = dict(max=128, value=32)
    if n > 1:  # a call for each block at least, eight as sample.py has it
        steps = dict(min=n, max=min(16 * n, MOST_STEPS // n * n), step=n, value=8 * n)
    live = dict(
        gap=gap.pattern,
        signs=signs,
        fills=abilities.fills_gaps(filler) and not filler.config.prompt_column,
        blocks=n,
        matches=environment.is_installed("outlines_core"),
        fixes=can_fix(filler, tokenizer),
        key=bool(options.api_key),
        device=device,
        steps=None if abilities.is_causal(model) else steps,
        most_tokens=options.max_tokens,
    )
    does = dict(
        fill=live["fills"],
        open=live["fills"],
        match=live["fills"] and live["matches"],
        begin=not model.config.prompt_column,
        fix=live["fixes"],
    )
    can = {name for name, is_so in does.items() if is_so}
    live["examples"] = live_page.examples(tokenizer, model.config, signs[0], can)
    values = dict(about=live_page.introduction(PRIVACY), program="serve.py")
    return live_page.compose(live, about, SCRIPTS, policy="; connect-src 'self'", **values)


def can_fix(model, tokenizer):
    try:
        check_model(model, tokenizer)
    except UserError:
        return False
    return True
