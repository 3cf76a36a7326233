"""The texts of --data: read once to be counted and split, then encoded; errors name the place."""

import collections
import dataclasses
import os
import shlex
from pathlib import Path

import numpy as np

from support.data import records, sources
from support.data.hf_tokenizer import CONTEXT
from support.data.tokenizer import name_characters
from support.errors import UserError
from support.terminal import warn

FEW = 20  # records; of fewer the last may be so long that it has to be split
ESCAPES = (("\r", "\\r"), ("\n", "\\n"), ("\t", "\\t"))  # in --separator


def unescape(separator):
    for character, escape in ESCAPES:
        separator = separator.replace(escape, character)
    return separator


def open_source(config, template=None):
    """The Source of --data; None for patterns, which are no text. template: a chat.ChatTemplate,
    for --chat_column."""
    if config.chat_column and template is None:
        needs = "needs a tokenizer with a chat template; give such a folder as --init_from"
        raise UserError(f"--chat_column={config.chat_column} {needs}")
    if sources.is_records(config.data):
        return Source(config, None, template)
    texts = sources.find_text(config.data)
    return Source(config, texts) if texts else None


def check_characters(source, tokenizer, config):
    """Raise UserError for characters that the tokenizer of --init_from lacks, all at once.

    With --unknown=drop it leaves them out from now on.
    """
    counts = collections.Counter()
    for text, _ in source():
        counts += tokenizer.unknown_characters(text)
    if counts and config.unknown == "refuse":
        first = f"--data={config.data}"
        try:
            collections.deque(source.encode(tokenizer), maxlen=0)
        except UserError as e:  # it names the file and the line
            first = str(e).partition(": unknown")[0]
        what = f"{first}: unknown {name_characters(counts)} in all"
        raise UserError(f"{what}; remove them, or leave them out by --unknown=drop")
    if counts:
        warn(f"--unknown=drop: {counts.total()} characters left out: {name_characters(counts)}")
    tokenizer.drops_unknown = config.unknown == "drop"  # else a later text would lose some silently


