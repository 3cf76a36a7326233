"""Which settings of the sampler do something in a text. Those that do not are refused."""

from typing import Any, NamedTuple

from support import abilities, flags

QUICK_STEPS = 8  # calls, for each block, that draw the fills which compare lengths


class Task(NamedTuple):
    """Texts that are written with the same settings."""

    settings: Any  # sample.SamplerSettings without "auto"
    model: Any
    chunks: list  # of sample.Chunk: in which parts the texts are written
    has_given_text: bool = True
    is_quick: bool = False  # fills of [___] that are only ranked: few calls, no corrections
    draws_length: bool = False  # of a document


def is_random(task):
    """Whether texts depend on the seed, but for ties."""
    settings = task.settings
    in_turn = settings.order in ("spread", "ancestral", "random") and chooses(task)
    sweeps = settings.redraw == "sweep" and corrects(task)
    return not is_greedy(settings) or in_turn or sweeps or task.draws_length


def is_greedy(settings):
    return settings.temperature == 0 or settings.top_k == 1


def is_one_by_one(task):
    """Whether no chunk has several tokens, whatever the text."""
    is_ar = abilities.is_causal(task.model)
    return is_ar or all(len(chunk.at) == 1 for chunk in task.chunks)


def has_several(task):
    """Whether some chunk of a text has several tokens to fill, which calls can share."""
    if abilities.is_causal(task.model):
        return False
    return any((chunk.gaps.sum(1) > 1).any() for chunk in task.chunks)


def chooses(task):
    """Whether there is a choice of what to reveal first."""
    return has_several(task) and any((chunk.reveals > 1).any() for chunk in task.chunks)


def corrects(task):
    return any(chunk.corrections.any() for chunk in task.chunks)


def rules_of(task):
    """The rules of flags.check_effects for the settings of a task."""
    names = "order correct redraw spacing steps block temperature top_k top_p cfg seed"
    draws = any(chunk.gaps.any() for chunk in task.chunks)
    ranked = "where texts of a list are ranked and nothing is drawn; leave it out"
    return [(names, draws, ranked), *rules_of_calls(task), *rules_of_draws(task)]


def rules_of_calls(task):
    """Of the settings that say how many calls there are, and what each draws."""
    settings, model, chunks = task[:3]
    several = has_several(task)
    is_in_turn = settings.order in ("left_to_right", "ancestral")  # as it is with single tokens
    length = chunks[-1].at.stop
    alone = "where tokens are filled one at a time; leave it out"
    least, fix = settings.block, f"in a text of {length} tokens; leave it out, or give less"
    if abilities.is_causal(model):
        alone = "with an autoregressive model, which draws a token in each call; leave it out"
        least, fix = model.config.block_size + 1, "in a text within the context; leave it out"
    quick = "where fills of [___] are ranked, which few calls draw;"
    most = QUICK_STEPS * model.objective.n_texts
    all_at_once = "where one call draws all; leave it out, or give more --steps"
    no_call = "where no call draws tokens again; leave it out, or raise --correct or --steps"
    return [
        ("order", several or is_in_turn, alone),
        ("threshold entropy_bound", several, alone),
        ("correct redraw spacing", several, alone),
        ("steps", several or not is_one_by_one(task), alone),  # at most so many, otherwise
        (
            "correct redraw spacing",
            not task.is_quick,
            f"{quick} leave it out, or give --num_samples",
        ),
        ("steps", not task.is_quick or settings.steps <= most, f"{quick} give at most {most}"),
        ("order", chooses(task) or settings.order == "one_shot" or not several, all_at_once),
        ("threshold entropy_bound", chooses(task) or not several, all_at_once),
        ("redraw spacing", corrects(task), no_call),
        ("block", length >= least, fix),
        ("block", sum(chunk.gaps.sum() for chunk in chunks) > 1, alone),
    ]


def rules_of_draws(task):
    """Of the settings that say which token is drawn."""
    settings = task.settings
    V = task.model.vocab_size
    few = f"as there are {V} tokens in all; leave it out, or give less"
    nothing = "without a given text that guides; give some, or leave it out"
    return [
        ("top_k top_p", settings.temperature > 0, "at --temperature=0; leave one of them out"),
        ("temperature top_p", settings.top_k != 1, "with --top_k=1; leave one of them out"),
        ("top_k", settings.top_k <= V, few),
        ("cfg", task.has_given_text, nothing),
        ("seed", is_random(task), "where nothing is random; leave it out"),
    ]


def check(given, tasks):
    """Raise UserError for one of the settings `given` that does nothing in any of the tasks.

    tasks is only read as far as it takes: it may be a generator.
    """
    left = dict.fromkeys(given)
    first = []
    for task in tasks:
        rules = rules_of(task)
        first = first or rules
        idle = {name for names, has_effect, _ in rules if not has_effect for name in names.split()}
        left = [name for name in left if name in idle]
        if not left:
            return
    flags.check_effects(left, first)


def essence(task):
    """What decides the texts of a task: equal ones write the same."""
    idle = {name for names, works, _ in rules_of(task) if not works for name in names.split()}
    if not chooses(task):
        idle.add("order")
    if is_greedy(task.settings):
        idle.add("temperature")
    shared = ("order", "threshold", "entropy_bound", "redraw", "spacing")
    shared += ("temperature", "top_k", "top_p", "cfg", "seed")
    decides = {name: getattr(task.settings, name) for name in shared if name not in idle}
    plan = [(c.at, c.first, c.reveals.tolist(), c.corrections.tolist()) for c in task.chunks]
    return decides, is_greedy(task.settings), plan
