"""The model "mdlm" of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness).

    python studies/harness.py run --model=mdlm --model_args=out_dir=out --tasks=arc_easy --limit=100

log p(answer | prompt) is exact, by the chain rule from left to right, for answers of up to `draws`
tokens (64): tighter than the bound, and cheaper. Longer ones get the bound, from as many counts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/harness.py, from anywhere

import torch
import torch.nn.functional as F
from tqdm import tqdm

import mdlm
import sample
from support import checkpoint, cli
from support.cli import UserError
from support.likelihood import groups, next_logits, to_context

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as e:
    cli.warn(f"this needs lm-evaluation-harness ({e}); pip install lm_eval")
    sys.exit(2)


@register_model("mdlm")
class Harness(LM):
    """The args of a request are (prompt, answer)."""

    def __init__(self, out_dir=None, draws=64, seed=0, device=None, batch_size=1, max_batch_size=1):
        super().__init__()
        cli.check_not_empty("out_dir", out_dir)
        folder = checkpoint.default_run(out_dir)
        device = device if torch.cuda.is_available() else "auto"  # lm_eval asks for cuda:0
        self.model, self.tokenizer, config = mdlm.load(folder, device or "auto")
        self.asks = bool(config.prompt_column)  # then [END] follows a prompt
        self.room = config.block_size - self.asks
        self.draws = max(1, draws)
        self.seed = seed

    def loglikelihood(self, requests):
        """[(log p(answer | prompt) in nats, whether greedy choices from left to right give it)]"""
        pairs = [list(map(self.tokenizer.encode, request.args)) for request in requests]
        return [self.score(*pair) for pair in tqdm(pairs)]

    def loglikelihood_rolling(self, requests):
        """[log p(text)], of a long text in windows of a context."""
        n = self.room
        texts = [self.tokenizer.encode(request.args[0]) for request in requests]
        cut = ([ids[i : i + n] for i in range(0, len(ids), n)] for ids in texts)
        return [sum(self.score([], part)[0] for part in parts) for parts in cut]

    def generate_until(self, requests):
        """[what follows the prompt, up to the first of the strings that end it]"""
        found = []
        for prompt, how in (request.args for request in requests):
            n = how.get("max_gen_toks", 64)
            ids = self.tokenizer.encode(prompt)[-max(1, self.room - n) :]
            prompt = self.tokenizer.decode(ids)
            heat = how.get("temperature", 1.0) if how.get("do_sample") else 0.0
            settings = dict(length=len(ids) + self.asks + n, temperature=heat, seed=self.seed)
            text = sample.write(self.model, self.tokenizer, prompt, **settings)[0]
            text = text[len(prompt) + self.asks :]
            until = how.get("until", [])
            for stop in [until] if isinstance(until, str) else until:
                text = text.split(stop)[0]
            found.append(text)
        return found

    @torch.no_grad()
    def score(self, prompt, answer):
        """(log p, greedy?) of ids; the beginning of a long prompt is left out."""
        n = len(answer)
        if not 0 < n <= self.room:
            raise UserError(f"an answer has {n} tokens; the model takes 1 to {self.room}")
        prompt = prompt[max(0, len(prompt) + n - self.room) :]
        ids = prompt + [self.tokenizer.end_id] * self.asks + answer
        device = next(self.model.parameters()).device
        x = to_context(self.model, torch.tensor([ids], device=device))
        at = torch.arange(len(ids) - n, len(ids), device=device)
        if n > self.draws and self.model.config.objective == "mdlm" and self.model.n == 1:
            scored = torch.zeros_like(x, dtype=torch.bool).index_fill(1, at, True)
            r = mdlm.evaluate(self.model, x, self.draws, self.seed, scored=scored)
            return -n * r["nelbo"], False
        parts = [at[part] for part in groups(self.model, n, device)]
        logits = torch.cat([next_logits(self.model, x, 0 * at, at) for at in parts]).double()
        logp = -F.cross_entropy(logits, x[0, at], reduction="sum").item()
        return logp, torch.equal(logits.argmax(-1), x[0, at])


if __name__ == "__main__":
    sys.exit(cli.run(lambda argv: cli_evaluate(), sys.argv[1:]))
