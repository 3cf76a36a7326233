"""Templates for infilling: text in which █ is a token to fill and [___] a gap of unknown length.

[MASK] means the same as █, and so does _ if the model's vocabulary has no such character.
\\[MASK] stands for the text [MASK] itself. The fills of [___:REGEX] and [███:REGEX] must match a
regular expression, that of [___|yes|no] is one of a list (support/constrain/).

In the code, a template is a list of segments, each a Text (given) or a Gap. A Text is tokenized as
in the middle of a whole text, after the text that precedes it
(support/data/hf_tokenizer.py).
"""

import contextlib
import functools
import itertools
import re
import sys
import unicodedata
from typing import Any, NamedTuple

import torch

from nanomdlm.support.cli import products
from nanomdlm.support.cli.python_arguments import check_text, whole_number
from nanomdlm.support.errors import TooLong, UserError

# Marks of gaps, and what begins one that must match.
GAP = re.compile(r"((?<!\\)\[(?:___|█+)[:|]|█|(?<!\\)\[MASK\]|\[___\])")
GAP_OR_LINE = re.compile(GAP.pattern.removesuffix(")") + "|_)")  # for a vocabulary without _
OPENING = re.compile(r"(?:___|█+)[:|]")
ESCAPE = re.compile(rf"\\(?=\[(?:MASK\]|{OPENING.pattern}))")  # \ before text, not a mark
LINE_END = re.compile("\r?\n")
SPACED = ".,;:!?%"  # marks that a space usually follows


class Text(str):
    """Given text of a template, with its token ids. The ids of a prompt may end in [END].

    lends_space: the last space of the text is in none of the ids. The next token, the first of a
        gap, must begin with it
    lead: the line break and indentation at the end of the text, which are in none of the ids. The
        tokens of the gap after it begin with them. n_lead: how many tokens they are alone
    """

    is_gap = False
    is_open = False

    def __new__(cls, text, ids, lends_space=False, lead="", n_lead=0):
        made = super().__new__(cls, text)
        made.ids = ids
        made.lends_space = lends_space
        made.lead = lead
        made.n_lead = n_lead
        return made

    @property
    def size(self):
        """Tokens."""
        return len(self.ids)


class Gap(NamedTuple):
    """A gap to fill, and what its fill must match."""

    length: int | None = None  # tokens; None: unknown
    pattern: str = ""  # a regular expression; "": anything
    choices: tuple = ()  # texts, of which it must be one
    automaton: Any = None  # constrain.automaton.Automaton, once its place in the text is known
    spelled: tuple = ()  # the ids of the choices, each a tuple
    lead: str = ""  # with which its tokens begin, of the text before it
    n_lead: int = 0  # how many tokens that is alone, which max_gap does not count

    is_gap = True
    lends_space = False

    @property
    def is_open(self):
        """Whether its length is unknown."""
        return self.length is None

    @property
    def size(self):
        """Tokens; the minimum if the number is unknown."""
        if self.length is not None:
            return self.length
        if self.spelled:
            return min(map(len, self.spelled))
        if self.automaton:
            return self.automaton.shortest
        return 0 if self.pattern else 1  # one that must match may be empty

    def lengths(self, max_gap):
        """The possible numbers of tokens, up to max_gap unless all choices are known."""
        if self.spelled:
            return sorted({len(ids) for ids in self.spelled})
        if self.automaton:
            return self.automaton.lengths(max_gap + self.n_lead)
        return [*range(1, max_gap + 1)]

    def of_length(self, length):
        """The same gap, of a known length."""
        return self._replace(length=length)


def matching(pattern, length, tokenizer):
    """A Gap of `length` tokens that must match, for `matches` of sample.unmask and generate.

    It is for a position within a text, whose tokens are shown as they are. Raises UserError for a
    pattern that cannot be used, or that no text of this length matches.
    """
    length = whole_number("length", length, 1)
    automaton = products.automata().automaton_of(check_text(pattern), tokenizer)
    if not automaton.fits(length):
        raise UserError(f"no text of {length} tokens matches {pattern[:40]!r}; give another length")
    return Gap(length, pattern, automaton=automaton)


