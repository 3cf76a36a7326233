"""What clients ask for: the fields of OpenAI's /v1/completions and of llama.cpp's /infill.

`of_completion`, `of_chat`, `of_infill` ... turn the JSON of a request into a Job, which says what
is written; `Completion`, `Chat`, `Infill` ... turn what was written into the JSON of an answer,
whole or in parts. Nothing here knows HTTP or computes anything.

A field that would change the answer and that is not supported is refused; one that changes nothing
(`user`) is ignored, and so is a value that asks for nothing (`presence_penalty` of 0).
"""

import difflib
import json
import math
import re
import secrets
import time
from dataclasses import dataclass, field

from nanomdlm.support.cli.settings import shown
from nanomdlm.support.errors import UserError

MOST_STOPS = 4  # as OpenAI has it
MOST_STEPS = 1 << 13  # of a context; random numbers of all are drawn at once
# Fields of /v1/completions that say nothing about the text.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that are not supported, and the values of theirs that ask for nothing.
IDLE = {
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    # Of conversations.
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
# Fields with the name and the meaning of a flag of sample.py: name -> its type.
SETTINGS = {
    "steps": int,
    "correct": str,
    "redraw": str,
    "spacing": int,
    "order": str,
    "threshold": float,
    "entropy_bound": float,
    "block": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "cfg": float,
    "seed": int,
}
OTHERS = {"model", "prompt", "suffix", "infill", "max_tokens", "n", "stop", "echo", "stream"}
OTHERS |= {"stream_options", "logprobs", "regex", "choices"}
OF_CHAT = {"model", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream"}
OF_CHAT |= {"stream_options", "logprobs", "top_logprobs"}
# Of llama.cpp's server: fields about its caches, its time and what it returns beside the text; and
# the files beside the one that is edited, for which the contexts here have no room.
IGNORED_BY_INFILL = {
    *("cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "t_max_prompt_ms"),
    *("n_indent", "samplers", "timings_per_token", "return_progress", "n_probs", "return_tokens"),
    *("min_keep", "post_sampling_probs", "model", "input_extra"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min"),
}


class Invalid(UserError):
    """A request that is refused: the sentence, the field that it is about, the HTTP status."""

    def __init__(self, sentence, param=None, status=400, code=None):
        super().__init__(sentence)
        self.param = param
        self.status = status
        self.code = code


@dataclass
class Bounds:
    """The most that a request may ask for."""

    prompts: int = 16
    n: int = 16  # texts of a prompt
    max_tokens: int = 2048
    max_gap: int = 16
    stop: int = 256  # characters
    choices: int = 256
    logprobs: int = 32  # likeliest tokens at each place
    passes: int = 1024


@dataclass
class Job:
    """What is written for a request."""

    prompts: list  # texts, or pairs of a text before and after a gap, or templates, or messages
    # "continue" a text, answer a "chat", fill the "gap" of a pair, fill a "template", "score" or
    # "fix" a text
    kind: str
    regex: str | None = None  # what the fill of a gap must match
    choices: tuple = ()  # or one of which it must be
    n: int = 1  # texts of each prompt
    max_tokens: int = 16  # of a text that goes on, or the longest gap
    settings: dict = field(default_factory=dict)  # of sample.SamplerSettings
    stop: list = field(default_factory=list)
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens are named at each place
    passes: int = 64  # random masks of a text that is scored
    caution: float = 0.0  # nats that a change must gain beyond the default, of a text that is fixed
    watch: bool = False  # show the text after each network call: of the page
    rank: bool = False  # show the likeliest fills: of the page
    fields: list | None = None  # of the answer of /infill, those that are returned; None: all
    cut: bool = False  # cut what is before and after a gap, instead of refusing it
    seconds: float = math.inf  # in which the search for fills ends

    @property
    def goes_on(self):
        """Whether it writes after a text."""
        return self.kind in ("continue", "chat")

    @property
    def must_match(self):
        """Whether a gap has a pattern, whose automaton may take seconds to build."""
        marks = [
            re.search(r"\[(?:___|█+)[:|]", one) for one in self.prompts if self.kind == "template"
        ]
        return self.regex is not None or bool(self.choices) or any(marks)


def refuse(sentence, param=None, **how):
    raise Invalid(sentence, param, **how)


# ---- Values
def is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def whole(body, name, default, low, high, where=""):
    """A whole number of a request, or its default if there is none; where: the bounds hold."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        is_large = type(value) is int and value > high
        sentence = f"{name}={short(value)} must be a whole number from {low} to {high}{where}"
        refuse(sentence, name, status=422 if is_large else 400)
    return value


def truth(body, name):
    value = body.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        refuse(f"{name}={short(value)} must be true or false", name)
    return value


def text(body, name, default=None):
    value = body.get(name)
    if value is None:
        return default
    return checked_text(value, name)


def checked_text(value, name):
    """A text that UTF-8 can encode."""
    if not isinstance(value, str):
        refuse(f"{name} must be a text, not {kind(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(f"{name} has half a surrogate pair, which is no text; send valid UTF-8", name)
    return value


def kind(value):
    """The kind of a value of JSON, in a word."""
    names = {str: "text", bool: "boolean", list: "list", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def short(value):
    return shown(json.dumps(value))


def settings_of(body):
    """The fields that are settings of the sampler. Those that are left out keep their defaults;
    without a seed one is drawn."""
    settings = {}
    for name, wanted in SETTINGS.items():
        value = body.get(name)
        if value is None:
            continue
        if wanted is float and is_number(value):
            value = float(value)
        if wanted is int and type(value) is float and is_number(value) and value.is_integer():
            value = int(value)
        if name == "correct" and type(value) is int:
            value = str(value)
        if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
            accepted = dict(int="a whole number", float="a number", str="a text")[wanted.__name__]
            refuse(f"{name}={short(value)} must be {accepted}", name)
        if name == "steps" and value > MOST_STEPS:
            refuse(f"steps={value} must be at most {MOST_STEPS}", name, status=422)
        settings[name] = value
    if settings.get("seed", -1) < 0:  # -1 of llama.cpp: any
        settings["seed"] = secrets.randbits(32)
    settings["seed"] &= (1 << 32) - 1
    return settings


def choices_of(body, bounds):
    choices = body.get("choices")
    if choices is None:
        return ()
    if not isinstance(choices, list) or not choices:
        refuse("choices must be a list of texts", "choices")
    if len(choices) > bounds.choices:
        refuse(f"choices must be at most {bounds.choices} texts", "choices", status=422)
    return tuple(dict.fromkeys(checked_text(choice, "choices") for choice in choices))


def logprobs_of(body, bounds):
    if body.get("logprobs") is False:
        return None
    return whole(body, "logprobs", None, 0, bounds.logprobs)


def stops_of(body, bounds):
    """The texts before which an answer is cut off."""
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        refuse(f"stop must be a text or a list of at most {MOST_STOPS} texts", "stop")
    for one in stops:
        if not 0 < len(checked_text(one, "stop")) <= bounds.stop:
            refuse(f"a text of stop must have 1 to {bounds.stop} characters", "stop")
    return stops


def check_fields(body, known, ignored):
    """Refuse a body that is no object, and fields that are unknown or not supported."""
    if not isinstance(body, dict):
        refuse(f"the body must be a JSON object, not {kind(body)}")
    for name, value in body.items():
        if name in IDLE:
            if value in IDLE[name] and not (value is True and 1 in IDLE[name]):
                continue
            what = f"{name} is not supported by this server"
            refuse(f"{what}; leave it out", name, code="unsupported")
        if name not in known and name not in ignored:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
            fix = f"the nearest is {near[0]}" if near else "leave it out"
            refuse(f"there is no field {shown(name)!r}; {fix}", shown(name))


# ---- Requests
def of_completion(body, bounds):
    """The Job of a body of /v1/completions; Invalid for what cannot be done."""
    check_fields(body, OTHERS | SETTINGS.keys(), IGNORED)
    prompts, way = prompts_of(body, bounds)
    regex = text(body, "regex")
    choices = choices_of(body, bounds)
    if regex is not None or choices:
        if way == "template" or (regex is not None and choices):
            sentence = "regex, choices and infill contradict each other; give one of them"
            refuse(sentence, "choices" if choices else "regex")
        if way == "continue":  # a gap at the end of the text
            prompts, way = [(prompt, "") for prompt in prompts], "gap"
    job = Job(
        prompts,
        way,
        regex=regex,
        choices=choices,
        n=whole(body, "n", 1, 1, bounds.n),
        settings=settings_of(body),
        stop=stops_of(body, bounds),
        logprobs=logprobs_of(body, bounds),
        echo=truth(body, "echo"),
        stream=truth(body, "stream"),
        include_usage=includes_usage(body),
    )
    most = bounds.max_tokens if job.kind == "continue" else bounds.max_gap
    default = min(16, most)
    where = "" if job.kind == "continue" else " for a gap"
    job.max_tokens = whole(body, "max_tokens", default, 1, most, where)
    return job


def includes_usage(body):
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        refuse(f"stream_options must be an object, not {kind(options)}", "stream_options")
    return truth(options or {}, "include_usage")


def of_chat(body, bounds):
    """The Job of a body of OpenAI's /v1/chat/completions."""
    check_fields(body, OF_CHAT | SETTINGS.keys(), IGNORED)
    job = Job(
        [messages_of(body)],
        "chat",
        n=whole(body, "n", 1, 1, bounds.n),
        settings=settings_of(body),
        stop=stops_of(body, bounds),
        stream=truth(body, "stream"),
        include_usage=includes_usage(body),
    )
    if truth(body, "logprobs"):
        job.logprobs = whole(body, "top_logprobs", 0, 0, bounds.logprobs)
    most = bounds.max_tokens
    old = whole(body, "max_tokens", most, 1, most)  # these models end within the context
    job.max_tokens = whole(body, "max_completion_tokens", old, 1, most)
    return job


def messages_of(body):
    """The messages of a conversation, dicts of the texts role and content."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages must be a list of objects with a role and a content", "messages")
    found = []
    for message in messages:
        if not isinstance(message, dict):
            refuse(f"a message must be an object, not {kind(message)}", "messages")
        content = message.get("content")
        if isinstance(content, list):  # of parts
            is_text = all(isinstance(p, dict) and p.get("type") == "text" for p in content)
            if not is_text:
                refuse("a message may have parts of type text alone; send text", "messages")
            content = "".join(checked_text(p.get("text"), "messages") for p in content)
        role = checked_text(message.get("role"), "the role of a message")
        found.append(dict(role=role, content=checked_text(content, "the content of a message")))
    return found


def prompts_of(body, bounds):
    """(prompts, kind) of a Job."""
    template = body.get("infill")
    if template is not None:
        for name in ("prompt", "suffix"):
            if body.get(name) not in (None, ""):  # "": clients that must send a prompt
                refuse(f"infill is a whole text with gaps; leave {name} out", name)
    name = "prompt" if template is None else "infill"
    given = template if template is not None else body.get("prompt")
    prompts = [""] if given is None else given if isinstance(given, list) else [given]
    if not 1 <= len(prompts) <= bounds.prompts:
        most = f"1 to {bounds.prompts} texts"
        sentence = f"{name} must be a text or a list of {most}, not {len(prompts)}"
        refuse(sentence, name, status=422 if prompts else 400)
    if any(type(prompt) is int or isinstance(prompt, list) for prompt in prompts):
        refuse(f"{name} must be text, not ids of tokens; send the text", name)
    prompts = [checked_text(prompt, name) for prompt in prompts]
    if template is not None:
        return prompts, "template"
    suffix = text(body, "suffix")
    if not suffix:  # "" is what clients send for none
        return prompts, "continue"
    return [(prompt, suffix) for prompt in prompts], "gap"


def of_infill(body, bounds):
    """The Job of a body of llama.cpp's /infill."""
    known = {"input_prefix", "input_suffix", "prompt", "n_predict", "stop", "stream"}
    known |= {"response_fields", "t_max_predict_ms"}
    check_fields(body, known | SETTINGS.keys(), IGNORED_BY_INFILL)
    # llama.cpp: what the text in the gap begins with, which is known.
    before = text(body, "input_prefix", "") + text(body, "prompt", "")
    after = text(body, "input_suffix", "")
    n = whole(body, "n_predict", -1, -1, 1 << 31)
    fields = body.get("response_fields")
    if fields is not None and not isinstance(fields, list):
        refuse(f"response_fields must be a list, not {kind(fields)}", "response_fields")
    n = bounds.max_gap if n < 0 else min(n, bounds.max_gap)  # 0: editors fill llama.cpp's caches
    return Job(
        [(before, after)],
        "gap",
        max_tokens=n,
        settings=settings_of(body),
        stop=stops_of(body, bounds),
        stream=truth(body, "stream"),
        fields=fields,
        cut=True,
        seconds=seconds_of(body),
    )


def seconds_of(body):
    """The time that an editor gives a fill, in seconds; without one there is no limit."""
    value = body.get("t_max_predict_ms")
    if value is None or (is_number(value) and value <= 0):  # llama.cpp: no limit
        return math.inf
    if not is_number(value):
        refuse(f"t_max_predict_ms={short(value)} must be a number", "t_max_predict_ms")
    return value / 1000


def of_score(body, bounds):
    """The Job of a body of /v1/score."""
    check_fields(body, {"model", "input", "passes", "seed"}, IGNORED)
    given = body.get("input")
    texts = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= bounds.prompts:
        most = f"1 to {bounds.prompts} texts"
        refuse(f"input must be a text or a list of {most}", "input", status=422 if texts else 400)
    pairs = [each for each in texts if isinstance(each, list)]
    if any(len(pair) != 2 for pair in pairs):
        refuse("a list in input must be a pair, [context, text]", "input")
    prompts = [
        tuple(checked_text(part, "input") for part in each)
        if isinstance(each, list)
        else checked_text(each, "input")
        for each in texts
    ]
    passes = whole(body, "passes", 64, 2, bounds.passes)
    seed = whole(body, "seed", 0, 0, (1 << 32) - 1)
    return Job(prompts, "score", settings=dict(seed=seed), passes=passes)


def of_page(body, bounds):
    """The Job of what the page asks for: a text to go on with, a template to fill, or one whose
    fills are ranked ("rank"), or a text to proofread ("fix"). It is watched."""
    known = {"infill", "prompt", "max_tokens", "rank", "fix"}
    check_fields(body, known | SETTINGS.keys(), set())
    if body.get("fix") is not None:
        job = Job([text(body, "fix")], "fix", settings=dict(seed=0))
    else:
        prompts, kind = prompts_of(body, bounds)
        most = bounds.max_tokens if kind == "continue" else bounds.max_gap
        n = whole(body, "max_tokens", min(256, most), 1, most)
        job = Job(prompts[:1], kind, max_tokens=n, settings=settings_of(body))
        job.rank = truth(body, "rank")
    job.stream = True
    job.watch = True
    return job


def of_fix(body, bounds):
    """The Job of a body of /v1/fix."""
    check_fields(body, {"model", "input", "caution"}, IGNORED)
    given = body.get("input")
    texts = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= bounds.prompts:
        most = f"1 to {bounds.prompts} texts"
        refuse(f"input must be a text or a list of {most}", "input", status=422 if texts else 400)
    caution = body.get("caution", 0)
    if not is_number(caution):
        refuse(f"caution={short(caution)} must be a number of nats", "caution")
    prompts = [checked_text(each, "input") for each in texts]
    return Job(prompts, "fix", settings=dict(seed=0), caution=float(caution))


# ---- Answers
@dataclass
class Text:
    """One text that was written: what was filled, all of it, and how it ended."""

    filled: str
    whole: str
    tokens: int
    is_ended: bool = False  # by [END], or as the text in a gap fits what follows
    logprobs: list | None = None  # a nanomdlm.support.infill.probabilities.TokenLogprob for each


def cut_at(written, stops):
    """(the text before the first of `stops`, which one it was or "")"""
    found = [(written.find(stop), stop) for stop in stops if stop in written]
    if not found:
        return written, ""
    at, stop = min(found)
    return written[:at], stop


def safe_length(written, stops):
    """How many characters of a text that goes on can be sent: none that may belong to a stop, nor
    half a character."""
    n = len(written.rstrip("\ufffd"))
    for stop in stops:
        for k in range(min(len(stop) - 1, n), 0, -1):
            if written[:n].endswith(stop[:k]):
                n -= k
                break
    return n


@dataclass
class Progress:
    """What a client has been sent of one text, as it grows."""

    stops: list
    sent: str = ""
    is_done: bool = False

    def grow(self, written, is_whole=False):
        """What is new in `written`, which cannot change any more; is_whole: it is all of it."""
        if self.is_done:
            return ""
        kept, stop = cut_at(written, self.stops)
        self.is_done = is_whole or bool(stop)
        if not self.is_done:
            kept = kept[: safe_length(kept, self.stops)]
        # A tokenizer may decode the end of an unfinished text otherwise: that waits.
        if not kept.startswith(self.sent):
            return "" if not self.is_done else kept[len(self.sent) :]
        new = kept[len(self.sent) :]
        self.sent = kept
        return new


def finish_of(text, stop, job):
    """OpenAI's finish_reason."""
    return "stop" if stop or text.is_ended else "length"


def shown_text(text, job):
    """(what a client gets of a text, the stop that cut it or "")"""
    written, stop = cut_at(text.filled, job.stop)
    if job.kind == "template":
        return cut_at(text.whole, job.stop)
    if job.echo:
        begin, _, end = text.whole.partition(text.filled) if text.filled else (text.whole, "", "")
        written = begin + written + ("" if stop else end)
    return written, stop


def shown_logprobs(text, written):
    """The logprobs of a choice, as OpenAI has them, of what is left of a text after `stop`: each
    token's log p given all others. `drawn`: when it was drawn (not in OpenAI's)."""
    if text.logprobs is None:
        return None
    tokens = []
    offsets = []
    at = 0
    for token in text.logprobs:
        if at >= len(written):
            break
        tokens.append(token)
        offsets.append(at)
        at += len(token.text)
    return dict(
        tokens=[token.text for token in tokens],
        token_logprobs=[token.logp for token in tokens],
        top_logprobs=[dict(token.likeliest) for token in tokens],
        text_offset=offsets,
        drawn=[token.drawn for token in tokens],
    )


class Completion:
    """The answers of /v1/completions."""

    PREFIX = "cmpl"
    OBJECT = "text_completion"

    def __init__(self, job, model, prompt_tokens=0):
        self.job = job
        self.about = dict(
            id=f"{self.PREFIX}-{secrets.token_hex(12)}",
            object=self.OBJECT,
            created=int(time.time()),
            model=model,
        )
        self.prompt_tokens = prompt_tokens
        self.tokens = 0

    def usage(self):
        total = self.prompt_tokens + self.tokens
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return dict(zip(names, (self.prompt_tokens, self.tokens, total)))

    def choice(self, index, written, reason=None, logprobs=None):
        return dict(index=index, text=written, logprobs=logprobs, finish_reason=reason)

    def logprobs_of(self, text):
        return shown_logprobs(text, cut_at(text.filled, self.job.stop)[0])

    def whole(self, texts):
        """The answer with all texts."""
        choices = []
        for index, text in enumerate(texts):
            written, stop = shown_text(text, self.job)
            reason = finish_of(text, stop, self.job)
            choices.append(self.choice(index, written, reason, self.logprobs_of(text)))
            self.tokens += text.tokens
        seed = self.job.settings["seed"]
        return self.about | dict(choices=choices, usage=self.usage(), seed=seed)

    def part(self, index, new):
        return self.about | dict(choices=[self.choice(index, new)])

    def last_part(self, index, new, text):
        self.tokens += text.tokens
        _, stop = shown_text(text, self.job)
        reason = finish_of(text, stop, self.job)
        choice = self.choice(index, new, reason, self.logprobs_of(text))
        return self.about | dict(choices=[choice])

    def end(self):
        """What follows the parts of all texts."""
        return [self.about | dict(choices=[], usage=self.usage())] * self.job.include_usage


class Chat(Completion):
    """The answers of /v1/chat/completions."""

    PREFIX = "chatcmpl"
    OBJECT = "chat.completion"

    def __init__(self, job, model, prompt_tokens=0):
        super().__init__(job, model, prompt_tokens)
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

    def logprobs_of(self, text):
        """As OpenAI has it for conversations."""
        if (shown := super().logprobs_of(text)) is None:
            return None

        def entry(token, logp):
            return dict(token=token, logprob=logp, bytes=list(token.encode()))

        each = zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], shown["drawn"])
        content = [
            entry(token, logp)
            | dict(drawn=drawn, top_logprobs=[entry(*pair) for pair in top.items()])
            for token, logp, top, drawn in each
        ]
        return dict(content=content)


def picked(answer, paths):
    """Those fields of an answer that are there, as llama.cpp has it: "timings/predicted_n" too, by
    that name."""
    found = {}
    for path in paths:
        value = answer
        for name in str(path).split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[str(path)] = value
    return found


class Infill:
    """The answers of /infill."""

    def __init__(self, job, model, prompt_tokens=0):
        self.job = job
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.began = time.monotonic()

    def whole(self, texts):
        return self.last_part(0, None, texts[0])

    def part(self, index, new):
        return dict(content=new, stop=False)

    def last_part(self, index, new, text):
        """The last part of a stream, with what it adds; or the whole answer, if that is None."""
        written, stop = shown_text(text, self.job)
        ms = 1e3 * (time.monotonic() - self.began)
        all_fields = dict(
            content=written if new is None else new,
            stop=True,
            model=self.model,
            stop_type="word" if stop else "eos" if text.is_ended else "limit",
            stopping_word=stop,
            tokens_predicted=text.tokens,
            tokens_evaluated=self.prompt_tokens,
            tokens_cached=0,
            truncated=False,
            has_new_line="\n" in written,
            generation_settings=dict(self.job.settings, n_predict=self.job.max_tokens),
            timings=dict(
                prompt_n=self.prompt_tokens,
                prompt_ms=0.0,  # each network call sees the prompt: none is spent on it alone
                prompt_per_token_ms=0.0,
                prompt_per_second=0.0,
                predicted_n=text.tokens,
                predicted_ms=ms,
                predicted_per_token_ms=ms / max(1, text.tokens),
                predicted_per_second=1e3 * text.tokens / max(ms, 1e-9),
            ),
        )
        return all_fields if self.job.fields is None else picked(all_fields, self.job.fields)

    def end(self):
        return []


class Scores:
    """The answers of /v1/score."""

    def __init__(self, job, model, prompt_tokens=0):
        self.job = job
        self.model = model
        self.prompt_tokens = prompt_tokens

    def whole(self, scores):
        data = [dict(index=i, object="score", **score._asdict()) for i, score in enumerate(scores)]
        return dict(object="list", model=self.model, data=data, seed=self.job.settings["seed"])


class Fixes:
    """The answers of /v1/fix."""

    def __init__(self, job, model, prompt_tokens=0):
        self.model = model
        self.prompt_tokens = prompt_tokens

    def whole(self, results):
        data = [
            dict(index=i, text=one.text, changes=[change._asdict() for change in one.changes])
            for i, one in enumerate(results)
        ]
        return dict(object="list", model=self.model, data=data)


class Watched:
    """The answers of the page: all that it gets are the events of serve.Writer.show."""

    def __init__(self, job, model, prompt_tokens=0):
        self.prompt_tokens = prompt_tokens

    def end(self):
        return []
