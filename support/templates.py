"""Templates for infilling: text in which █ is a token to fill and [___] a gap of unknown length.

Programs handle them as a list of parts: a literal string, a number of tokens, or None for [___].
A prompt that [END] follows is a list of ids.
"""

import itertools
import re
import sys

from support import files
from support.cli import UserError

GAP = re.compile(r"(█+|\[___\])")


def read_templates(infill, batch):
    """The template of --infill or those of a --batch, where "-" is standard input; else [None]."""
    if not batch and infill != "-":
        return [infill or None]
    try:
        if "-" in (infill, batch):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
            text = sys.stdin.read()
        else:
            # Without a byte order mark.
            with open(batch, encoding="utf-8-sig", opener=files.without_waiting) as f:
                text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the templates cannot be read ({e}); give UTF-8 text") from None
    text = text.removesuffix("\n")
    return text.split("\n") if batch else [text]


def parse_all(infill, batch, to_parts):
    """All (template or None, parts), before any work begins; errors name the line of the batch."""
    found = []
    for number, template in enumerate(read_templates(infill, batch), 1):
        try:
            found.append((template, to_parts(template)))
        except UserError as e:
            where = f"line {number} of {batch}: " if batch else ""
            raise UserError(f"{where}{e}") from None
    return found


def of_prompt(prompt, tokenizer, length, config):
    """The parts of a text that begins with a prompt or ""; length: of both, 0: the context."""
    length = length or config.block_size
    if config.prompt_column:  # an answer fits into the context too
        prompt = [*tokenizer.encode(prompt), tokenizer.end_id]
        length = min(length, config.block_size)
    n = len(to_ids([prompt], tokenizer))
    if n >= length:
        raise UserError(f"the prompt has {n} tokens of {length}; raise --length, or shorten it")
    return [part for part in (prompt, length - n) if part]


def check_text(text):
    """The text; UserError unless it is a string that UTF-8 can encode."""
    if not isinstance(text, str) or any("\ud7ff" < c < "\ue000" for c in text):
        raise UserError("the text is no string, or not UTF-8; convert it, or set a UTF-8 locale")
    return text


def is_template(text):
    return bool(GAP.search(text))


def parse(template, tokenizer, context):
    """The parts of a template; UserError if it has no gap, is too long or cannot be encoded."""
    if not template:
        raise UserError("the template is empty; write a text with █ for each missing token")
    known = " " if tokenizer.kind == "id" else tokenizer.decode([0])
    tokenizer.encode(GAP.sub(lambda gap: known * len(gap[0]), template))  # else names the position
    parts = [len(part) if part[0] == "█" else part for part in GAP.split(template) if part]
    parts = [None if part == "[___]" else part for part in parts]
    if all(isinstance(part, str) for part in parts):
        use = "mark each missing token with █, or a gap of unknown length with [___]"
        raise UserError(f"{template[:40]!r} has nothing to fill; {use}")
    for part, after in itertools.pairwise(parts):
        if part is None and not isinstance(after, str):
            use = "write █ for each token"
            raise UserError(f"a gap must not follow [___], or its length cannot be told; {use}")
    n = len(to_ids(parts, tokenizer))
    if n > context:
        raise UserError(f"the template has {n} tokens, the context only {context}; shorten it")
    return parts


def to_ids(parts, tokenizer, mask=0):
    """The ids of parts, `mask` in gaps; a gap of unknown length counts as one token."""
    ids = []
    for part in parts:
        if isinstance(part, str):
            part = tokenizer.encode(part)
        ids += part if isinstance(part, list) else [mask] * (part or 1)
    return ids


def to_texts(parts, ids, tokenizer):
    """(text, filled?) of each part of a filled template; literals keep their own characters."""
    texts = []
    for part in parts:
        n = len(to_ids([part], tokenizer))
        text = part if isinstance(part, str) else tokenizer.decode(ids[:n])
        if tokenizer.kind == "id":  # numbers need a space between them
            text = " " * bool(texts) + text.strip()
        text += "\n" * isinstance(part, list)
        texts.append((text, not isinstance(part, (str, list))))
        ids = ids[n:]
    return texts


def joined(texts):
    """The whole text of what `to_texts` returned."""
    return "".join(text for text, _ in texts)