def encode_text(text, tokenizer, after_gap, before_gap, before_open=False):
    """Return the Text of a string.

    after_gap, before_gap: whether a gap precedes or follows it; before_open: one of unknown length

    Many tokenizers make the space before a word a part of the word's token. The last space before a
    gap is then left to the gap's first token (Text.lends_space). Tokenizers of code also join line
    breaks and indentation. A gap of unknown length begins with these (Text.lead).
    """
    without = text.rstrip(" \t\n")
    lead = text[len(without) :]
    ids = tokenizer.encode_lossless(text, after_gap)
    if before_open and "\n" in lead and (without or after_gap) and joins_lines(tokenizer):
        known = tokenizer.encode_lossless(without, after_gap)
        if ids[: len(known)] == known:  # no token has parts of both
            return Text(text, known, lead=lead, n_lead=len(ids) - len(known))
    if not (before_gap and text[-1:].isspace() and tokenizer.space_tokens.any()):
        return Text(text, ids)
    without = text[:-1] if text.endswith(" ") else text.rstrip()
    shorter = tokenizer.encode_lossless(without, after_gap)
    lends = bool(without or after_gap) and (text.endswith(" ") or ids == shorter)
    return Text(text, shorter if lends else ids, lends)


@functools.lru_cache(4)
def joins_lines(tokenizer):
    """Whether some token of text has a line break and indentation after it."""
    if tokenizer.kind != "file" or not tokenizer.space_tokens.any() or not products.has_automata():
        return False
    return any(b"\n " in (tokenizer.token(i, False) or b"") for i in range(tokenizer.vocab_size))


def encode_strings(segments, tokenizer):
    """Return the segments with a Text in place of each string. Strings alternate with gaps."""
    encoded = []
    for i, segment in enumerate(segments):
        if not isinstance(segment, (Text, Gap)):
            gap = next(iter(segments[i + 1 : i + 2]), None)
            is_endless = i + 2 == len(segments) and gap == Gap()  # it may end at a line break
            is_open = gap is not None and gap.is_open and not is_endless
            segment = encode_text(segment, tokenizer, i > 0, gap is not None, is_open)
        encoded.append(segment)
    return encoded


def encode_segments(segments, tokenizer):
    """Return the segments with each string replaced by a Text. Strings alternate with gaps.

    Each Gap that must match has its automaton then, which depends on what precedes it.
    """
    encoded = []
    ids = []
    for segment in encode_strings(segments, tokenizer):
        if segment.is_gap and segment.automaton is None:
            if encoded:
                segment = segment._replace(lead=encoded[-1].lead, n_lead=encoded[-1].n_lead)
            if segment.pattern or segment.lead:
                segment = place_pattern(segment, encoded[-1:], ids, tokenizer)
        encoded.append(segment)
        ids += [0] * segment.size if segment.is_gap else segment.ids
    return encoded


# ---- Gaps that must match
def place_pattern(gap, before, ids, tokenizer):
    """Return a Gap with its automaton, and the ids of its choices.

    before: [the encoded segment before it], or []; ids: of all that precedes it. Raises UserError
    if no text can match.
    """
    last = before[0] if before else None
    space = "drop" if tokenizer.kind == "id" else ""
    if isinstance(last, Text) and last:
        start = len(ids) - len(last.ids)
        decoded = tokenizer.cut(ids, [start])[1]
        if has_own_space(last, decoded, tokenizer):
            space = "lent" if last.lends_space else "drop"
    if gap.lead:
        space = ""
    automata = products.automata(gap.pattern)
    automaton = automata.automaton_of(gap.pattern, tokenizer, not ids, space, gap.lead)
    gap = gap._replace(automaton=automaton)
    if gap.length is not None and not automaton.fits(gap.length):
        raise UserError(f"no text of {gap.length} tokens matches {gap.pattern[:40]!r}")
    lead = gap.lead or (" " if space == "lent" else "")
    spelled = [tuple(tokenizer.encode_lossless(lead + text, bool(ids))) for text in gap.choices]
    for text, spelling in zip(gap.choices, spelled):
        if not automaton.takes(spelling):
            raise UserError(f"{text[:40]!r} in a list is not as the tokenizer shows it")
    if gap.choices and gap.length not in (None, *map(len, spelled)):
        raise UserError(f"no text of the list has {gap.length} tokens; write [___|...]")
    return gap._replace(spelled=tuple(spelled))


