"""The texts of --data: read once to count and split them, then encoded; errors name the place."""

import array
import bisect
import collections
import dataclasses
import os

import numpy as np

from nanomdlm.support.cli.terminal import bar, warn
from nanomdlm.support.data import patterns, records, sources
from nanomdlm.support.data.tokenizer import LEARNED, build_tokenizer, name_characters
from nanomdlm.support.errors import UserError

FEW = 20  # records; of fewer the last may be so long that it has to be split
WORD = 256  # characters that a word may have


def unescape(separator):
    """--separator as it is in a text."""
    return separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")


def open_source(config, template=None):
    """The Source of --data; None for patterns, which are not text. template: a chat.ChatTemplate,
    for --chat_column."""
    if config.chat_column and template is None:
        needs = "needs a tokenizer with a chat template; give such a folder as --init_from"
        raise UserError(f"--chat_column={config.chat_column} {needs}")
    if sources.is_records(config.data):
        return Records(config, None, template if config.chat_column else None)
    texts = sources.find_text(config.data)
    return Source(config, texts) if texts else None


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
    passes = 3 if tokenizer is None and config.tokenizer in LEARNED else 2
    source.doing = f"pass 1 of {passes}, counting"
    n = source.survey()  # how many characters a tokenizer may learn from
    if tokenizer is None:
        source.doing = f"pass 2 of {passes}, learning the tokens"
        kind = (config.tokenizer, config.vocab_size or 16384, sources.has_documents(config))
        tokenizer = build_tokenizer(*kind, source, n, config.end)
    if network:
        network.fit(tokenizer)  # no text may have the [MASK] of an encoder
    source.doing = f"pass {passes} of {passes}, encoding"
    largest = tokenizer.vocab_size - 1
    dtype = next(d for d in (np.uint8, np.uint16, np.int32) if largest <= np.iinfo(d).max)
    tokenizer.dropped = collections.Counter() if config.unknown == "drop" else None
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for ids, is_train in source.encode(tokenizer):
            (train if is_train else val).write(ids.astype(dtype).tobytes())
    if dropped := tokenizer.dropped:
        warn(f"--unknown=drop: {dropped.total():,} left out: {name_characters(dropped)}")
    tokenizer.dropped = None  # a user's text loses nothing
    characters = [source.cut, source.n - source.cut]
    meta = dict(source=config.data, dtype=np.dtype(dtype).name, characters=characters)
    sources.write_meta(folder, tokenizer, meta)


class Source:
    """A plain text. Each call reads it again, as a stream of (text, end).

    end: whether the text ends a document; PROMPT if it is a prompt. The last tenth of the
    characters validates.
    """

    def __init__(self, config, texts, template=None):
        self.config = config
        self.texts = texts  # a function that streams the text
        self.template = template  # a chat.ChatTemplate that writes prompts, with --chat_column
        self.where = config.data  # of the last text: a file, or a file and a record in it
        self.n = 0  # characters, once they are counted
        self.cut = 0  # those of them that train
        self.doing = "reading"  # what a progress bar says

    def __call__(self):
        with bar(desc=self.doing, total=self.n or None, unit="", unit_scale=True) as shown:
            for text, end in self.read():
                yield text, end
                shown.update(len(text))

    def read(self):
        """A stream of (text, end)."""
        return sources.split_documents(self.texts(), unescape(self.config.separator))

    def survey(self):
        """Count the characters and find where validation begins.

        Returns how many characters a tokenizer may learn from: nine tenths, all of which train.
        """
        n = 0
        ends = array.array("q")  # where documents end, in characters
        for text, end in self():
            n += len(text)
            if end is True:
                ends.append(n)
        if not n:
            raise UserError(f"--data={self.config.data} is empty; give a file with text in it")
        self.n = n
        self.cut = nine_tenths = int(0.9 * n)
        if sources.has_documents(self.config):
            self.cut = self.find_edge(nine_tenths, ends)
        return min(self.cut, nine_tenths)

    def find_edge(self, nine_tenths, ends):
        """The number of characters before validation: usually up to the document at nine tenths.

        If that leaves too little for validation, the document is split. ends: where documents end.
        """
        if self.config.separator and len(ends) < 2:
            what = f"--separator={self.config.separator!r} is nowhere between two texts"
            advice = "leave it out, or see how the lines end"
            raise UserError(f"{what} of --data={self.config.data}; {advice}")
        edge = ends[bisect.bisect_left(ends, nine_tenths)]
        left = self.n - edge
        is_enough = left and (left >= 0.05 * self.n or len(ends) >= FEW)
        return edge if is_enough else nine_tenths

    def encode(self, tokenizer):
        """Stream (ids, whether they train), with the [END] of each document, as survey() split it.

        Raises UserError with the place of a text that cannot be encoded.
        """
        done = 0
        for text, end in self():
            k = min(max(self.cut - done, 0), len(text))
            if tokenizer.kind == "file" and 0 < k < len(text):  # some know no part of a word
                spaces = (i for i in range(k, max(0, k - WORD), -1) if text[i].isspace())
                k = next(spaces, k)
                self.cut = done + k
            done += len(text)
            for piece, trains in ((text[:k], True), (text[k:], False)):
                if not piece:
                    continue
                ids = self.encode_piece(tokenizer, piece, end)
                goes_on = trains and k < len(text)
                if end and not goes_on and tokenizer.end_id is not None:
                    ids = np.append(ids, tokenizer.end_id)
                yield ids, trains
        if done != self.n:
            raise UserError(f"--data={self.config.data} changed while it was read; try again")

    def encode_piece(self, tokenizer, text, end):
        try:
            if self.template and end is records.PROMPT:
                return np.array(tokenizer.encode_template(text))
            return tokenizer.encode_array(text)
        except UserError as e:
            more = ", or leave them out by --unknown=drop" if tokenizer.kind == "char" else ""
            raise UserError(f"{self.place(tokenizer)}: {e}{more}") from None

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

    def read(self):
        config = self.config
        columns = [name for name in (config.prompt_column, config.text_column) if name]
        if self.template:
            columns = [config.chat_column]
        limit = config.max_bad_records  # -1: any empty one, but no damaged one
        skipped = 0
        first = None  # place of the first one that is skipped
        found = records.read(config.data, columns, self.template)
        for texts, self.where in found:
            is_bad = isinstance(texts, UserError)
            if is_bad and limit < 0:
                raise texts
            if texts and not is_bad:
                yield from texts
                continue
            first = first or self.where
            skipped += 1
            if 0 <= limit < skipped:
                what = texts if is_bad else f"{self.where} is empty"
                raise UserError(f"{what} (or raise --max_bad_records={limit})")
        if self.n:  # not the first pass, in which this is said
            return
        if skipped:
            what = f"{skipped:,} empty or damaged record(s) skipped; the first is {first}"
            warn(f"--data={config.data}: {what}")
        if left_out := ", ".join(path.name for path in records.find_files(config.data)[1]):
            warn(f"--data={config.data}: not read: {left_out[:200]}")

    def find_edge(self, nine_tenths, ends):
        """As of other documents, but a prompt and its answer are not split: the last ones
        validate."""
        if not self.config.prompt_column:
            return super().find_edge(nine_tenths, ends)
        if len(ends) < 2:
            raise UserError(f"--data={self.config.data} is a single prompt; give more records")
        edge = ends[bisect.bisect_left(ends, nine_tenths)]
        return edge if edge < self.n else ends[-2]


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
