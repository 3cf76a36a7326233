"""What clients ask for: the fields of each request as pydantic models, with bounds on all of them.

A model that has been read is a "job": the properties that all share say what is written for it.
Fields that would change the answer and are not supported are refused, unless their value asks for
nothing. Nothing here knows HTTP or computes anything.
"""

import math
import re
import secrets
import zlib
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from typing_extensions import TypeAliasType  # pydantic has it

from nanomdlm.support.cli.settings import shown
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.filling import MAX_GAP

MOST_STEPS = 1 << 13  # of a context; random numbers of all are drawn at once
TOO_MUCH = ("less_than_equal", "too_long", "string_too_long")  # errors of pydantic, status 422


class Refused(UserError):
    """An answer that is an error: the sentence, the field that it is about, the HTTP status.

    wait: seconds after which a client may try again
    """

    def __init__(self, sentence, param=None, status=400, code=None, wait=None):
        super().__init__(sentence)
        self.param = param
        self.status = status
        self.code = code
        self.wait = wait


def check_limit(name, value, limit):
    if value > limit:
        raise Refused(f"{name}={value} is more than {limit}", name, status=422)


# ---- Types
def as_list(value):
    return [value] if isinstance(value, str) else value


def between(kind, low, high):
    return Annotated[kind, Field(ge=low, le=high)]


def without_empty(stops):  # "": clients that have none
    return [stop for stop in stops if stop]


def nothing(value):
    if value:
        raise ValueError("this is not supported; leave it out")


def listed(kind, **limits):
    """A list; the first wrong element is enough, as a body has room for 500,000."""
    return Annotated[list[kind], FailFast(), Field(**limits)]


Natural = between(int, 0, 1 << 31)
Texts = Annotated[listed(str, min_length=1), BeforeValidator(as_list)]
TextsAndPairs = Annotated[listed(str | tuple[str, str], min_length=1), BeforeValidator(as_list)]
Stop = Annotated[str, StringConstraints(max_length=256)]
Stops = Annotated[
    listed(Stop, max_length=64), BeforeValidator(as_list), AfterValidator(without_empty)
]
Seed = between(int, -(1 << 63), (1 << 64) - 1)
Unsupported = Annotated[Any, AfterValidator(nothing)]  # only values that ask for nothing


# ---- What all requests have
class Body(BaseModel):
    """Fields of every request. These say nothing about the text; others that are unknown are
    refused, and null is as good as none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str = ""
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # What is written: "continue" a text, answer a "chat", fill the "gap" of a pair, fill a
    # "template", "score" or "fix" a text.
    kind: ClassVar[str]
    watch: ClassVar[bool] = False  # show the text after each network call
    cut: ClassVar[bool] = False  # cut what is before and after a gap, instead of refusing it

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields):
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def goes_on(self):
        """Whether it writes after a text."""
        return self.kind in ("continue", "chat")

    @property
    def must_match(self):
        """Whether a gap has a pattern, whose automaton may take seconds to build."""
        if self.kind == "template":
            return any(re.search(r"\[(?:___|█+)[:|]", text) for text in self.prompts)
        return self.kind == "gap" and (self.regex is not None or bool(self.choices))


class Sampled(Body):
    """The settings of sample.py, and what is common to all that writes."""

    steps: between(int, 0, MOST_STEPS) = None
    correct: between(int, 0, MOST_STEPS) | Literal["auto"] = None
    redraw: str = None
    spacing: between(int, 1, 1 << 31) = None
    order: str = None
    threshold: between(float, 0, 1) = None
    entropy_bound: between(float, 0, 1e9) = None
    block: Natural = None
    temperature: between(float, 0, 100) = None
    top_k: between(int, -1, 1 << 31) = 0
    top_p: between(float, 0, 1) = None
    cfg: between(float, 0, 100) = None
    seed: Seed = -1
    stop: Stops = []
    stream: bool = False

    seconds: ClassVar[float] = math.inf  # in which the search for fills ends
    n_likeliest: ClassVar[int | None] = None  # tokens named at each place; None: no logprobs
    DEFAULT_TOKENS: ClassVar[int]  # `max_tokens` of a request that does not say it

    def check(self, limits):
        """Raise Refused for what is more than the server allows; limits: a serve.RequestLimits."""
        limit = limits.max_tokens if self.goes_on else limits.max_gap or MAX_GAP
        if self.max_tokens is None:
            self.max_tokens = min(self.DEFAULT_TOKENS, limit)
        check_limit("max_tokens", self.max_tokens, limit)
        check_limit("n", self.n, limits.max_n)

    @cached_property
    def settings(self):
        """A dict of settings of sample.SamplerSettings."""
        settings = self.model_dump(include=SETTINGS, exclude_unset=True)
        if "correct" in settings:
            settings["correct"] = str(settings["correct"])
        settings["top_k"] = max(0, self.top_k)  # -1, as in vLLM: all
        if self.top_p == 0:  # the likeliest token alone
            settings |= dict(top_p=1.0, top_k=1)
        settings["seed"] = seed_of(self.seed, self.temperature)
        return settings


SETTINGS = {*Sampled.model_fields} - {*Body.model_fields, "stop", "stream"}


def seed_of(seed, temperature=None):
    """The seed of 32 bits of a request: up to 2^32 - 1 that of sample.py, of longer ones a checksum
    of all bits. Without one (or with -1, as in llama.cpp) it is drawn, unless nothing is random."""
    if seed == -1:
        return 0 if temperature == 0 else secrets.randbits(32)
    if 0 <= seed < 1 << 32:
        return seed
    return zlib.crc32(seed.to_bytes(9, "little", signed=True))


# ---- OpenAI's
class StreamOptions(BaseModel):
    include_usage: bool | None = None


class OpenAI(Sampled):
    """Fields of both kinds of OpenAI's completions."""

    n: between(int, 1, 4096) = 1
    stream_options: StreamOptions = StreamOptions()
    logit_bias: Unsupported = None
    presence_penalty: Unsupported = None
    frequency_penalty: Unsupported = None