def has_open(segments):
    """Whether a gap has an unknown length."""
    return any(segment.is_open for segment in segments)


def check_lengths(segments, max_gap):
    """Raise UserError for a gap that no text of at most max_gap tokens can fill."""
    for segment in segments:
        most = max_gap + segment.n_lead
        if segment.is_open and not segment.spelled and segment.size > most:
            size = segment.size - segment.n_lead
            raise UserError(f"{segment.pattern[:40]!r} needs --max_gap={size}, not {max_gap}")


def matches(segments, texts, tokenizer):
    """Whether all gaps that must match do so in texts from `to_texts`."""
    for segment, (text, _) in zip(segments, texts):
        if segment.is_gap and segment.automaton:
            shown = text.strip(" ") if tokenizer.kind == "id" else segment.lead + text
            if not segment.automaton.matches(shown):
                return False
    return True


# ---- Gaps whose first token must begin with a space


def borrowing(segments):
    """Return the positions at which a token must begin with the space that a literal lends."""
    ends = itertools.accumulate(segment.size for segment in segments)
    return [end for segment, end in zip(segments, ends) if segment.lends_space]


def allowed_tokens(segments, tokenizer):
    """Return {position: (V,) bool, the allowed tokens} for positions with restrictions.

    [END] is among them: a text may end after its given beginning.
    """
    positions = borrowing(segments)
    if not positions:
        return {}
    allowed = tokenizer.space_tokens.copy()
    if tokenizer.end_id is not None:
        allowed[tokenizer.end_id] = True
    return dict.fromkeys(positions, torch.from_numpy(allowed))


def keeps_spaces(segments, ids, tokenizer):
    """Whether every token after a literal that lends its space begins with a space."""
    return all(tokenizer.space_tokens[ids[i]] for i in borrowing(segments) if i < len(ids))


# ---- Reading templates


def read_templates(infill, batch):
    """Return the templates of --infill or --batch as a list of strings; [None] without either.

    "-" stands for standard input. Each line of a batch is a template.
    """
    if not batch and infill != "-":
        return [infill or None]
    source = "-" if "-" in (infill, batch) else batch
    name = "standard input" if source == "-" else f"--batch={batch}"
    text = read_text(source, name).removeprefix("\ufeff")  # a byte order mark
    text = re.sub("\r?\n\\Z", "", text)  # the end of the last line is not a part of it
    return LINE_END.split(text) if batch else [text]


def read_text(path, name):
    """Return the text of a UTF-8 file, or of standard input ("-"), with its line ends as they are.

    name: what error messages call it. Raises UserError if it is empty, or not UTF-8.
    """
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as f:
        content = f.read()
    if not content:
        raise UserError(f"{name} is empty; give a text file")
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise UserError(f"line {line} of {name} is not UTF-8 text (byte {e.start})") from None


def parse_all(infill, batch, to_segments):
    """Read and parse all templates before any work begins.

    to_segments: the function that parses one. Its UserError is raised with the line of the batch.

    Returns pairs (template or None, segments).
    """
    parsed = []
    for number, template in enumerate(read_templates(infill, batch), 1):
        try:
            parsed.append((template, to_segments(template)))
        except UserError as e:
            file = "standard input" if batch == "-" else batch
            where = f"line {number} of {file}: " if batch else ""
            raise UserError(f"{where}{e}") from None
    return parsed


def of_prompt(prompt, tokenizer, length, config):
    """Return the segments of a text that begins with a prompt: the prompt and the tokens after it.

    prompt: may be ""
    length: tokens of the whole text including the prompt; 0: the context

    Raises UserError if the prompt cannot be encoded or leaves no room.
    """
    length = length or config.block_size
    given = given_text(prompt, tokenizer, config)
    if config.prompt_column:  # all within the context
        length = min(length, config.block_size)
    n = given.size
    if n >= length:
        raise TooLong(f"the prompt has {n} tokens of {length}; raise --length, or shorten it")
    return [given, Gap(length - n)] if given else [Gap(length - n)]


