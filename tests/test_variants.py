"""The seam of the objective: a variant in a file of its own can distill, and rewrite its texts."""

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.variants.variant import Variant

V = 11
T = 12


class Distilled(Variant):
    """Texts are turned around, and the network is drawn to a frozen teacher's predictions."""

    def __init__(self, inner, teacher):
        super().__init__(inner)
        self.teacher = teacher
        self.seen = []

    def texts(self, x0, step, samples):
        self.seen.append(x0.flip(1))
        return self.seen[-1]

    def loss(self, network, batch):
        with torch.no_grad():
            taught = self.teacher(batch.view).log_softmax(-1)  # (n, V)
        learned = network(batch.view).log_softmax(-1)
        divergence = F.kl_div(learned, taught, log_target=True, reduction="none").sum(1)
        return self.inner.loss(network, batch) + 20 * (divergence * batch.weights).sum()


def new_run(**settings):
    settings = dict(n_layer=1, n_head=2, n_embd=32, block_size=T, batch_size=8) | settings
    settings |= dict(
        dropout=0.0, optimizer="adamw", learning_rate=0.01, ema=0.0, max_steps=60, warmup_steps=0
    )
    config = mdlm.Config(**settings)
    g = torch.Generator().manual_seed(3)
    text = torch.randint(V, (64, T), generator=g)
    corpus = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab_size=V, end_id=None),
        mean_length=float(T),
        batch=lambda numbers: (text[numbers % 64], torch.full((len(numbers),), T)),
    )
    device = torch.device("cpu")
    return mdlm.make_run(
        config, corpus, mdlm.devices.Machine(device, torch.float32, kernels.REFERENCES)
    ), text


def distance(a, b, text):
    """The mean divergence of two networks' predictions where half of the tokens are masked."""
    xt = text.clone()
    xt[:, ::2] = V
    with torch.no_grad():
        p, q = (m(m.objective.view(xt)).log_softmax(-1) for m in (a, b))
    return F.kl_div(p, q, log_target=True, reduction="none").sum(-1).mean().item()


def test_a_variant_can_distill_a_teacher_and_rewrite_texts():
    run, text = new_run()
    teacher, _ = new_run(seed=1)
    teacher = copy.deepcopy(teacher.model).eval()
    for p in teacher.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(5))
    run.model.objective = Distilled(run.model.objective, teacher)
    frozen = [p.clone() for p in teacher.parameters()]
    trained = set(run.model.state_dict())
    before = distance(run.model, teacher, text)
    alone, _ = new_run()
    for step in range(60):
        for each in (run, alone):
            mdlm.train_step(each, step, 0.5)
            each.step += 1
    after = distance(run.model, teacher, text)
    assert after < 0.8 * before, "the student is nearer to its teacher"
    assert after < 0.8 * distance(alone.model, teacher, text), "which text alone does not teach"
    assert all(torch.equal(*pair) for pair in zip(frozen, teacher.parameters(), strict=True))
    assert set(run.model.state_dict()) == trained, "a checkpoint has no teacher"
    # What was masked and predicted are the rewritten texts.
    assert torch.equal(run.objective.seen[0], text[:8].flip(1))
    samples = torch.arange(8)
    x0, counts, *key = mdlm.draw_batch(run, 0, 0.0, samples)
    batch = run.objective.batch(run.model.ops, x0, counts, *key)
    assert torch.equal(batch.targets, text[:8].flip(1).flatten()[batch.at])


def test_the_evaluation_of_a_variant_with_another_loss_stays_the_bound():
    run, text = new_run()
    plain = mdlm.evaluate(run.model, text)
    run.model.objective = Distilled(run.model.objective, run.model)
    assert mdlm.evaluate(run.model, text) == plain