class Completion(OpenAI):
    """/v1/completions"""

    prompt: Texts = [""]
    suffix: str = ""
    infill: Texts = None
    max_tokens: Natural = None
    echo: bool = False
    logprobs: between(int, 0, 32) | Literal[False] = False
    regex: Annotated[str, StringConstraints(min_length=1)] = None
    choices: listed(str, min_length=1, max_length=256) = []
    best_of: Literal[1] = 1
    DEFAULT_TOKENS: ClassVar = 16

    @property
    def kind(self):
        if self.infill is not None:
            return "template"
        # Without a suffix, a gap that must match is at the end of the text.
        return "gap" if self.suffix or self.regex is not None or self.choices else "continue"

    @property
    def prompts(self):
        if self.kind == "gap":
            return [(prompt, self.suffix) for prompt in self.prompt]
        return self.prompt if self.infill is None else self.infill

    @property
    def n_likeliest(self):
        return None if self.logprobs is False else self.logprobs

    def check(self, limits):
        # "": clients that must send a prompt
        if self.infill is not None and (self.suffix or any(self.prompt)):
            raise Refused("infill is a whole text with gaps; leave prompt and suffix out", "prompt")
        if (self.infill is not None) + (self.regex is not None) + bool(self.choices) > 1:
            what = "regex, choices and infill contradict each other; give one of them"
            raise Refused(what, "choices" if self.choices else "regex")
        name = "prompt" if self.infill is None else "infill"
        check_limit(name, len(self.prompts), limits.max_prompts)
        super().check(limits)


class Part(BaseModel):
    type: Literal["text"] = "text"
    text: str


Parts = TypeAliasType("Parts", listed(Part))  # a union cannot have a type with FailFast


class Message(BaseModel):
    """OpenAI's, or one of ShareGPT (from, value). A template sees roles and contents alone."""

    role: str = Field(validation_alias=AliasChoices("role", "from"))
    content: str | Parts | None = Field(validation_alias=AliasChoices("content", "value"))
    tool_calls: Unsupported = None

    def to_dict(self):
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = dict(human="user", gpt="assistant").get(self.role, self.role)
        return dict(role=role, content=content)


class Format(BaseModel):
    type: Literal["text"] = "text"


