"""What clients get: the pieces of a text that was written, and the JSON of each kind of answer.

A Text knows what was given, what was written, and how it ended; `show` alone says which part of it
a client gets. So a stream, its last event, a whole answer, and the offsets of tokens agree.
"""

import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple


# ---- The pieces of a text
@dataclass
class Text:
    """A text that was written, or the beginning of one that can only grow."""

    parts: list  # (text, whether it was written), in order
    tokens: int = 0  # that were written
    is_ended: bool = False  # by [END], or as the text in a gap fits what follows
    logprobs: list = ()  # infill.probabilities.TokenLogprob of some of its tokens
    begins: list = ()  # where in the whole text each of these begins, and where the last one ends


class Shown(NamedTuple):
    """What a client gets of a Text."""

    text: str
    stop: str  # the text of `stop` that cut it, or ""
    begin: int  # where it begins in the whole text
    written: int  # how many characters at its end were written, if nothing given follows yet


def show(text, job, checked=0):
    """The Shown of a Text. checked: characters of it in which no text of `stop` begins."""
    whole = "".join(part for part, _ in text.parts)
    low, high = 0, len(whole)  # what was written
    if job.kind != "template":  # all of a template is its answer
        is_written = [is_written for _, is_written in text.parts]
        first = is_written.index(True) if True in is_written else len(is_written)
        low = sum(len(part) for part, _ in text.parts[:first])
        high = low + sum(len(part) for part, _ in text.parts[first : first + 1])
    begin = 0 if job.echo else low
    found = [(whole.find(stop, max(low, begin + checked), high), stop) for stop in job.stop]
    at, stop = min((pair for pair in found if pair[0] >= 0), default=(high, ""))
    end = len(whole) if job.echo and not stop else at
    return Shown(whole[begin:end], stop, begin, at - low)


def held_back(written, stops):
    """How many characters at the end of a text must wait: they may belong to a text of `stop`, or
    are half a character."""
    n = len(written.rstrip("\ufffd"))
    for stop in stops:
        for k in range(min(len(stop) - 1, n), 0, -1):
            if written.startswith(stop[:k], n - k):
                n -= k
                break
    return len(written) - n


class Progress:
    """What a client has been sent of a text, as it grows."""

    def __init__(self, job):
        self.job = job
        self.sent = ""
        self.is_stopped = False  # by a text of `stop`

    def grow(self, text, is_finished):
        """What is new of a Text; until it is finished, only what cannot change any more."""
        shown = show(text, self.job, checked=len(self.sent))
        self.is_stopped = bool(shown.stop)
        kept = shown.text
        if shown.written and not (is_finished or self.is_stopped):
            n = held_back(kept[len(kept) - shown.written :], self.job.stop)
            kept = kept[: len(kept) - n]
        new = kept[len(self.sent) :] if is_finished or kept.startswith(self.sent) else ""
        self.sent += new
        return new


def begins_of(pieces, sizes, parts):
    """Where in the whole text each token begins, and where the last one ends.

    pieces: the texts of all tokens; sizes: how many of them each part has. A tokenizer may write
    given text a little differently (case, spaces), so pieces are looked for near their place. What
    is between two tokens belongs to the second.
    """
    begins = []
    whole = "".join(part for part, _ in parts)
    pieces = iter(pieces)
    at = end = 0
    for size, (part, is_written) in zip(sizes, parts):
        lends = is_written and whole[end - 1 : end] == " "  # to the first token that was written
        at = max(at, end - lends)
        end += len(part)
        for _ in range(size):
            begins.append(at)
            at = min(end, after_piece(whole, at, next(pieces)))
    return [*begins, max(at, end)]


def after_piece(whole, at, piece):
    """Where a piece that begins at about `at` ends in a text."""
    if whole.startswith(piece, at):
        return at + len(piece)
    word = piece.strip().lower()
    for begin in range(at, at + 4):
        if whole[begin : begin + len(word)].lower() == word:
            return begin + len(word)
    return at + len(word)


def logprobs_of(text, job):
    """[(TokenLogprob, its text, where that begins)] of the tokens that a client gets.

    With `echo` of the given ones too.
    """
    shown = show(text, job)
    whole = "".join(part for part, _ in text.parts)
    end = shown.begin + len(shown.text)
    found = []
    for token, begin, stop in zip(text.logprobs, text.begins, text.begins[1:]):
        # A token at the end of the text goes on with a character that was cut, and shows as "".
        is_shown = begin < end or (begin == end and not shown.stop)
        if is_shown and (job.echo or token.drawn is not None):
            begin = max(begin, shown.begin)
            found.append((token, whole[begin : min(stop, end)], begin - shown.begin))
    return found


def by_text(likeliest):
    """{text: log p}, the likeliest first, of pairs in that order. Of two tokens that show alike (a
    byte, and a word of one letter), the likelier one."""
    found = {}
    for text, logp in likeliest:
        found.setdefault(text, logp)
    return found


# ---- Answers
class Answer:
    """The answers of the page: all that it gets are the events that a Writer emits for it.

    Those of other routes have the same methods, and `part` and `last_part` of a stream.
    """

    def __init__(self, job, model):
        self.job = job
        self.model = model
        self.prompt_tokens = 0
        self.tokens = 0  # that were written

    def end(self):
        """What follows the parts of all texts."""
        return []


