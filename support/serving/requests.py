"""What clients ask for: the fields of each request as pydantic models, with bounds on all of them.

`read` turns the JSON of a request into a Job, which says what is written. Fields that would change
the answer and are not supported are refused, unless their value asks for nothing. Nothing here
knows HTTP or computes anything.
"""

import math
import re
import secrets
import zlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from nanomdlm.support.cli.settings import shown
from nanomdlm.support.errors import UserError

MOST_STEPS = 1 << 13  # of a context; random numbers of all are drawn at once
TOO_MUCH = ("less_than_equal", "too_long", "string_too_long")  # errors of pydantic, status 422


class Invalid(UserError):
    """A request that is refused: the sentence, the field that it is about, the HTTP status."""

    def __init__(self, sentence, param=None, status=400, code=None):
        super().__init__(sentence)
        self.param = param
        self.status = status
        self.code = code


@dataclass
class Limits:
    """What the operator of a server allows, beside the bounds of the models below."""

    prompts: int = 16
    n: int = 16  # texts for each prompt
    max_tokens: int = 2048
    max_gap: int = 16

    def check(self, value, name, limit):
        if value > limit:
            raise Invalid(f"{name}={value} is more than {limit}", name, status=422)
        return value


@dataclass
class Job:
    """What is written for a request."""

    # "continue" a text, answer a "chat", fill the "gap" of a pair, fill a "template", "score" or
    # "fix" a text
    kind: str
    prompts: list  # texts, or pairs of a text before and after a gap, or templates, or messages
    regex: str | None = None  # what the fill of a gap must match
    choices: tuple = ()  # or one of which it must be
    n: int = 1  # texts of each prompt
    max_tokens: int = 16  # of a text that goes on, or the longest gap
    settings: dict = field(default_factory=dict)  # of sample.SamplerSettings
    stop: tuple = ()
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
        marks = (re.search(r"\[(?:___|█+)[:|]", t) for t in self.prompts if self.kind == "template")
        return self.regex is not None or bool(self.choices) or any(marks)


# ---- Types
def as_list(value):
    return [value] if isinstance(value, str) else value


def between(kind, low, high):
    return Annotated[kind, Field(ge=low, le=high)] | None


Whole = Annotated[int, Field(ge=0, le=1 << 31)] | None
Texts = Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
Stop = Annotated[str, StringConstraints(max_length=256)]
Stops = Annotated[list[Stop], BeforeValidator(as_list), Field(max_length=64)] | None
Seed = between(int, -(1 << 63), (1 << 64) - 1)


def nothing(value):
    if value:
        raise ValueError("this is not supported; leave it out")


Unsupported = Annotated[Any, AfterValidator(nothing)]  # only values that ask for nothing