def given_text(prompt, tokenizer, config):
    """Return the Text of a prompt, or of the messages of a conversation as JSON."""
    if config.chat_column:
        messages = tokenizer.chat.to_messages(prompt)
        for message in messages:  # what the tokenizer loses is refused, as in other texts
            tokenizer.encode_lossless(message["content"])
        ids = tokenizer.encode_template(tokenizer.chat.render(messages))
    else:
        ids = tokenizer.encode_lossless(prompt)
    if prompt and not ids:
        raise UserError(
            f"the tokenizer keeps nothing of {prompt[:40]!r}; give a word, or no prompt"
        )
    if config.prompt_column:  # as in training: [END] after the prompt
        return Text(prompt + "\n", [*ids, tokenizer.end_id])
    return encode_text(prompt, tokenizer, after_gap=False, before_gap=True)


def gap_pattern(tokenizer):
    """Return the regular expression of gaps: with _ unless the tokenizer can encode that."""
    try:
        knows_underscore = "_" in tokenizer.decode(tokenizer.encode("_"))
    except UserError:
        knows_underscore = False
    return GAP if knows_underscore else GAP_OR_LINE


def is_template(text, tokenizer):
    """Whether a text has a gap."""
    return bool(gap_pattern(tokenizer).search(text))


def pieces(template, gap):
    """Cut a template into text and marks of gaps, in turn; text between two marks may be empty.

    gap: see gap_pattern. Raises UserError for a gap that must match and has no end.
    """
    escapes = {match.start() for match in ESCAPE.finditer(template)}

    def text(begin, end):  # without a backslash that says that no mark follows
        return "".join(template[i] for i in range(begin, end) if i not in escapes)

    cut = []
    at = 0
    while mark := gap.search(template, at):
        end = mark.end()
        if mark[0][0] == "[" and mark[0][-1] in ":|":
            end = end_of_pattern(template, end, is_pattern=mark[0][-1] == ":")
        cut += [text(at, mark.start()), template[mark.start() : end]]
        at = end
    return [*cut, text(at, len(template))]


def end_of_pattern(template, start, is_pattern):
    """Return where the bracket ends that has a pattern, or a list of texts, from `start` on.

    It is closed by the first ] outside of a character class of the pattern.
    """
    in_class = False
    i = start
    while i < len(template):
        c = template[i]
        if c == "\\":
            i += 1
        elif c == "]" and not in_class:
            return i + 1
        elif c == "]":
            in_class = False
        elif c == "[" and is_pattern and not in_class:
            in_class = True
            i += len(re.match(r"\^?\]?", template[i + 1 : i + 3])[0])  # these begin a class
        i += 1
    raise UserError(f"the gap [{template[:start].rpartition('[')[2]}... has no ] at its end")


def gap_of_mark(mark):
    """Return the Gap of [___:REGEX], [███:REGEX] or [___|text|text]."""
    opening = OPENING.match(mark, 1)
    inner = mark[opening.end() : -1]
    length = None if mark[1] == "_" else opening.end() - 2
    if mark[opening.end() - 1] == ":":
        return Gap(length, inner)
    texts = [""]
    for sign in re.findall(r"\\[]|:\\]|.", inner, re.DOTALL):
        if sign == "|":
            texts.append("")
        else:
            texts[-1] += sign[-1]
    return one_of(texts, length)


def one_of(texts, length=None):
    """The Gap whose fill is one of some texts."""
    choices = tuple(dict.fromkeys(texts))
    if not any(choices):
        raise UserError("a list of texts has only the empty one; give a text")
    return Gap(length, products.automata().pattern_of_choices(choices), choices)