class Listed(Answer):
    """The answers of /v1/score and /v1/fix: a list, and the seed where one counts."""

    def whole(self, results):
        data = [dict(index=i) | one for i, one in enumerate(results)]
        return dict(object="list", model=self.model, seed=self.job.settings["seed"], data=data)


class Completion(Answer):
    """The answers of /v1/completions."""

    PREFIX = "cmpl"
    OBJECT = "text_completion"

    def __init__(self, job, model):
        super().__init__(job, model)
        id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self.about = dict(id=id, object=self.OBJECT, created=int(time.time()), model=model)

    def usage(self):
        return dict(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            total_tokens=self.prompt_tokens + self.tokens,
        )

    def choice(self, index, written, reason=None, logprobs=None):
        return dict(index=index, text=written, logprobs=logprobs, finish_reason=reason)

    def logprobs(self, found):
        """The logprobs of a choice, from those of `logprobs_of`. `drawn` (not OpenAI's): log p of
        each when it was drawn."""
        return dict(
            tokens=[piece for _, piece, _ in found],
            token_logprobs=[token.logp for token, _, _ in found],
            top_logprobs=[by_text(token.likeliest) for token, _, _ in found],
            text_offset=[offset for _, _, offset in found],
            drawn=[token.drawn for token, _, _ in found],
        )

    def finished(self, index, written, text):
        """The choice of a Text that is finished."""
        self.tokens += text.tokens
        is_stopped = show(text, self.job).stop or text.is_ended
        logprobs = None
        if self.job.n_likeliest is not None:
            logprobs = self.logprobs(logprobs_of(text, self.job))
        return self.choice(index, written, "stop" if is_stopped else "length", logprobs)

    def whole(self, texts):
        """The answer with all texts, a dict: index -> answers.Text."""
        choices = [self.finished(i, show(t, self.job).text, t) for i, t in texts.items()]
        seed = self.job.settings["seed"]
        return self.about | dict(choices=choices, usage=self.usage(), seed=seed)

    def part(self, index, new):
        return self.about | dict(choices=[self.choice(index, new)])

    def last_part(self, index, new, text):
        return self.about | dict(choices=[self.finished(index, new, text)])

    def end(self):
        usage = [self.about | dict(choices=[], usage=self.usage())]
        return [*usage * bool(self.job.stream_options.include_usage), "[DONE]"]


class Chat(Completion):
    """The answers of /v1/chat/completions."""

    PREFIX = "chatcmpl"
    OBJECT = "chat.completion"

    def __init__(self, job, model):
        super().__init__(job, model)
        self.begun = set()  # of a stream: texts of which something was sent
        if job.stream:
            self.about["object"] += ".chunk"

    def choice(self, index, written, reason=None, logprobs=None):
        message = dict(content=written)
        if index not in self.begun:
            message = dict(role="assistant") | message
        self.begun.add(index)
        name = "delta" if self.job.stream else "message"
        return {"index": index, name: message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, found):
        """As OpenAI has it for conversations."""

        def entry(token, logp):
            return dict(token=token, logprob=logp, bytes=list(token.encode()))

        content = [
            entry(piece, token.logp)
            | dict(drawn=token.drawn, top_logprobs=[entry(*pair) for pair in token.likeliest])
            for token, piece, _ in found
        ]
        return dict(content=content)


class Infill(Answer):
    """The answers of /infill."""

    def __init__(self, job, model):
        super().__init__(job, model)
        self.began = time.monotonic()

    def whole(self, texts):
        return self.last_part(0, show(texts[0], self.job).text, texts[0])

    def part(self, index, new):
        return dict(content=new, stop=False)

    def last_part(self, index, new, text):
        """The last part of a stream, or the whole answer."""
        shown = show(text, self.job)
        self.tokens += text.tokens
        ms = 1e3 * (time.monotonic() - self.began)
        n = text.tokens
        # Each network call sees the prompt: no time is spent on it alone.
        timings = timings_of("prompt", self.prompt_tokens, 0.0) | timings_of("predicted", n, ms)
        every = dict(
            content=new,
            stop=True,
            model=self.model,
            stop_type="word" if shown.stop else "eos" if text.is_ended else "limit",
            stopping_word=shown.stop,
            tokens_predicted=n,
            tokens_evaluated=self.prompt_tokens,
            tokens_cached=0,
            truncated=False,
            has_new_line="\n" in shown.text,
            generation_settings=dict(self.job.settings, n_predict=self.job.max_tokens),
            timings=timings,
        )
        fields = self.job.response_fields
        return picked(every, fields) if fields else every


def timings_of(what, n, ms):
    """llama.cpp's numbers of n tokens in so many milliseconds."""
    values = dict(n=n, ms=ms, per_token_ms=ms / max(1, n), per_second=1e3 * n / ms if ms else 0.0)
    return {f"{what}_{name}": value for name, value in values.items()}


def picked(answer, paths):
    """Those fields of an answer that are there, as llama.cpp has it: "timings/predicted_n" too, by
    that name."""
    every = dict(answer)
    for name in ("timings", "generation_settings"):
        every |= {f"{name}/{key}": value for key, value in answer[name].items()}
    return {path: every[path] for path in paths if path in every}