class Body(BaseModel):
    """Fields of every request. These say nothing about the text; others that are unknown are
    refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class Sampled(Body):
    """The settings of sample.py, and what is common to all that writes."""

    steps: between(int, 0, MOST_STEPS) = None
    correct: between(int, 0, MOST_STEPS) | Literal["auto"] = None
    redraw: str | None = None
    spacing: between(int, 1, 1 << 31) = None
    order: str | None = None
    threshold: between(float, 0, 1) = None
    entropy_bound: between(float, 0, 1e9) = None
    block: Whole = None
    temperature: between(float, 0, 100) = None
    top_k: between(int, -1, 1 << 31) = None
    top_p: between(float, 0, 1) = None
    cfg: between(float, 0, 100) = None
    seed: Seed = None
    stop: Stops = None
    stream: bool | None = None

    def job(self, kind, prompts, **more):
        stops = tuple(filter(None, self.stop or ()))  # "": clients that have none
        stream = bool(self.stream)
        return Job(kind, prompts, settings=self.settings(), stop=stops, stream=stream, **more)

    def settings(self):
        settings = {name: getattr(self, name) for name in SETTINGS}
        settings = {name: value for name, value in settings.items() if value is not None}
        if "correct" in settings:
            settings["correct"] = str(settings["correct"])
        settings["top_k"] = max(0, settings.get("top_k", 0))  # -1, as in vLLM: all
        if settings.get("top_p") == 0:  # the likeliest token alone
            settings |= dict(top_p=1.0, top_k=1)
        settings["seed"] = seed_of(self.seed, settings.get("temperature"))
        return settings


SETTINGS = (
    *("steps", "correct", "redraw", "spacing", "order", "threshold", "entropy_bound", "block"),
    *("temperature", "top_k", "top_p", "cfg", "seed"),
)


def seed_of(seed, temperature=None):
    """The seed of 32 bits of a request: up to 2^32 - 1 that of sample.py, of longer ones a checksum
    of all bits. Without one (or with -1, as in llama.cpp) it is drawn, unless nothing is random."""
    if seed is None or seed == -1:
        return 0 if temperature == 0 else secrets.randbits(32)
    if 0 <= seed < 1 << 32:
        return seed
    return zlib.crc32(seed.to_bytes(9, "little", signed=True))


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class OpenAI(Sampled):
    """Fields of both kinds of OpenAI's completions."""

    n: between(int, 1, 4096) = None
    stream_options: StreamOptions | None = None
    logit_bias: Unsupported = None
    presence_penalty: Unsupported = None
    frequency_penalty: Unsupported = None

    def job(self, kind, prompts, limits, **more):
        n = limits.check(self.n or 1, "n", limits.n)
        usage = bool(self.stream_options and self.stream_options.include_usage)
        return super().job(kind, prompts, n=n, include_usage=usage, **more)


class Completion(OpenAI):
    """/v1/completions"""

    prompt: Texts | None = None
    suffix: str | None = None
    infill: Texts | None = None
    max_tokens: Whole = None
    echo: bool | None = None
    logprobs: between(int, 0, 32) | Literal[False] = None
    regex: str | None = None
    choices: Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    best_of: Literal[1] | None = None

    def to_job(self, limits):
        prompts = self.prompt or [""]
        name = "prompt"
        kind = "continue"
        if self.infill is not None:
            if self.suffix or any(prompts):  # "": clients that must send a prompt
                raise Invalid("infill is a whole text with gaps; leave prompt and suffix out", name)
            prompts, name, kind = self.infill, "infill", "template"
        limits.check(len(prompts), name, limits.prompts)
        if self.regex is not None or self.choices:
            if kind == "template" or (self.regex is not None and self.choices):
                what = "regex, choices and infill contradict each other; give one of them"
                raise Invalid(what, "choices" if self.choices else "regex")
            kind = "gap"  # without a suffix, at the end of the text
        if self.suffix:
            kind = "gap"
        if kind == "gap":
            prompts = [(prompt, self.suffix or "") for prompt in prompts]
        limit = limits.max_tokens if kind == "continue" else limits.max_gap
        max_tokens = min(16, limit) if self.max_tokens is None else self.max_tokens
        return self.job(
            kind,
            prompts,
            limits,
            max_tokens=limits.check(max_tokens, "max_tokens", limit),
            regex=self.regex,
            choices=tuple(dict.fromkeys(self.choices or ())),
            echo=bool(self.echo),
            logprobs=None if self.logprobs is False else self.logprobs,
        )


class Part(BaseModel):
    type: Literal["text"] = "text"
    text: str


class Message(BaseModel):
    """OpenAI's, or one of ShareGPT (from, value). A template sees roles and contents alone."""

    role: str = Field(validation_alias=AliasChoices("role", "from"))
    content: str | list[Part] | None = Field(validation_alias=AliasChoices("content", "value"))
    tool_calls: Unsupported = None

    def to_dict(self):
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = dict(human="user", gpt="assistant").get(self.role, self.role)
        return dict(role=role, content=content)


