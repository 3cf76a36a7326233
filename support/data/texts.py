"""The texts of --data: read once to be counted and split, then encoded; errors name the place."""

import array
import bisect
import collections
import dataclasses
import os

import numpy as np

from nanomdlm.support.cli.progress import bar
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data import patterns, records, sources
from nanomdlm.support.data.hf_tokenizer import CONTEXT
from nanomdlm.support.data.tokenizer import build_tokenizer, name_characters
from nanomdlm.support.errors import UserError

FEW = 20  # records; of fewer the last may be so long that it has to be split


def unescape(separator):
    """--separator as it is in a text."""
    return separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")


def open_source(config, template=None):
    """The Source of --data; None for patterns, which are no text. template: a chat.ChatTemplate,
    for --chat_column."""
    if config.chat_column and template is None:
        needs = "needs a tokenizer with a chat template; give such a folder as --init_from"
        raise UserError(f"--chat_column={config.chat_column} {needs}")
    if sources.is_records(config.data):
        return Records(config, template if config.chat_column else None)
    texts = sources.find_text(config.data)
    return Source(config, texts) if texts else None


def check_characters(source, tokenizer, config):
    """Raise UserError for characters that the tokenizer of --init_from lacks, all at once.

    With --unknown=drop it leaves them out from now on.
    """
    counts = collections.Counter()
    place = ""
    for text, _ in source():
        counts += tokenizer.unknown_characters(text)
        if counts and not place:
            place = source.place(tokenizer)
    if counts and config.unknown == "refuse":
        what = f"{place}: unknown {name_characters(counts)} in all"
        raise UserError(f"{what}; remove them, or leave them out by --unknown=drop")
    if counts:
        warn(f"--unknown=drop: {counts.total()} characters left out: {name_characters(counts)}")
    tokenizer.drops_unknown = config.unknown == "drop"  # else a later text would lose some silently


def prepare(config, folder, tokenizer=None, network=None):
    """Tokenize config.data into `folder`: nine tenths of its text train, the rest validates.

    tokenizer: that of a model to start from, else config.tokenizer says which one is made.
    network: a networks.Network, or None: ours
    """
    template = network.chat if network else getattr(tokenizer, "chat", None)
    source = open_source(config, template)
    if source is None:
        sources.write_meta(folder, *patterns.write(folder, config))
        return
    n = source.survey()  # how many characters a tokenizer may learn from
    source.doing = "making a tokenizer"
    if tokenizer is None:
        kind = (config.tokenizer, config.vocab_size or 16384, sources.has_documents(config))
        tokenizer = build_tokenizer(*kind, source, n, config.end)
    else:
        check_characters(source, tokenizer, config)
    if network:
        network.fit(tokenizer)  # no text may have the [MASK] of an encoder
    source.doing = "encoding"
    largest = tokenizer.vocab_size - 1
    dtype = next(d for d in (np.uint8, np.uint16, np.int32) if largest <= np.iinfo(d).max)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for ids, is_train in source.encode(tokenizer):
            (train if is_train else val).write(ids.astype(dtype).tobytes())
    characters = [source.cut, source.n - source.cut]
    meta = dict(source=config.data, dtype=np.dtype(dtype).name, characters=characters)
    sources.write_meta(folder, tokenizer, meta)


