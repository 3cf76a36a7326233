"""Templates for infilling: text in which █ is a token to fill and [___] a gap of unknown length.

[MASK] means the same as █, and so does _ where the model's vocabulary has no such character;
\\[MASK] is the text [MASK]. Programs handle templates as a list of parts: a Literal, a number of
tokens, or None for [___]. A literal has the ids that it has in a whole text, after what precedes it
there (support/data/seams.py).
"""

import itertools
import re
import sys
import unicodedata

import torch

from support import files
from support.data.seams import SPACED, is_space
from support.errors import UserError

# █ and [MASK]: a token. [___]: a gap of unknown length. \[MASK] is text.
GAP = re.compile(r"(█|(?<!\\)\[MASK\]|\[___\])")
GAP_OR_LINE = re.compile(GAP.pattern[:-1] + "|_)")  # where a vocabulary has no _
LINE_END = re.compile("\r?\n")


class Literal(str):
    """A text that is given, with its ids; those of a prompt may end in [END].

    lends_space: its last space is in no id of its own; the next token must begin with one
    """

    def __new__(cls, text, ids, lends_space=False):
        literal = super().__new__(cls, text)
        literal.ids = ids
        literal.lends_space = lends_space
        return literal


def encode_literal(text, tokenizer, after_gap, before_gap):
    """The Literal of a string: where words take the space in front of them, a gap's first does."""
    ids = tokenizer.encode_given(text, after_gap)
    if not (before_gap and is_space(text[-1:]) and tokenizer.space_tokens().any()):
        return Literal(text, ids)
    without = text[:-1] if text.endswith(" ") else text.rstrip()
    shorter = tokenizer.encode_given(without, after_gap)
    lends = bool(without or after_gap) and (text.endswith(" ") or ids == shorter)
    return Literal(text, shorter if lends else ids, lends)


def encode_parts(parts, tokenizer):
    """Parts with Literals in place of strings; a string that is not the first follows a gap."""
    found = []
    for i, part in enumerate(parts, 1):
        if isinstance(part, str) and not isinstance(part, Literal):
            part = encode_literal(part, tokenizer, i > 1, i < len(parts))
        found.append(part)
    return found


def borrowing(parts):
    """Where, in the ids of parts, tokens must begin with the space that a literal lends."""
    ends = itertools.accumulate(len(to_ids([part], None)) for part in parts)
    return [end for part, end in zip(parts, ends) if getattr(part, "lends_space", False)]


def allowed_tokens(parts, tokenizer):
    """{position: (V,) bool, what may be drawn there} for the places where not all tokens may."""
    return allowed_in_all([parts], tokenizer)


def allowed_in_all(templates, tokenizer):
    """As allowed_tokens, for several lists of parts: what holds in all of them."""
    places = set.intersection(*(set(borrowing(parts)) for parts in templates))
    if not places:
        return {}
    allowed = tokenizer.space_tokens().copy()
    if tokenizer.end_id is not None:
        allowed[tokenizer.end_id] = True
    return dict.fromkeys(sorted(places), torch.from_numpy(allowed))


def keeps_spaces(parts, ids, tokenizer):
    """Whether the tokens of a filled template begin with the spaces that literals lend."""
    first = [ids[i] for i in borrowing(parts) if i < len(ids)]
    return all(tokenizer.space_tokens()[i] for i in first)


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
            with open(batch, opener=files.without_waiting, **how) as f:
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
            file = "standard input" if batch == "-" else batch
            where = f"line {number} of {file}: " if batch else ""
            raise UserError(f"{where}{e}") from None
    return found


def of_prompt(prompt, tokenizer, length, config):
    """The parts of a text that begins with a prompt or ""; length: of both, 0: the context."""
    length = length or config.block_size
    ids = tokenizer.encode_given(prompt)
    if prompt and not ids:
        raise UserError(
            f"the tokenizer keeps nothing of {prompt[:40]!r}; give a word, or no prompt"
        )
    literal = encode_literal(prompt, tokenizer, after_gap=False, before_gap=True)
    if config.prompt_column:  # an answer fits into the context too
        literal = Literal(prompt + "\n", [*ids, tokenizer.end_id])
        length = min(length, config.block_size)
    n = len(literal.ids)
    if n >= length:
        raise UserError(f"the prompt has {n} tokens of {length}; raise --length, or shorten it")
    return [part for part in (literal, length - n) if part]


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
        use = "write a text with █ or [MASK] for each missing token"
        raise UserError(f"the template is empty; {use}")
    gap = gap_pattern(tokenizer)
    if tokenizer.kind in ("char", "id"):  # which name the position of what they do not know
        known = " " if tokenizer.kind == "id" else tokenizer.decode([0])
        shown = gap.sub(lambda found: known * len(found[0]), template)
        tokenizer.encode(shown.replace("\\[MASK]", known + "[MASK]"))
    parts = split(template, gap)
    if all(isinstance(part, str) for part in parts):
        use = "mark each missing token with █ or [MASK], a gap of unknown length with [___]"
        raise UserError(f"{template[:40]!r} has nothing to fill; {use}")
    for part, after in itertools.pairwise(parts):
        if part is None and not isinstance(after, str):
            use = "write █ for each token"
            raise UserError(f"a gap must not follow [___], or its length cannot be told; {use}")
    parts = encode_parts(parts, tokenizer)
    n = len(to_ids(parts, tokenizer))
    if n > context:
        raise UserError(f"the template has {n} tokens, the context only {context}; shorten it")
    return parts


def to_ids(parts, tokenizer, mask=0):
    """The ids of parts, `mask` in gaps; a gap of unknown length counts as one token."""
    ids = []
    for part in encode_parts(parts, tokenizer):
        ids += part.ids if isinstance(part, Literal) else [mask] * (part or 1)
    return ids


def to_texts(parts, ids, tokenizer):
    """(text, filled?) of each part of a filled template; literals keep their own characters.

    Joined they are what the tokenizer decodes, where that keeps a text as it is. A space that a
    literal ends with, and that comes with the next token again, is not written twice.
    """
    parts = encode_parts(parts, tokenizer)
    ends = list(itertools.accumulate(len(to_ids([part], tokenizer)) for part in parts))
    texts = []
    before = ""  # the literal before a gap, if the gap may not begin with a space
    for part, text in zip(parts, tokenizer.cut(ids[: ends[-1]], ends[:-1])):
        filled = not isinstance(part, Literal)
        if not filled:
            before = part if has_own_space(part, text, tokenizer) else ""
            text = str(part)
        elif before and text:
            text = text[1:] if is_space(text) else text
            before = ""
        if tokenizer.kind == "id":  # numbers need a space between them
            text = " " * bool(texts) + text.strip(" ")
        texts.append((text, filled))
    return texts


def has_own_space(literal, decoded, tokenizer):
    """Whether the space that a tokenizer writes after a literal is there, or not wanted there."""
    last = literal[-1:]
    if last.isspace():
        return literal.lends_space or not decoded[-1:].isspace()
    if tokenizer.kind != "file" or not literal:
        return False
    # "(███)", "well-███": the ids are the same with a space and without.
    wanted = last.isalnum() or last in SPACED or unicodedata.category(last) in ("Pe", "Pf")
    return not wanted and tokenizer.library.forgets_space_after(last)


def joined(texts):
    """The whole text of what `to_texts` returned."""
    return "".join(text for text, _ in texts)
