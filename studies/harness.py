"""The model "mdlm" of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness).

    python studies/harness.py run --model=mdlm --model_args=out_dir=out --tasks=arc_easy --limit=100

log p(answer | prompt) is exact, by the chain rule from left to right, for answers of up to `draws`
tokens (64): tighter than the bound, and cheaper. Longer ones get the bound, from as many counts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/harness.py, from anywhere

from nanomdlm.support.cli import entry, terminal

entry.start(__name__)

import torch
import torch.nn.functional as F

import mdlm
import sample
from nanomdlm.support import abilities
from nanomdlm.support.cli import environment
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.model_calls import groups, next_logits, to_context
from nanomdlm.support.infill.templates import Gap, Text, allowed_tokens, encode_text
from nanomdlm.support.run import checkpoint

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as e:
    fix = environment.pip_install("lm_eval")
    terminal.warn(f"harness.py: this needs lm-evaluation-harness ({e}); type: {fix}")
    sys.exit(2)


LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one thing
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p"}  # generation_kwargs


@register_model("mdlm")
class Harness(LM):
    """The args of a request are (prompt, answer).

    All are text as it is: what marks a gap in a template of sample.py is none here.
    """

    def __init__(
        self,
        out_dir=None,
        draws=64,
        seed=0,
        device=None,
        batch_size=1,
        max_batch_size=1,
        trust_remote_code=False,
    ):
        super().__init__()
        folder = checkpoint.default_run(out_dir)
        device = device if torch.cuda.is_available() else "auto"  # lm_eval asks for cuda:0
        self.model, self.tokenizer, config = mdlm.load(
            folder, device or "auto", trust_remote_code=trust_remote_code
        )
        self.asks = bool(config.prompt_column)  # then [END] follows a prompt
        self.room = config.block_size - self.asks
        self.draws = max(1, draws)
        self.seed = seed
        self.ignored = set()  # generation_kwargs that were said to be

    def encode(self, requests, n):
        """The ids of the first n args of each request; UserError names the request that has none.

        Of all of them before the work begins, which may take hours.
        """
        encoded = []
        for number, request in enumerate(requests, 1):
            of_task = f" of {task}" if (task := getattr(request, "task_name", None)) else ""
            name = f"request {number}{of_task}"
            for text in request.args[:n]:
                try:
                    self.tokenizer.encode_lossless(text)
                except UserError as e:
                    raise UserError(f"{name}, {text[:40]!r}: {e}") from None
            ids = self.encode_args(*request.args[:n])
            if n == 2 and not 0 < len(ids[-1]) <= self.room:
                what = f"{name}, {request.args[1][:40]!r}: an answer has {len(ids[-1])} tokens"
                raise UserError(f"{what}; the model takes 1 to {self.room}")
            encoded.append(ids)
        return encoded

    def encode_args(self, prompt, *answer):
        """[the ids of a prompt], and those of its answer if there is one."""
        if answer and not self.asks:
            return self.tokenizer.encode_pair(prompt, *answer)
        return [self.tokenizer.encode_lossless(text) for text in (prompt, *answer)]

    def loglikelihood(self, requests):
        """[(log p(answer | prompt) in nats, whether greedy choices from left to right give it)]"""
        return [self.score(*pair) for pair in terminal.bar(self.encode(requests, 2))]

    def loglikelihood_rolling(self, requests):
        """[log p(text)], of a long text in windows of a context."""
        n = self.room
        texts = [ids for (ids,) in self.encode(requests, 1)]
        cut = ([ids[i : i + n] for i in range(0, len(ids), n)] for ids in texts)
        return [sum(self.score([], window)[0] for window in windows) for windows in cut]

    def generate_until(self, requests):
        """[what follows the prompt, up to the first of the strings that end it]"""
        self.encode(requests, 1)  # refuses what the model cannot take
        prompts = [request.args[0] for request in requests]
        asked = [request.args[1] for request in requests]
        return [self.write(*pair) for pair in terminal.bar(list(zip(prompts, asked)))]

    def write(self, prompt, gen_kwargs):
        """What follows a prompt; gen_kwargs: the generation_kwargs of a task."""
        unknown = {name for name in gen_kwargs if name not in KNOWN} - self.ignored
        if unknown:
            terminal.warn(
                f"generation_kwargs {', '.join(sorted(unknown))} are not known here; ignored"
            )
            self.ignored |= unknown
        n = next(
            (gen_kwargs[name] for name in LENGTHS if gen_kwargs.get(name) is not None), 64
        )  # tokens
        literal = encode_text(prompt, self.tokenizer, after_gap=False, before_gap=not self.asks)
        # Of a long prompt the end is kept, half a context at least; sample.py writes on from there.
        prompt = literal.ids[-max(1, self.room - n, self.room // 2) :]
        if self.asks:  # which takes a context at most
            prompt = [*prompt, self.tokenizer.end_id]
            n = min(n, self.room + 1 - len(prompt))
        if n <= 0:
            return ""
        settings = dict(temperature=0.0)
        if gen_kwargs.get("do_sample"):
            settings = {name: gen_kwargs.get(name) for name in ("temperature", "top_k", "top_p")}
            settings = {name: value for name, value in settings.items() if value is not None}
        device = next(self.model.parameters()).device
        x = torch.tensor([[*prompt, *[self.model.mask_id] * n]], device=device)
        ends = dict(end_id=self.tokenizer.end_id)
        if abilities.knows_lengths(self.model):
            ends = dict(forbid=[self.tokenizer.end_id])
        segments = [Text(literal, prompt, literal.lends_space), Gap(n)]
        ends["allowed"] = allowed_tokens(segments, self.tokenizer)
        ids = sample.generate(self.model, x, seed=self.seed, **ends, **settings)[0].tolist()
        text = "".join(self.tokenizer.pieces(ids, len(prompt)))
        if literal.lends_space:  # it is the prompt's
            text = text.removeprefix(" ")
        until = gen_kwargs.get("until") or []
        for stop in [until] if isinstance(until, str) else until:
            text = text.split(stop)[0] if stop else text
        return text

    @torch.no_grad()
    def score(self, prompt, answer):
        """(log p, greedy?) of ids; the beginning of a long prompt is left out."""
        n = len(answer)
        prompt = prompt[max(0, len(prompt) + n - self.room) :]
        ids = prompt + [self.tokenizer.end_id] * self.asks + answer
        device = next(self.model.parameters()).device
        x = to_context(self.model, torch.tensor([ids], device=device))
        at = torch.arange(len(ids) - n, len(ids), device=device)
        if n > self.draws and abilities.fills_gaps(self.model):
            scored = torch.zeros_like(x, dtype=torch.bool).index_fill(1, at, True)
            r = mdlm.evaluate(self.model, x, self.draws, self.seed, scored=scored)
            return -n * r["nelbo"], False
        batches = [at[batch] for batch in groups(self.model, n, device)]
        logits = torch.cat([next_logits(self.model, x, 0 * at, at) for at in batches]).double()
        logp = -F.cross_entropy(logits, x[0, at], reduction="sum").item()
        return logp, torch.equal(logits.argmax(-1), x[0, at])


if __name__ == "__main__":
    sys.exit(entry.run(lambda argv: cli_evaluate(), sys.argv[1:]))