def split(template, gap):
    """Split a template into segments, of which texts are strings. gap: see gap_pattern."""
    segments = []
    for i, piece in enumerate(pieces(template, gap)):
        if i % 2 == 0:
            if piece:
                segments.append(piece)
        elif piece == "[___]":
            segments.append(Gap())
        elif len(piece) > 1 and piece != "[MASK]":
            segments.append(gap_of_mark(piece))
        elif segments and is_plain(segments[-1]):
            segments[-1] = Gap(segments[-1].length + 1)
        else:
            segments.append(Gap(1))
    return segments


def is_plain(segment):
    """Whether a segment is a gap of known length, filled with anything."""
    return isinstance(segment, Gap) and segment.length is not None and not segment.pattern


def parse(template, tokenizer, context):
    """Return the segments of a template.

    context: the maximum number of tokens. Raises UserError if the template has no gap, is too long
    or cannot be encoded, or if a gap directly follows [___].
    """
    segments = encode_segments(read(template, tokenizer, context), tokenizer)
    check_context(segments, context)
    return segments


def read(template, tokenizer, context):
    """The segments of `parse` before the patterns of gaps are built, which takes longest.

    What is too long without them is refused.
    """
    if not template:
        raise UserError("the template is empty; write █ for each missing token")
    segments = split(template, gap_pattern(tokenizer))
    if all(isinstance(segment, str) for segment in segments):
        use = "mark each missing token with █ or [MASK], a gap of unknown length with [___]"
        raise UserError(f"{template[:40]!r} has no gap; {use}")
    for segment, after in itertools.pairwise(segments):
        if isinstance(segment, Gap) and segment.is_open and isinstance(after, Gap):
            raise UserError("a gap must not follow [___], whose length could not be told")
    segments = encode_strings(segments, tokenizer)
    check_context(segments, context)
    return segments


def check_context(segments, context):
    """Raise TooLong for segments that have more tokens than the context."""
    n = sum(segment.size for segment in segments)
    if n > context:
        raise TooLong(f"the template has {n} tokens, the context only {context}; shorten it")


def to_ids(segments, mask):
    """Return the ids of segments, with `mask` in gaps: the minimum if the length is unknown."""
    ids = []
    for segment in segments:
        ids += [mask] * segment.size if segment.is_gap else segment.ids
    return ids


def to_texts(segments, ids, tokenizer):
    """Return (text, whether it was filled) for each segment of a filled template.

    The text of a literal is its own, even if the tokenizer would decode its ids to a slightly
    different one. A space that both a literal and the next token contain is written once.
    """
    ends = list(itertools.accumulate(segment.size for segment in segments))
    texts = []
    own = ""  # characters of which the next gap's text must not begin with one
    for segment, text in zip(segments, tokenizer.cut(ids[: ends[-1]], ends[:-1])):
        is_filled = segment.is_gap
        if not is_filled:
            own = ""
            if segment and has_own_space(segment, text, tokenizer):
                own = f" {segment[-1]}" if segment[-1].isspace() else " "
            text = str(segment)
        elif segment.lead:
            text = text.removeprefix(segment.lead)
        elif own and text:
            text = text[1:] if text[0] in own else text
            own = ""
        if tokenizer.kind == "id":  # numbers, which need a space between them
            text = text.strip(" ")
            if texts and text:  # an empty gap adds nothing
                text = f" {text}"
        texts.append((text, is_filled))
    return texts


def has_own_space(literal, decoded, tokenizer):
    """Whether to drop a space with which the gap after a literal begins.

    decoded: the text that the tokenizer decodes the literal's ids to

    That is the case if the literal contains the space already, or if it ends with a character, such
    as an opening bracket, that no space should follow.
    """
    last = literal[-1:]
    if last.isspace():
        return literal.lends_space or not decoded[-1:].isspace()
    if tokenizer.kind != "file" or not literal:
        return False
    # As in "(███)" and "well-███": this tokenizer has the same ids with a space and without.
    is_wanted = last.isalnum() or last in SPACED or unicodedata.category(last) in ("Pe", "Pf")
    return not is_wanted and tokenizer.library.forgets_space_after(last)


def joined(texts):
    """Join the texts that `to_texts` returned."""
    return "".join(text for text, _ in texts)
