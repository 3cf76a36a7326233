"""Writes what requests ask for, as sample.py does. A "job" is a model of requests.py.

First `prepare`, in any thread, and then `write`, in a greenlet of the engine (engine.py).
"""

import bisect
import contextlib
import json
import math
import threading
import time
from functools import partial

import torch

from nanomdlm.support import abilities
from nanomdlm.support.cli import products
from nanomdlm.support.errors import TooLong, UserError
from nanomdlm.support.infill import templates
from nanomdlm.support.infill.probabilities import score, token_logprobs
from nanomdlm.support.infill.templates import Gap, one_of, to_ids, to_texts
from nanomdlm.support.serving import answers
from nanomdlm.support.serving.answers import Text, begins_of
from nanomdlm.support.serving.requests import Refused
from nanomdlm.support.serving.watching import show, show_fills

MOST_PATTERNS = 64  # gaps of a request that must match,
MOST_PATTERN_SIZE = 1 << 16  # and the characters of their patterns
MOST_CELLS = 1 << 23  # edges of automata x positions of their gaps: a second between two calls
MOST_LOGPROBS = 1 << 20  # numbers of an answer: a second to make JSON of them


class Writer:
    """model: that goes on. filler: that fills gaps: the same, or loaded with whole=True

    sampler(model, tokenizer, settings): the sample.Writer of a dict of settings; UserError for
    settings that the model cannot follow. max_prompt: tokens of a prompt
    """

    def __init__(self, model, filler, tokenizer, sampler, max_prompt=8192):
        self.model = model
        self.filler = filler
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.max_prompt = max_prompt
        self.reading = threading.Lock()  # a tokenizer serves one thread at a time

    # ---- Before anything is computed
    def prepare(self, job):
        """([the segments of each prompt], tokens of given text) of a job.

        All is counted before the patterns of gaps are built, which takes longest. Raises UserError
        for what cannot be written.
        """
        if job.kind in ("score", "fix"):
            sizes = [self.read(job, prompt, self.sizes) for prompt in job.prompts]
            self.check_length(max(sizes))
            return job.prompts, sum(sizes)
        model = self.model if job.goes_on else self.filler
        self.sampler(model, self.tokenizer, job.settings)
        how = self.continued if job.goes_on else self.with_gaps
        todo = [self.read(job, prompt, how) for prompt in job.prompts]
        gaps = [s for segments in todo for s in segments if s.is_gap and s.pattern]
        self.check_patterns(len(gaps), sum(len(gap.pattern) for gap in gaps))
        if not job.goes_on:
            todo = [self.built(job, segments) for segments in todo]
        n = sum(s.size for segments in todo for s in segments if not s.is_gap)
        gaps = [s for segments in todo for s in segments if s.is_gap]
        self.check_logprobs(job, n * job.echo + sum(s.length or job.max_tokens for s in gaps))
        return todo, n

    def read(self, job, prompt, how):
        """how(job, prompt), once the tokenizer serves no other request."""
        with self.reading:
            if not job.cut:  # of which only what may fit is read
                for text in texts_of(prompt):
                    self.check_characters(job, text)
            return how(job, prompt)

    def check_characters(self, job, text):
        """Raise TooLong for a text of which already the beginning has too many tokens.

        To count those of a megabyte takes seconds, in which no other text is read; around a gap it
        takes minutes.
        """
        most = self.max_prompt
        if job.kind in ("gap", "template"):
            most = min(most, self.filler.config.block_size)
        begins = text[: 8 * most]
        room = 32 * most
        if job.kind == "template":  # whose patterns are no tokens
            room += MOST_PATTERN_SIZE
            begins = ""
        if len(text) > room or (len(text) > len(begins) and self.size(begins) > most + 16):
            raise TooLong("the text is longer than this server, or the context, takes; shorten it")

    def check_logprobs(self, job, tokens):
        """Raise Refused for too many log-probabilities, of so many tokens in each answer."""
        each = 0 if job.n_likeliest is None else 1 + job.n_likeliest
        if job.n * tokens * each > MOST_LOGPROBS:
            what = f"n={job.n} answers of {tokens} tokens with {each} logprobs each"
            what += f" are more than {MOST_LOGPROBS} numbers; ask for fewer"
            raise Refused(what, "logprobs", status=422, code="too_large")

    def sizes(self, job, prompt):
        """Tokens of a text or a pair of texts."""
        return sum(map(self.size, as_tuple(prompt)))

    def size(self, text):
        """Tokens of a text, in which proofreading also takes unknown characters."""
        if self.tokenizer.kind == "char":
            return len(text)
        with contextlib.suppress(UserError):
            return len(self.tokenizer.encode(text))
        return len(text)

    def check_patterns(self, n, size=0):
        if n > MOST_PATTERNS or size > MOST_PATTERN_SIZE:
            limits = f"{MOST_PATTERNS} gaps that must match, of {MOST_PATTERN_SIZE} characters"
            raise Refused(f"a request may have {limits}", status=422, code="too_large")

    def check_length(self, n, limit=None):
        limit = self.max_prompt if limit is None else min(limit, self.max_prompt)
        if n > limit:
            raise TooLong(f"the prompt has {n} tokens, and this server takes {limit}; shorten it")

    def continued(self, job, prompt):
        """The segments of a prompt, and of what is written after it."""
        config = self.model.config
        if job.kind == "chat":
            prompt = self.of_messages(prompt)
        given = self.given(prompt, config, job.max_tokens)
        ends_within = abilities.knows_lengths(self.model) or config.prompt_column
        L = config.block_size
        self.check_length(given.size, L - 1 if ends_within and job.max_tokens else None)
        n = job.max_tokens
        if n and abilities.knows_lengths(self.model):  # a length is drawn, within the context
            n = L - given.size
        elif config.prompt_column:
            n = min(n, L - given.size)
        return [given] * bool(given) + [Gap(n)] * bool(n)

    def given(self, prompt, config, is_followed):
        """The Text of a prompt; if nothing follows it, the last space is a token's too."""
        text = templates.given_text(prompt, self.tokenizer, config)
        if text.lends_space and not is_followed:
            return templates.Text(prompt, self.tokenizer.encode_lossless(prompt))
        return text

    def of_messages(self, messages):
        """The messages of a conversation as a prompt; Refused if the model cannot answer them."""
        config = self.model.config
        if config.chat_column:
            return json.dumps(messages, ensure_ascii=False)
        how = dict(param="messages", code="unsupported")
        if not config.prompt_column:
            raise Refused("this model has learned no conversations; use /v1/completions", **how)
        if len(messages) != 1 or messages[0]["role"] != "user":
            what = "this model has learned answers to single prompts; send one message of the user"
            raise Refused(what, **how)
        return messages[0]["content"]

    def with_gaps(self, job, prompt):
        """The segments of a text with gaps, whose patterns are not built yet."""
        config = self.filler.config
        if not job.max_tokens:
            text = "".join(as_tuple(prompt))
            return [self.given(text, config, 0)] if job.echo else []
        if config.prompt_column:
            what = "this model answers prompts, it fills no gaps; send a prompt without a suffix"
            raise Refused(what, "suffix", code="unsupported")
        L = config.block_size
        if job.kind == "template":
            gap = templates.gap_pattern(self.tokenizer)
            marks = [mark[-1] in ":|" for mark in gap.findall(prompt)]
            self.check_patterns(sum(marks))  # before they are read
            self.check_length(len(marks) - sum(marks), L)
            return templates.read(prompt, self.tokenizer, L)
        before, after = prompt
        if job.cut:
            before, after = self.cut(before, after, L - min(job.max_tokens, max(1, L // 2)))
        gap = one_of(job.choices) if job.choices else Gap(pattern=job.regex or "")
        if job.cut and abilities.is_causal(self.filler):  # at an editor's cursor
            gap = Gap(pattern=products.automata("").LINE)
        segments = [segment for segment in (before, gap, after) if segment != ""]
        segments = templates.encode_strings(segments, self.tokenizer)
        templates.check_context(segments, L)
        return segments

    def built(self, job, segments):
        """The segments with the automata of their patterns."""
        segments = templates.encode_segments(segments, self.tokenizer)
        templates.check_context(segments, self.filler.config.block_size)
        templates.check_lengths(segments, job.max_tokens)
        matching = [s for s in segments if s.is_gap and s.automaton]
        cells = [s.automaton.follows.numel() * (s.length or job.max_tokens) for s in matching]
        if sum(cells) > MOST_CELLS:
            what = "a pattern is too large for a gap of this length; shorten one of them"
            raise Refused(what, "regex", status=422, code="too_large")
        if has_gap(segments) and not is_searched(job, segments):
            self.sampler(self.filler, self.tokenizer, job.settings).check(segments)
        return segments

    def cut(self, before, after, room):
        """The end of `before` and the beginning of `after`, `room` tokens together: of `after` at
        most a quarter, or what `before` leaves."""
        parts = partial(known_part, self.tokenizer)
        before, n_before = parts(before, room, is_end=True)
        after, n_after = parts(after, room, is_end=False)
        after, n_after = parts(after, max(room // 4, room - n_before), is_end=False)
        before, _ = parts(before, room - n_after, is_end=True)
        return before, after

    # ---- Writing
    def write(self, job, prepared, stand_in, emit):
        """{index: answers.Text} of all prompts of a job: 0 to n - 1 for the first, n to 2 n - 1 for
        the second ... (Of "score" and "fix": a list of dicts.)

        emit(index, text, is_finished): what of a Text cannot change any more, and at last all of
        it; returns whether no more of it is needed.
        """
        model = stand_in(self.model if job.goes_on or job.kind == "score" else self.filler)
        if job.kind == "score":
            scores = score(model, self.tokenizer, prepared, job.passes, job.settings["seed"])
            return [dict(object="score") | one._asdict() for one in scores]
        if job.kind == "fix":
            fixed = [self.fixed(model, text, job.caution) for text in prepared]
            if job.watch:
                emit(0, dict(done=True, changes=fixed[0]["changes"]))
            return fixed
        writer = self.sampler(model, self.tokenizer, job.settings)
        texts = {}
        for i, segments in enumerate(prepared):
            made = []
            tell = partial(tell_from, emit, i * job.n)
            if job.watch and is_searched(job, segments):
                show_fills(writer, segments, job, emit)
            elif job.watch:
                show(writer, segments, job, emit)
            elif not has_gap(segments):
                made = self.keep(writer, segments, job, tell)
            elif job.goes_on:
                made = self.go_on(writer, segments, job, tell)
            else:
                made = self.fill(writer, segments, job, tell)
            texts |= dict(enumerate(made, i * job.n))
        return texts

    def fixed(self, model, text, caution):
        text, changes = products.proofreading().fix(model, self.tokenizer, text, caution)
        return dict(text=text, changes=[change._asdict() for change in changes])

    def keep(self, writer, segments, job, tell):
        """Texts to which nothing is added (max_tokens 0): echoed, perhaps with their scores."""
        ids = to_ids(segments, 0)
        text = Text([(str(segment), False) for segment in segments])
        self.add_logprobs(writer, text, job, segments, ids, None)
        for i in range(job.n):
            tell(i, text, True)
        return [text] * job.n

    def fill(self, writer, segments, job, tell):
        """The n likeliest fills, as `sample.py --infill --candidates=n` finds them."""
        texts = []
        deadline = time.monotonic() + job.seconds
        found = writer.filling(segments, job.n, job.max_tokens, deadline=deadline)
        for i, one in enumerate(found.finish()):
            values = [math.nan if value is None else value for value in one.drawn]
            drawn = torch.tensor(values, dtype=torch.float64)
            n = int((~drawn.isnan()).sum())
            n -= sum(segment.n_lead for segment in one.segments if segment.is_gap)
            text = Text(one.parts, n, is_ended=True)
            self.add_logprobs(writer, text, job, one.segments, one.ids, drawn)
            tell(i, text, True)
            texts.append(text)
        return texts

    def go_on(self, writer, segments, job, tell):
        """n texts after a prompt, with the numbers 0 .. n - 1 of the seed."""
        texts = []
        for rows in writer.batches(segments, job.n, False):
            chunks = rows.chunks()  # one at a time: there may be thousands
            chunk = next(chunks, None)
            told = [-1] * len(rows.x)  # up to where each row was sent
            done = [False] * len(rows.x)
            first = int(rows.samples[0])
            for step in rows.steps():
                if not job.stream:
                    continue
                while step.number > chunk.first + chunk.steps:
                    chunk = next(chunks)
                final = chunk.settled(step.x, writer.model.mask_id).tolist()
                for row, ids in enumerate(step.x.tolist()):
                    if final[row] > told[row]:
                        told[row] = final[row]
                        text, _ = self.text_of(segments, ids[: final[row]], job)
                        done[row] |= tell(first + row, text, False)
                if all(done) and job.n_likeliest is None:  # those are of finished texts
                    break
            for row, (ids, drawn) in enumerate(zip(rows.x.tolist(), rows.drawn)):
                text, shape = self.text_of(segments, ids, job)
                text.tokens = self.tokens_shown(segments, ids, job, text)
                self.add_logprobs(writer, text, job, shape, ids, drawn)
                tell(first + row, text, True)
                texts.append(text)
        return texts

    def text_of(self, segments, ids, job):
        """(the Text of the ids of a text that goes on, or of its beginning; its segments)"""
        given = [segment for segment in segments if not segment.is_gap]
        begin = sum(segment.size for segment in given)
        written = ids[begin : begin + job.max_tokens]
        end = self.tokenizer.end_id
        is_ended = end is not None and end in written
        n = written.index(end) if is_ended else len(written)
        shape = [*given, Gap(n)] if n else given
        parts = to_texts(shape, ids[: begin + n], self.tokenizer) if n else []
        parts = parts or [(str(segment), False) for segment in given]
        return Text(parts, n, is_ended), shape

    def tokens_shown(self, segments, ids, job, text):
        """The tokens that were written of a Text, up to the one that completes a text of `stop`:
        a stream does not wait for more."""
        if not answers.show(text, job).stop:
            return text.tokens
        begin = sum(segment.size for segment in segments if not segment.is_gap)

        def is_stopped(n):
            return bool(answers.show(self.text_of(segments, ids[: begin + n], job)[0], job).stop)

        return 1 + bisect.bisect_left(range(1, text.tokens), True, key=is_stopped)

    def add_logprobs(self, writer, text, job, segments, ids, drawn):
        """Add the log-probabilities of its tokens to a Text of these ids.

        With `echo` each is given the tokens before it: their sums are log p, as harnesses that
        score texts need it. Else each is given all others.
        """
        if job.n_likeliest is None:
            return
        sizes = [segment.size for segment in segments]
        n = sum(sizes)
        is_given = [not segment.is_gap for segment in segments for _ in range(segment.size)]
        first = 0 if job.echo else [*is_given, False].index(False)
        kept = [i for i in range(first, n) if ids[i] != self.tokenizer.end_id]
        if not kept:
            return
        if job.echo and ids[n:] and ids[n] != self.tokenizer.end_id:  # a longer text, cut
            ids = [*ids[:n], *[writer.model.objective.pad_id] * (len(ids) - n)]
        how = dict(k=job.n_likeliest, n=n, first=first, given_all=not job.echo)
        text.logprobs = token_logprobs(writer.model, self.tokenizer, ids, drawn, **how)
        begins = begins_of(self.tokenizer.pieces(ids[:n]), sizes, text.parts)
        text.begins = [*(begins[i] for i in kept), begins[kept[-1] + 1]]


def as_tuple(prompt):
    return prompt if isinstance(prompt, tuple) else (prompt,)


def texts_of(prompt):
    """The texts of a prompt: one, or a pair; of a conversation all contents, and all roles."""
    if isinstance(prompt, list):
        return ["".join(message[name] for message in prompt) for name in ("content", "role")]
    return as_tuple(prompt)


def has_gap(segments):
    return any(segment.is_gap for segment in segments)


def is_searched(job, segments):
    """Whether gaps get their likeliest fills, in place of a draw."""
    return not job.goes_on and (not job.watch or job.rank or templates.has_open(segments))


def known_part(tokenizer, text, most, is_end):
    """The longest end of a text, or beginning if not is_end, that the tokenizer can encode and that
    has at most `most` tokens. Returns (this part, its tokens).

    The text may be a whole file: no more of it is encoded than may fit.
    """

    def part(n):
        return text[len(text) - n :] if is_end else text[:n]

    def tokens(n):
        """Those of part(n), or more than `most` if it cannot be encoded."""
        with contextlib.suppress(UserError):
            return len(tokenizer.encode_lossless(part(n), after_gap=not is_end))
        return most + 1

    high = max(1, most)  # characters, doubled until they are too many tokens
    while high < len(text) and tokens(high) <= most:
        high *= 2
    high = min(high, len(text))
    n = bisect.bisect_right(range(1, high + 1), most, key=tokens)
    return part(n), tokens(n)


def tell_from(emit, first, index, *text):
    return emit(first + index, *text)