class Source:
    """A plain text. Each call reads it again, as a stream of (text, end).

    end: whether the text ends a document; PROMPT if it is a prompt. The last tenth of the
    characters validates.
    """

    ends_at_cut = True  # a document that validation cuts in two has an [END] in both parts
    template = None  # a chat.ChatTemplate that writes prompts, with --chat_column

    def __init__(self, config, texts):
        self.config = config
        self.texts = texts  # a function that streams the text
        self.separator = unescape(config.separator)
        self.where = config.data  # of the last text: a file, or a file and a record in it
        self.n = 0  # characters
        self.doing = "reading"  # what a progress bar says
        self.cut = 0  # those of them that train

    def __call__(self):
        options = dict(desc=self.doing, total=self.n or None, unit=" characters", unit_scale=True)
        with bar(**options) as shown:
            for text, end in self.read():
                yield text, end
                shown.update(len(text))

    def read(self):
        """A stream of (text, end)."""
        return sources.split_documents(self.texts(), self.separator)

    def survey(self):
        """Read all texts once: count their characters, find where validation begins.

        Returns how many characters a tokenizer may learn from: nine tenths, all of which train.
        """
        n = 0
        ends = array.array("q")  # where documents end, in characters
        for text, end in self():
            n += len(text)
            if end is True:
                ends.append(n)
        self.n = n
        notes = self.notes()
        if not n:
            what = "; ".join([f"--data={self.config.data} is empty", *notes])
            raise UserError(f"{what}; give a file with text in it")
        for note in notes:
            warn(f"--data={self.config.data}: {note}")
        nine_tenths = int(0.9 * n)
        self.cut = self.find_edge(nine_tenths, ends)
        return min(self.cut, nine_tenths)

    def notes(self):
        """What a user should know of these texts, a list of sentences."""
        return []

    def find_edge(self, nine_tenths, ends):
        """After how many characters validation begins. ends: where documents end."""
        if self.separator and len(ends) < 2:
            what = f"--separator={self.config.separator!r} is nowhere between two texts"
            advice = "leave it out, or see how the lines end"
            raise UserError(f"{what} of --data={self.config.data}; {advice}")
        return nine_tenths

    def encode(self, tokenizer):
        """Stream (ids, whether they train), with the [END] of each document, as survey() split it.

        Raises UserError with the place of a text that cannot be encoded.
        """
        done = 0
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
                ids = self.encode_piece(tokenizer, piece, before, end)
                before = (before + piece[-CONTEXT:])[-CONTEXT:]
                goes_on = trains and k < len(text) and not self.ends_at_cut
                if end and not goes_on and tokenizer.end_id is not None:
                    ids = np.append(ids, tokenizer.end_id)
                yield ids, trains
            if end:
                before = ""
        if done != self.n:
            raise UserError(f"--data={self.config.data} changed while it was read; try again")

    def encode_piece(self, tokenizer, text, before, end):
        try:
            if self.template and end is records.PROMPT:
                return np.array(tokenizer.encode_template(text))
            return tokenizer.encode_array(text, before)
        except UserError as e:
            raise UserError(f"{self.place(tokenizer)}: {e}") from None

    def place(self, tokenizer):
        """The file and line, or record, of the last text that was read, if it cannot be encoded."""
        if os.path.isfile(self.where):  # plain text
            with open(self.where, encoding="utf-8-sig", newline="\n") as f:
                for number, line in enumerate(f, 1):
                    try:
                        tokenizer.encode_array(line)
                    except UserError:
                        return f"{self.where}, line {number}"
        return str(self.where)


class Records(Source):
    """The texts of a data set of records."""

    ends_at_cut = False

    def __init__(self, config, template):
        super().__init__(config, None)
        self.template = template
        self.columns = [name for name in (config.prompt_column, config.text_column) if name]
        if template:
            self.columns = [config.chat_column]
        self.skipped = 0  # records
        self.first_skipped = None  # where the first of them is

    def read(self):
        self.skipped = 0
        for texts, where in records.read(self.config.data, self.columns, self.template):
            self.where = where
            if isinstance(texts, UserError):
                self.skip(texts)
            else:
                yield from texts

    def skip(self, error):
        """Leave out the last record, unless --max_bad_records forbids it: then raise UserError."""
        limit = self.config.max_bad_records  # -1: any empty one, but no damaged one
        if limit < 0 and not isinstance(error, records.Empty):
            raise error
        self.first_skipped = self.first_skipped or self.where
        self.skipped += 1
        if 0 <= limit < self.skipped:
            raise UserError(f"{error} (or raise --max_bad_records={limit})")

    def notes(self):
        notes = []
        _, left_out = records.find_files(self.config.data)
        if left_out:
            names = ", ".join(path.name for path in left_out[:5])
            notes.append(f"not read: {names}" + ", ..." * (len(left_out) > 5))
        if self.skipped:
            what = f"{self.skipped:,} empty or damaged record(s) skipped"
            notes.append(f"{what}; the first is {self.first_skipped}")
        return notes

    def find_edge(self, nine_tenths, ends):
        """After how many characters validation begins: after the record at nine tenths, as a rule.

        If that leaves too little to validate, this record is split; a prompt is never split from
        its answer, so there it validates.
        """
        edge = ends[bisect.bisect_left(ends, nine_tenths)]
        left = self.n - edge
        if self.config.prompt_column:
            if len(ends) < 2:
                what = f"--data={self.config.data} is a single prompt with its answer"
                raise UserError(f"{what}, with no record left to validate; give more records")
            return edge if left else ends[-2]
        if left and (left >= 0.05 * self.n or len(ends) >= FEW):
            return edge
        why = "so that the last tenth of the characters validates"
        warn(f"--data={self.config.data}: few records ({len(ends):,}): one is split, {why}")
        return nine_tenths


def before_word(text, place):
    """The place of the last space up to a place in a text; the place itself if none is near."""
    near = range(place, max(0, place - CONTEXT), -1)
    return next((i for i in near if text[i].isspace()), place)


def to_score(config):
    """The settings to read a text that is scored: without --separator, if that is not in it."""
    separator = unescape(config.separator)
    if not separator or sources.is_records(config.data):
        return config
    texts = sources.find_text(config.data)
    if not texts or sum(end for _, end in sources.split_documents(texts(), separator)) > 1:
        return config
    warn(f"--data={config.data} is a single document: {config.separator!r} is not in it")
    return dataclasses.replace(config, separator="")
