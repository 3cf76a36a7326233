"""Templates for infilling: text in which █ is a token to fill and [___] a gap of unknown length.

[MASK] means the same as █, and so does _ where the model's vocabulary has no such character;
\\[MASK] is the text [MASK]. Programs handle them as a list of parts: a literal string, a number of
tokens, or None for [___]. A prompt that [END] follows is a list of ids.
"""

import itertools
import re
import sys

from support.cli import UserError

# █ and [MASK]: a token. [___]: a gap of unknown length. \[MASK] is text.
GAP = re.compile(r"(█|(?<!\\)\[MASK\]|\[___\])")
GAP_OR_LINE = re.compile(GAP.pattern[:-1] + "|_)")  # where a vocabulary has no _
LINE_END = re.compile("\r?\n")


def read_templates(infill, batch):
    """The template of --infill or those of a --batch, where "-" is standard input; else [None]."""
    if not batch and infill != "-":
        return [infill or None]
    how = dict(encoding="utf-8-sig", newline="")  # without a byte order mark; \r\n stays
    try:
        if "-" in (infill, batch):
            sys.stdin.reconfigure(errors="strict", **how)
            text = sys.stdin.read()
        else:
            with open(batch, **how) as f:
                text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the templates cannot be read ({e}); give UTF-8 text") from None
    if batch:  # each line is a template, without the \n or \r\n that ends it
        return LINE_END.split(re.sub("\r?\n\\Z", "", text))
    return [re.sub("\r?\n\\Z", "", text)]


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


def gap_pattern(tokenizer):
    """What a gap looks like in templates for this tokenizer."""
    try:
        spells_lines = "_" in tokenizer.decode(tokenizer.encode("_"))
    except UserError:
        spells_lines = False
    return GAP if spells_lines else GAP_OR_LINE


def is_template(text, tokenizer):
    return bool(gap_pattern(tokenizer).search(text))


def split(template, gap):
    """The parts of a template whose gaps match `gap`: literals, numbers of tokens, None."""
    parts = []
    for i, part in enumerate(gap.split(template)):
        if i % 2 == 0:
            parts += [part.replace("\\[MASK]", "[MASK]")] * bool(part)
        elif part == "[___]":
            parts.append(None)
        elif parts and isinstance(parts[-1], int):
            parts[-1] += 1
        else:
            parts.append(1)
    return parts


def parse(template, tokenizer, context):
    """The parts of a template; UserError if it has no gap, is too long or cannot be encoded."""
    if not template:
        raise UserError(
            "the template is empty; write a text with █ or [MASK] for each missing token"
        )
    known = " " if tokenizer.kind == "id" else tokenizer.decode([0])
    gap = gap_pattern(tokenizer)
    shown = gap.sub(lambda found: known * len(found[0]), template).replace(
        "\\[MASK]", known + "[MASK]"
    )
    tokenizer.encode(shown)  # else names the position
    parts = split(template, gap)
    if all(isinstance(part, str) for part in parts):
        use = "mark each missing token with █ or [MASK], a gap of unknown length with [___]"
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
