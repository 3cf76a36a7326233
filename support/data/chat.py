"""Conversations: the chat template of a tokenizer writes messages as the text that a model reads.

A template is a jinja program in the tokenizer_config.json or chat_template.jinja of a Hugging Face
folder; transformers runs it in a sandbox. Messages are dicts with a role (system, user, assistant
...) and a content, both texts.
"""

import json
import re
from pathlib import Path

from nanomdlm.support.cli import files
from nanomdlm.support.errors import UserError

USER, ASSISTANT = "user", "assistant"
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # which a template may write


def run(messages, template, tokens):
    """The text that a template writes for messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **tokens
    )
    return text


class ChatTemplate:
    """template: its source. tokens: name -> text of the special tokens that it may write."""

    def __init__(self, template, tokens):
        self.template = template
        self.tokens = tokens
        self.special = None  # a pattern of the special tokens, once the tokenizer is known
        self.run = run  # a server runs it in a process that it can end

    def forbid(self, tokens):
        """Refuse messages that spell one of these special tokens: it would count as that token."""
        words = sorted(filter(None, tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, words))) if words else None

    def to_json(self):
        return dict(template=self.template, tokens=self.tokens)

    @classmethod
    def from_json(cls, content, path):
        """What to_json gave; UserError for anything else, which the file `path` holds."""
        try:
            return cls(content["template"], dict(content["tokens"]))
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{path} is damaged: its chat template is not one") from None

    @classmethod
    def of_folder(cls, folder):
        """That of a folder of Hugging Face; None if it has none."""

        def read(name):
            path = Path(folder) / name
            return files.read_json(path, "tokenizer") if path.exists() else {}

        def word(token):
            return token.get("content") if isinstance(token, dict) else token

        settings = read("tokenizer_config.json")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several with names
            template = {each.get("name"): each.get("template") for each in template}.get("default")
        own = Path(folder) / "chat_template.jinja"
        if own.exists():
            template = files.read_small(own)
        if not isinstance(template, str):
            return None
        tokens = {name: word(settings.get(name)) for name in TOKENS}
        made = cls(template, {n: token for n, token in tokens.items() if isinstance(token, str)})
        added = read("tokenizer.json").get("added_tokens") or []
        made.forbid([token["content"] for token in added if token.get("special")])
        return made

    def render(self, messages):
        """The text of messages, up to where the assistant's next one begins.

        The template sees roles and contents alone. Raises UserError for messages that it refuses,
        or that spell a special token.
        """
        messages = [dict(role=m["role"], content=m["content"]) for m in messages]
        for message in messages if self.special else ():
            if found := self.special.search("\n".join(message.values())):
                raise UserError(f"a message spells the special token {found[0]!r}; remove it")
        try:
            return self.run(messages, self.template, self.tokens)
        except UserError:
            raise
        except Exception as e:  # whatever a program raises
            why = " ".join(str(e).split())[:200] or type(e).__name__
            raise UserError(f"the chat template refuses the conversation ({why})") from e

    def pairs(self, messages):
        """Yield (text before it, content) of each message of the assistant."""
        for i, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                yield self.render(messages[:i]), message["content"]

    def source_beside(self, tokens):
        """The source of the template, for a tokenizer with other special tokens, a dict of names:
        it writes its own ones."""
        own = {name: token for name, token in self.tokens.items() if tokens.get(name) != token}
        lines = [f"{{%- set {name} = {json.dumps(token)} %}}" for name, token in own.items()]
        return "".join([*lines, self.template])

    def to_messages(self, text):
        """The message of a user with this text; or several messages, given as JSON."""
        messages = [dict(role=USER, content=text)]
        if re.match(r"\s*\[\s*\{", text):
            try:
                messages = json.loads(text)
            except (ValueError, RecursionError) as e:
                raise UserError(f"--prompt is not JSON of messages ({e})") from None
            check(messages, "--prompt")
        return messages


def check(messages, where):
    """Raise UserError unless these are messages: a list of dicts with the texts role, content."""
    is_list = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    for message in messages if is_list else [{}]:
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                example = '[{"role": "user", "content": "..."}, ...]'
                raise UserError(f"{where} is not a list of messages with texts {example}")