class Chat(OpenAI):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: between(int, 1, 1 << 31) = None
    max_completion_tokens: between(int, 1, 1 << 31) = None
    logprobs: bool | None = None
    top_logprobs: between(int, 0, 32) = None
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None

    def to_job(self, limits):
        # These models end within the context: without a limit they get all of it.
        wanted = self.max_completion_tokens or self.max_tokens or limits.max_tokens
        return self.job(
            "chat",
            [[message.to_dict() for message in self.messages]],
            limits,
            max_tokens=limits.check(wanted, "max_tokens", limits.max_tokens),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class Infill(Sampled):
    """/infill of llama.cpp. Settings change nothing in a search, so that unknown ones are ignored:
    editors send many, also about caches."""

    model_config = ConfigDict(extra="ignore")
    input_prefix: str | None = None
    input_suffix: str | None = None
    prompt: str | None = None  # what the text in the gap begins with, which is known
    n_predict: between(int, -1, 1 << 31) = None
    t_max_predict_ms: between(float, -1e9, 1e9) = None
    response_fields: list[str] | None = None

    def to_job(self, limits):
        n = -1 if self.n_predict is None else self.n_predict
        ms = self.t_max_predict_ms or 0
        return self.job(
            "gap",
            [((self.input_prefix or "") + (self.prompt or ""), self.input_suffix or "")],
            max_tokens=limits.max_gap if n < 0 else min(n, limits.max_gap),
            fields=self.response_fields,
            cut=True,
            seconds=ms / 1000 if ms > 0 else math.inf,
        )


class Score(Body):
    """/v1/score"""

    input: Annotated[list[str | tuple[str, str]], BeforeValidator(as_list), Field(min_length=1)]
    passes: Annotated[int, Field(ge=2, le=1024)] = 64
    seed: Seed = 0

    def to_job(self, limits):
        limits.check(len(self.input), "input", limits.prompts)
        settings = dict(seed=seed_of(self.seed, temperature=0))
        return Job("score", self.input, settings=settings, passes=self.passes)


class Fix(Body):
    """/v1/fix"""

    input: Texts
    caution: Annotated[float, Field(ge=-1000, le=1000)] = 0.0

    def to_job(self, limits):
        limits.check(len(self.input), "input", limits.prompts)
        return Job("fix", self.input, settings=dict(seed=0), caution=self.caution)


class Page(Sampled):
    """What the page asks for: a text to go on with, a template to fill, or one whose fills are
    ranked ("rank"), or a text to proofread ("fix"). It is watched."""

    prompt: str | None = None
    infill: str | None = None
    max_tokens: between(int, 1, 1 << 31) = None
    rank: bool | None = None
    fix: str | None = None

    def to_job(self, limits):
        if self.fix is not None:
            return Job("fix", [self.fix], settings=dict(seed=0), stream=True, watch=True)
        kind = "continue" if self.infill is None else "template"
        limit = limits.max_tokens if kind == "continue" else limits.max_gap
        n = limits.check(self.max_tokens or min(256, limit), "max_tokens", limit)
        text = self.infill or self.prompt or ""
        job = self.job(kind, [text], max_tokens=n, watch=True, rank=bool(self.rank))
        job.stream = True
        return job


def read(model, content):
    """The validated model of the JSON (bytes) of a request; Invalid for anything else."""
    try:
        return model.model_validate_json(content)
    except ValidationError as e:
        error = e.errors(include_url=False, include_input=False, include_context=False)[0]
    if error["type"] == "json_invalid":
        raise Invalid("the body is not JSON that is accepted; send a JSON object in UTF-8")
    place = [shown(part) for part in error["loc"]]
    param = place[0] if place else None
    if error["type"] == "extra_forbidden":
        raise Invalid(f"there is no field {param!r}; leave it out", param)
    where = f"{'.'.join(place[:3])}: " if place else ""
    status = 422 if error["type"] in TOO_MUCH else 400
    raise Invalid(f"{where}{shown(error['msg'], 200)}", param, status)
