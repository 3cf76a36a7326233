"""Sample from a trained model: generate text, continue a prompt, fill gaps.

    python sample.py                          # texts from nothing
    python sample.py --prompt "ROMEO:"        # a beginning that stays as it is
    python sample.py --infill "To be███"      # every █ is one token to fill

The reverse process of masked diffusion: start from [MASK], reveal a random share of it in each step.
"""

import sys
from dataclasses import dataclass

import torch

import common
import mdlm
from common import Refusal, opt


@dataclass
class Options:
    out_dir: str = opt("out", "run folder or checkpoint folder")
    infill: str = opt("", "template; every █ is one token to fill")
    prompt: str = opt("", "beginning of the text")
    num_samples: int = opt(1, "texts to draw", bounds=(1, 4096))
    steps: int = opt(64, "network calls at most", bounds=(1, 1 << 20))
    temperature: float = opt(1.0, "below 1: likelier tokens; above: more varied ones", bounds=(1e-3, 100))
    seed: int = opt(0, "of the random draws", bounds=(0, (1 << 32) - 1))
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")


@torch.no_grad()
def generate(model, x, steps=64, order="ancestral", temperature=1.0, generator=None):
    """Fill the [MASK] positions of x (B, T); given tokens stay. Autoregressive models go left to right.

    order  ancestral: each masked position is revealed in step s with probability 1 / (steps - s), the exact
           reverse process of the linear schedule (Sahoo et al., 2406.07524)
    """
    if order != "ancestral":
        raise ValueError(f"order={order!r} is not known; use 'ancestral'")
    x, mask = x.clone(), model.mask_id

    def draw(logits):  # (n, V) -> (n,), on the CPU in float64: exact, and the same draws on any device
        p = torch.softmax(logits.cpu().double() / temperature, -1)
        return torch.multinomial(p, 1, generator=generator)[:, 0]

    if model.config.objective == "ar":
        for i in (x == mask).any(0).nonzero()[:, 0].tolist():
            drawn = draw(model(mdlm.shift_right(x, mask))[:, i]).to(x.device)
            x[:, i] = torch.where(x[:, i] == mask, drawn, x[:, i])
        return x
    for s in range(steps):
        chosen = torch.rand(x.shape, generator=generator) < 1 / (steps - s)
        reveal = (x == mask) & chosen.to(x.device)
        if reveal.any():  # positions first, then tokens at those positions
            x[reveal] = draw(model(x)[reveal]).to(x.device)
    return x


def preview(model, tokenizer, windows, generator):
    """Two generated texts and a window of validation text with a gap filled, for the log of a run."""
    T = model.config.block_size
    x = torch.full((3, T), model.mask_id, device=windows.device)
    gap = slice(T // 2, T // 2 + max(1, T // 10))
    x[2] = windows[0]
    x[2, gap] = model.mask_id
    if model.config.objective == "ar":  # reads only to the left, so it cannot fill a gap
        x = x[:2]
    out = generate(model, x, steps=min(T, 64), generator=generator).tolist()
    texts = [tokenizer.decode(ids) for ids in out[:2]]
    return texts + [f"{tokenizer.decode(ids[:gap.start])}[{tokenizer.decode(ids[gap])}]"
                    f"{tokenizer.decode(ids[gap.stop:])}" for ids in out[2:]]


def main(argv):
    options = Options(**common.parse_flags(Options, argv, __doc__.split("\n")[0]))
    common.check_fields(options)
    if options.infill and options.prompt:
        raise Refusal("--infill and --prompt contradict each other; write the prompt into the template")
    if options.infill and "█" not in options.infill:
        raise Refusal(f"--infill={options.infill!r} has nothing to fill; mark missing tokens with █")
    device = mdlm.pick_device(options.device)
    model, tokenizer, config = mdlm.load(options.out_dir, device)
    if options.infill and config.objective == "ar":
        raise Refusal("an autoregressive model reads only to the left and cannot infill; use --prompt")
    ids = []
    for i, piece in enumerate(options.infill.split("█") if options.infill else [options.prompt]):
        ids += [model.mask_id] * (i > 0) + tokenizer.encode(piece)
    if len(ids) > config.block_size:
        raise Refusal(f"{len(ids)} tokens are more than the context of {config.block_size}; shorten them")
    x = torch.full((options.num_samples, config.block_size), model.mask_id, device=device)
    x[:, :len(ids)] = torch.tensor(ids, dtype=torch.int64, device=device)
    draws = torch.Generator().manual_seed(options.seed)
    out = generate(model, x, options.steps, temperature=options.temperature, generator=draws).tolist()
    for row in out:
        print(tokenizer.decode(row[:len(ids)] if options.infill else row))
    return 0


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