class Source:
    """The texts of --data. Each call reads them again, as a stream of (text, end).

    end: whether the text ends a document; PROMPT if it is a prompt. The last tenth of the
    characters validates.
    """

    def __init__(self, config, texts, template=None):
        self.config = config
        self.template = template  # with --chat_column
        self.texts = texts  # a function that streams plain text; None: records
        self.separator = unescape(config.separator)
        self.columns = [name for name in (config.prompt_column, config.text_column) if name]
        if config.chat_column:
            self.columns = records.Conversations([config.chat_column])
        self.skipped = records.Skipped(config.max_bad_records)
        self.where = config.data  # of the last text: a Path of plain text, or file and record
        self.n = 0  # characters
        self.cut = 0  # those of them that train
        self.notes = []  # what a user should know of these texts

    def __call__(self):
        if self.texts:
            yield from sources.split_documents(self.texts(), self.separator)
            return
        for text, end, where in records.read(self.config.data, self.columns, self.skipped):
            self.where = where
            if self.config.chat_column:
                yield from self.turns(text)
            else:
                yield text, end

    def turns(self, messages):
        """The texts of a conversation: before each message of the assistant, and that message."""
        try:
            pairs = list(self.template.pairs(messages))
        except UserError as e:
            self.skipped.add(self.where, UserError(f"{self.where}: {e}"))
            return
        for before, answer in pairs:
            if answer.strip():
                yield before, records.PROMPT
                yield answer, True

    def survey(self):
        """Read all texts once: count their characters, find where validation begins, warn.

        Returns how many characters a tokenizer may learn from: nine tenths, all of which train.
        """
        n = documents = before = last = 0  # before, last: where the last two records end
        edges = collections.deque()  # where records end, from nine tenths of what is read on
        for text, end in self():
            n += len(text)
            if end is True:
                edges.append(n)
                documents += 1
                before = last
                last = n
            while edges and edges[0] < int(0.9 * n):
                edges.popleft()
        self.n = n
        self.note_what_was_read()
        if n == 0:
            is_file = os.path.isfile(self.config.data)
            states_nothing = is_file and not os.path.getsize(self.config.data)
            why = ": its size is 0 bytes" * states_nothing
            what = "; ".join([f"--data={self.config.data} is empty{why}", *self.notes])
            raise UserError(f"{what}; give a file with text in it")
        if self.separator and self.texts and documents < 2:
            self.refuse_separator()
        self.cut = int(0.9 * n) if self.texts else self.find_edge(edges[0], before, documents)
        for line in self.notes:
            warn(f"--data={self.config.data}: {line}")
        return min(self.cut, int(0.9 * n))

    def find_edge(self, edge, before, documents):
        """After how many characters validation begins: at `edge` as a rule.

        edge: where the first record ends that ends after nine tenths. If that leaves too little to
        validate, the record at nine tenths is split; a prompt is never split from its answer, so
        there it is `before`, where the last record but one ends.
        """
        left = 1 - edge / self.n
        if self.config.prompt_column:
            if edge == self.n and before == 0:
                what = f"--data={self.config.data} is a single prompt with its answer"
                raise UserError(f"{what}, with no record left to validate; give more records")
            return edge if left else before
        if left and (left >= 0.05 or documents >= FEW):
            return edge
        why = "so that the last tenth of the characters validates"
        self.notes.append(f"few records ({documents:,}): one is split, {why}")
        return int(0.9 * self.n)

    def note_what_was_read(self):
        if self.texts and records.holds_records(self.config.data):
            self.notes.append("its lines are JSON: name it .jsonl to learn only their texts")
        if not self.texts and Path(self.config.data).is_dir():
            self.notes += records.describe_folder(self.config.data)
        if not self.texts and self.skipped.describe():
            self.notes.append(self.skipped.describe())

    def refuse_separator(self):
        """Raise UserError for a --separator with nothing on both sides; suggest one that has."""
        mark = self.separator
        guesses = [mark.replace("\n", "\r\n"), mark.replace("\r\n", "\n"), mark.strip()]
        guesses += [mark.lower(), mark.upper(), "\n\n", "\r\n\r\n", "\n", "\r\n"]
        guesses = [guess for guess in guesses if guess and guess != mark]
        guess = next((guess for guess in guesses if divides(guess, self.texts())), None)
        advice = f"give {as_flag(guess)}, which is, or leave it out" if guess else "leave it out"
        what = f"{as_flag(mark)} is nowhere between two texts of {self.config.data}"
        raise UserError(f"{what}; {advice}")

    def encode(self, tokenizer):
        """Stream (ids, whether they train), with the [END] of each document, as survey() split it.

        Raises UserError with the place of a text that cannot be encoded or is too long.
        """
        done = held = 0
        longest = (0, "")  # tokens of a record, and where it is
        before = ""  # the end of what the next piece goes on after
        for text, end in self():
            k = min(max(self.cut - done, 0), len(text))
            if tokenizer.kind == "file" and 0 < k < len(text):  # some know no part of a word
                k = before_word(text, k)
                self.cut = done + k
            done += len(text)
            for piece, trains in ((text[:k], True), (text[k:], False)):
                if not piece:
                    continue
                if self.template and end is records.PROMPT:
                    ids = np.array(tokenizer.encode_template(piece))
                else:
                    ids = self.encode_piece(tokenizer, piece, before)
                before = (before + piece[-CONTEXT:])[-CONTEXT:]
                # A record that is split goes on: its front has no [END].
                ends_here = end and (self.texts or not trains or k == len(text))
                if ends_here and tokenizer.end_id is not None:
                    ids = np.append(ids, tokenizer.end_id)
                yield ids, trains
                held += len(ids)
            if end:
                before = ""
            if end is True:
                longest = max(longest, (held, str(self.where)))
                held = 0
        if done != self.n:
            raise UserError(f"--data={self.config.data} changed while it was read; try again")
        T = self.config.block_size
        if self.config.prompt_column and longest[0] > T:
            what = f"{longest[1]}: a prompt and its answer take {longest[0]} tokens, more than"
            raise UserError(f"{what} --block_size={T}; shorten them or raise it")

    def encode_piece(self, tokenizer, text, before):
        try:
            return tokenizer.encode_array(text, before)
        except UserError as e:
            raise self.locate(e, tokenizer, text) from None

    def locate(self, error, tokenizer, text):
        """The UserError `error` about a text, with its file and its line or record."""
        if not self.texts and not isinstance(self.where, Path):
            return UserError(f"{self.where}: {error}")
        for line in text.split("\n"):
            try:
                tokenizer.encode_array(line)
            except UserError as e:
                texts = self.texts() if self.texts else records.read_text(self.where)
                number = find_line(line, texts)
                place = f", line {number}" if number else ""
                return UserError(f"{self.where}{place}: {e}")
        return UserError(f"{self.where}: {error}")


def before_word(text, place):
    """The place of the last space up to a place in a text; the place itself if none is near."""
    near = range(place, max(0, place - CONTEXT), -1)
    return next((i for i in near if text[i].isspace()), place)


def find_line(wanted, texts):
    """The number of the first line that has `wanted` in it, from 1; 0 if it is not found."""
    number = 1
    for text in texts:
        at = text.find(wanted)
        if at >= 0:
            return number + text.count("\n", 0, at)
        number += text.count("\n")
    return 0


def divides(separator, texts):
    """Whether a separator stands between two documents."""
    documents = 0
    for _, end in sources.split_documents(texts, separator):
        documents += end
        if documents > 1:
            return True
    return False


def as_flag(separator):
    for character, escape in ESCAPES:
        separator = separator.replace(character, escape)
    return f"--separator={shlex.quote(separator)}"


def to_score(config):
    """The settings to read a text that is scored: without --separator, if that is not in it."""
    separator = unescape(config.separator)
    if not separator or sources.is_records(config.data):
        return config
    texts = sources.find_text(config.data)
    if texts is None or divides(separator, texts()):
        return config
    warn(f"--data={config.data} is a single document: {as_flag(separator)} is not in it")
    return dataclasses.replace(config, separator="")