class Chat(OpenAI):
    """/v1/chat/completions"""

    messages: listed(Message, min_length=1)
    max_tokens: between(int, 1, 1 << 31) = None
    max_completion_tokens: between(int, 1, 1 << 31) = None
    logprobs: bool = False
    top_logprobs: between(int, 0, 32) = 0
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] = "auto"
    response_format: Format = Format()
    modalities: listed(Literal["text"]) = []
    kind: ClassVar = "chat"
    echo: ClassVar = False
    # These models end within the context: without a limit they get all of it.
    DEFAULT_TOKENS: ClassVar = 1 << 31

    @property
    def prompts(self):
        return [[message.to_dict() for message in self.messages]]

    @property
    def n_likeliest(self):
        return self.top_logprobs if self.logprobs else None

    def check(self, limits):
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        super().check(limits)


# ---- Others'
class OneText:
    """What a request without OpenAI's fields asks for."""

    n = 1
    echo = False
    regex = None
    choices = ()


class Infill(OneText, Body):
    """/infill of llama.cpp. Settings change nothing in a search, so that all others are ignored:
    editors send many, also about caches."""

    model_config = ConfigDict(extra="ignore")
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""  # what the text in the gap begins with, which is known
    max_tokens: between(int, -1, 1 << 31) = Field(-1, validation_alias="n_predict")
    t_max_predict_ms: between(float, -1e9, 1e9) = 0
    seed: Seed = -1  # of the draws for a long gap
    stop: Stops = []
    stream: bool = False
    response_fields: listed(str) = None
    kind: ClassVar = "gap"
    cut: ClassVar = True  # what is before and after the gap, instead of refusing it
    n_likeliest: ClassVar = None

    @property
    def prompts(self):
        return [(self.input_prefix + self.prompt, self.input_suffix)]

    @property
    def settings(self):
        return dict(seed=seed_of(self.seed))

    @property
    def seconds(self):
        return self.t_max_predict_ms / 1000 if self.t_max_predict_ms > 0 else math.inf

    def check(self, limits):
        limit = limits.max_gap or MAX_GAP
        self.max_tokens = limit if self.max_tokens < 0 else min(self.max_tokens, limit)


class Listed(Body):
    """What /v1/score and /v1/fix share: a list of texts, and an answer that is a list."""

    prompts: Texts = Field(validation_alias="input")
    stream: ClassVar = False

    def check(self, limits):
        check_limit("input", len(self.prompts), limits.max_prompts)


class Score(Listed):
    """/v1/score"""

    prompts: TextsAndPairs = Field(validation_alias="input")
    passes: between(int, 2, 1024) = 64
    seed: Seed = 0
    kind: ClassVar = "score"

    @property
    def settings(self):
        return dict(seed=seed_of(self.seed, temperature=0))


class Fix(Listed):
    """/v1/fix"""

    caution: between(float, -1000, 1000) = 0.0
    kind: ClassVar = "fix"
    settings: ClassVar = dict(seed=0)


class Page(OneText, Sampled):
    """What the page asks for: a text to go on with, a template to fill, or one whose fills are
    ranked ("rank"), or a text to proofread ("fix"). It is watched."""

    prompt: str = ""
    infill: str = None
    max_tokens: between(int, 1, 1 << 31) = None
    rank: bool = False
    fix: str = None
    stream: Literal[True] = True
    watch: ClassVar = True
    caution: ClassVar = 0.0
    DEFAULT_TOKENS: ClassVar = 256

    @property
    def kind(self):
        if self.fix is not None:
            return "fix"
        return "continue" if self.infill is None else "template"

    @property
    def prompts(self):
        return [dict(fix=self.fix, template=self.infill).get(self.kind, self.prompt)]


def read(model, content, limits):
    """The job of a request: a validated model of its JSON (bytes); Refused for anything else.

    limits: a serve.RequestLimits
    """
    try:
        job = model.model_validate_json(content)
        job.check(limits)
        return job
    except ValidationError as e:
        error = e.errors(include_url=False, include_input=False, include_context=False)[0]
    if error["type"] == "json_invalid":
        raise Refused("the body is not JSON that is accepted; send a JSON object in UTF-8")
    place = [shown(part) for part in error["loc"]]
    param = place[0] if place else None
    if error["type"] == "extra_forbidden":
        raise Refused(f"there is no field {param!r}; leave it out", param)
    where = f"{'.'.join(place[:3])}: " if place else ""
    status = 422 if error["type"] in TOO_MUCH else 400
    raise Refused(f"{where}{shown(error['msg'], 200)}", param, status)
