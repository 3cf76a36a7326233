"""Proofreading: finds tokens that do not belong in a text, without marks, and corrects them.

A text is read window by window, in four steps.

1. Doubt. Each token is masked once, alone and with the next two, many per call: if a token is
   missing, each of its neighbors looks right, but no other token would fit between them.
2. Propose, if these probabilities make it likely enough, another token; for characters and bytes
   also an insertion, a deletion, a swap of two, or the deletion of the second of two equal words.
3. Prune. Edits near each other, and the original, are rivals in a Race. Each is a text for the
   region from the first of them to REACH tokens after the last. Its log p, given all other tokens,
   is computed for a third of its tokens at a time. It can only fall, so a rival is dropped when it
   is certain to stay far behind the best.
4. Decide. The remaining rivals race again, token by token: log p(the region | all other tokens) by
   the chain rule. (Other regions of the same call are masked too, at least APART tokens away.) The
   gain of an edit over the original, minus its cost by the prior of mistakes, are its log-odds. An
   edit that turns a name, or words that occur elsewhere in the text, into words unknown to it costs
   more: names are rarely misspelled twice in the same way. If the edits near each other are
   together likelier than no mistake, the best of them is kept.

Proposals near a change race again, because a mistake next to it is then easier to see. Regions that
are far apart share calls. Nothing else is changed: a text without doubtful tokens comes back byte
for byte. Measurements: results/proofreading.md.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from nanomdlm.support import abilities
from nanomdlm.support.cli.python_arguments import check_tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.model_calls import device_of, logits_at
from nanomdlm.support.proofread.changes import Part, compare
from nanomdlm.support.proofread.mistakes import Prior
from nanomdlm.support.proofread.races import REACH, Edit, Race, one_by_one, thirds
from nanomdlm.support.proofread.tokens import Cutter, Token, begins, finished, is_whole, text_of
from nanomdlm.support.run.calibration import calibrated

STRIDE = 8  # doubt: a call masks single tokens at this distance
RUN = 3  # and runs of this many tokens,
RUN_STRIDE = 12  # at this distance
NEAR = 4  # tokens: edits at most so far apart are accounts of one mistake
RACE_LENGTH = 8  # tokens over which the edits of a race begin
APART = 6  # tokens between regions that share a call
PRUNE = 5.0  # nats that a rival may be behind the best, as estimated by thirds
SLACK = 3.0  # the same by the chain rule
ROUNDS = 3  # of a window: a repaired mistake makes others near it easier to see
# Nats that proposals need of log p, alone or at the beginning of a run of masks. A substitution:
# its gain alone, beyond its cost; a deletion: alone, and half of that of the run; a swap: of both
# tokens alone, and of the run; an insertion: of the tokens before and after it alone, and of the
# run after it, and of what would be there.
SUBSTITUTE = -3.0
DELETE = -4.0
SWAP = -10.0
INSERT = -5.0
INSERTED = -1.5
UNKNOWN_COST = 6.0  # nats more for an edit of a name, or of words found elsewhere, to unknown words
NAME_LOGP = -8.0  # log p of a region that is enough to turn a name into a word not in the text
WORD_LENGTH = 64  # characters of a word, at each side of an edit, that are looked up
MAX_LOGITS = 1 << 24  # held at a time
WORD = re.compile(r"[^\W_]+")  # letters and digits
DOUBLED = re.compile(r"(?<![\w'’-])([^\W\d_]+)(\s+\1)(?![\w'’-])")  # the same word twice


class Fixed(NamedTuple):
    text: str
    changes: list  # of Change


def fix(model, tokenizer, text, caution=0.0):
    """Proofread a text: Fixed(the new text, the changes)."""
    parts = list(Proofreader(model, tokenizer, caution).parts(text))
    changes = [part.change for part in parts if part.change]
    return Fixed("".join(part.after for part in parts), changes)


def check_model(model, tokenizer):
    """Raise UserError for a model that cannot see the text on both sides of a token."""
    check_tokenizer(tokenizer, model)
    if abilities.is_causal(model) or model.objective.n_texts > 1 or model.config.prompt_column:
        raise UserError("proofreading needs a masked diffusion model that sees whole texts")


class Answers(NamedTuple):
    """For n masked positions: log p of the requested token, and the best other token.

    The latter is what was most probably meant if the requested token was written.
    """

    logp: list
    best: list
    best_logp: list


class Proofreader:
    """Corrects a text window by window.

    model, tokenizer: as mdlm.load returns them
    caution: nats that are added to the cost of every edit
    """

    def __init__(self, model, tokenizer, caution=0.0):
        check_model(model, tokenizer)
        self.model = calibrated(model)
        self.cutter = Cutter(tokenizer)
        self.prior = Prior(self.cutter.characters(), model.vocab_size)
        self.caution = caution
        self.barred = self.cutter.barred(model.vocab_size)
        self.mask = model.mask_id
        L = self.context = model.config.block_size
        self.margin = L // 8  # tokens before what a window corrects; a few less are after it,
        self.spare = -(-self.margin // 4)  # as insertions need room
        self.stride = max(1, L - 2 * self.margin)
        self.words = Words()
        self.judged = None  # a list: gets (number of the token, Edit) of all that was judged

    # ---- Windows
    def parts(self, text) -> Iterator[Part]:
        """Yield the Parts of a text; those of a window as soon as it is corrected."""
        self.words = Words(text)
        tokens = list(self.cutter.tokens(text))
        at = position = 0
        before = []  # corrected tokens
        while at < len(tokens):
            ahead = tokens[at : at + self.stride + self.margin - self.spare]
            last = ahead[: self.stride][-1].number
            begin = len(before)
            end = begin + len(ahead[: self.stride])
            window, edits = self.correct(before + ahead, begin, end)
            done = finished(window[begin:], last)
            last = max([last, *(token.number for token in done if token.number is not None)])
            n = sum(token.number <= last for token in ahead)
            for part in compare(text, position, ahead[:n], done, edits):
                position += len(part.before)
                yield part
            at += n
            before = (before + done)[-self.margin :] if self.margin else []

    def correct(self, window, begin, end):
        """Correct the tokens begin..end of a window: (its tokens, [(key, Edit), ...]).

        A key is half more than the number of the token before an edit.
        """
        made = []
        near = None  # in later rounds: only what is near a change
        for _ in range(ROUNDS):
            # Insertions may exceed the context.
            ids = [token.id for token in window[: self.context - self.spare]]
            if near is None:
                proposed = self.propose(ids, window, begin, min(end, len(ids)))
            room = self.context - len(ids)
            some = [e for e in proposed if e.stop <= len(ids) and e.growth <= room]
            edits, ahead = self.decide(ids, some)
            if self.judged is not None:
                last = len(window) - 1
                self.judged += [(window[min(edit.start, last)].number, edit) for edit in edits]
            edits = self.best_apart(window, edits)
            if not edits:
                break
            window, end, near = self.apply(window, end, edits, made)
            proposed = [edit for edit in moved(ahead, edits) if edit.start in near]
        return window, made

    # ---- What the network says
    @torch.no_grad()
    def ask(self, rows, row, at, asked):
        """Answers at n masked positions.

        rows: texts of at most a context, as lists of ids
        row, at: the row and position of each; asked: the id of each (-1: only the best one)
        """
        answers = Answers([], [], [])
        if not row:
            return answers
        pad = self.model.objective.pad_id
        x = torch.tensor([ids + [pad] * (self.context - len(ids)) for ids in rows])
        questions = torch.tensor([row, at, asked])
        for row, at, asked in questions.split(max(1, MAX_LOGITS // self.model.vocab_size), 1):
            used, row = row.unique(return_inverse=True)
            logits = logits_at(self.model, x[used], row, at, device_of(self.model))
            score = logp = logits.float().log_softmax(-1)
            given = asked.clamp(min=0)
            if self.prior.wrong is not None:
                score = logp + self.prior.wrong[:, given].T.float() * (asked >= 0)[:, None]
            is_asked = torch.arange(logp.shape[1]) == asked[:, None]
            best = score.masked_fill(is_asked | self.barred, -math.inf).argmax(1)
            answers.logp.extend(logp.gather(1, given[:, None])[:, 0].tolist())
            answers.best.extend(best.tolist())
            answers.best_logp.extend(logp.gather(1, best[:, None])[:, 0].tolist())
        return answers

    # ---- 1. Doubt
    def masked_once(self, ids, where, every, run):
        """Answers for the tokens at `where`, each the first of a run of masks, of which there is
        one every so many tokens."""
        rows = [
            [self.mask if (i - phase) % every < run else id for i, id in enumerate(ids)]
            for phase in range(every)
        ]
        return self.ask(rows, [i % every for i in where], where, [ids[i] for i in where])

    # ---- 2. Propose
    def propose(self, ids, window, begin, end):
        """The Edits that may repair a token of begin..end of a window."""
        where = [i for i in range(begin, end) if ids[i] != self.mask]
        alone = self.masked_once(ids, where, STRIDE, 1)
        in_run = self.masked_once(ids, where, RUN_STRIDE, RUN).logp
        logp = dict(zip(where, alone.logp))
        edits = []
        seams = []  # places at which a token may be missing
        for i, best, best_logp, run in zip(where, alone.best, alone.best_logp, in_run):
            old = ids[i]
            p = math.exp(logp[i])
            cost = self.prior.substitution(old, best)
            single = best_logp - logp[i]
            if is_whole(window[i]) and single - cost > SUBSTITUTE:
                new = dict(single=single, p_before=p, p_after=math.exp(best_logp))
                edits.append(Edit(i, i + 1, (best,), "substitution", cost, **new))
            if not self.cutter.by_character:
                continue
            if is_whole(window[i]) and logp[i] + run / 2 < DELETE:
                cost = self.prior.deletion(old, ids[max(0, i - 1) : i] + ids[i + 1 : i + 2])
                edits.append(Edit(i, i + 1, (), "deletion", cost, p_before=p))
            is_pair = i + 1 in logp and ids[i + 1] != old and all(map(is_whole, window[i : i + 2]))
            if is_pair and logp[i] + logp[i + 1] + run < SWAP:
                edits.append(Edit(i, i + 2, (ids[i + 1], old), "swap", self.prior.each))
            if begins(window[i]) and logp.get(i - 1, 0.0) + logp[i] + run < INSERT:
                seams.append(i)
        if self.cutter.by_character:
            edits += self.doubled(ids, begin, end)
        return edits + self.filled(ids, seams if len(ids) < self.context else [])

    def doubled(self, ids, begin, end):
        """Deletions of words that are there twice, within begin..end."""
        characters = self.cutter.characters()
        text = "".join("\0" if id == self.mask else characters[id] for id in ids)
        if self.cutter.tokenizer.kind == "byte":
            text = re.sub(r"[^\0-\x7f]", "0", text)  # parts of words that are not compared
        for match in DOUBLED.finditer(text):
            if begin <= match.start() and match.end() <= end:
                yield Edit(match.end(1), match.end(), (), "deletion", self.prior.each)

    def filled(self, ids, seams):
        """Insertions at `seams`, of the likeliest token at each."""
        rows, where = self.laid(ids, [(j, j, [self.mask]) for j in seams])
        row, at = zip(*where) if where else ((), ())
        answers = self.ask(rows, row, at, [-1] * len(at))
        return [
            Edit(j, j, (best,), "insertion", self.prior.each, p_after=math.exp(logp))
            for j, best, logp in zip(seams, answers.best, answers.best_logp)
            if logp > INSERTED
        ]

    def laid(self, ids, pieces):
        """(rows of ids in which pieces of other text are laid, (row, start) of each piece)

        pieces: [(start, stop, other)], in order: `other` takes the place of ids[start:stop].
        Those that are APART share a row, if it fits into the context.
        """
        rows = []  # (ids, the end in the text of those that are there)
        where = []
        for start, stop, other in pieces:
            growth = len(other) - (stop - start)
            fits = (
                start >= end + APART and len(row) + len(ids) - end + growth <= self.context
                for row, end in rows
            )
            k = next((k for k, does in enumerate(fits) if does), len(rows))
            if k == len(rows):
                rows.append(([], 0))
            row, end = rows[k]
            row += ids[end:start]
            where.append((k, len(row)))
            row += other
            rows[k] = (row, stop)
        return [row + ids[end:] for row, end in rows], where

    # ---- 3. Prune, and 4. decide
    def decide(self, ids, edits):
        """(the Edits that are not far behind the best of their place, with their gains, those that
        were ahead of what is there)"""
        races = self.race(ids, edits, thirds, PRUNE)
        ahead = [edit for race in races for edit in race.ahead()]
        left = [edit for race in races for edit in race.left()]
        races = self.race(ids, left, one_by_one, SLACK)
        return [edit for race in races for edit in race.left()], ahead

    def race(self, ids, edits, order, slack):
        """Races of Edits near each other, when they are decided."""
        places = []
        for edit in sorted(edits, key=lambda edit: edit.start):
            here = places[-1] if places else []
            if here and edit.start <= min(here[-1].start + NEAR, here[0].start + RACE_LENGTH):
                here.append(edit)
            else:
                places.append([edit])
        races = [Race(ids, place, self.mask, self.caution, order, slack) for place in places]
        while steps := [(race, seen) for race in races for seen in race.next()]:
            rows, where = self.laid(ids, [(race.start, race.stop, seen) for race, seen in steps])
            asked = [
                (rival, row, start + k, rival.text[k])
                for (race, seen), (row, start) in zip(steps, where)
                for rival in race.at(seen)
                for k in rival.go_on()
            ]
            rivals, *questions = zip(*asked)
            for rival, logp in zip(rivals, self.ask(rows, *questions).logp):
                rival.logp += logp
        return races

    # ---- What is kept
    def best_apart(self, window, edits):
        """The Edits that are kept, the best first, without those near a better one.

        An edit is kept if it and the edits near it, each another account of the same mistake, are
        together likelier than no mistake.
        """
        kept = []
        excess = {
            edit: edit.gain - edit.cost - self.caution - self.cost_of_words(window, edit)
            for edit in edits
        }
        starts = np.array([edit.start for edit in edits])
        odds = np.array(list(excess.values()))
        for edit in sorted(edits, key=lambda edit: (-excess[edit], edit.start)):
            far = (
                edit.start >= other.stop + REACH or other.start >= edit.stop + REACH
                for other in kept
            )
            near = abs(starts - edit.start) <= NEAR
            together = np.logaddexp.reduce(odds[near])
            if together > 0 and all(far) and self.is_readable(window, edit):
                kept.append(edit)
        return sorted(kept, key=lambda edit: edit.start)

    def cost_of_words(self, window, edit):
        """What more an edit costs that turns words of the text, or a name, into unknown ones."""
        before = text_of(window[max(0, edit.start - WORD_LENGTH) : edit.start])
        after = text_of(window[edit.stop : edit.stop + WORD_LENGTH])
        old, new = map(text_of, (window[edit.start : edit.stop], self.new_tokens(window, edit)))
        is_name, is_known = self.words.lost(before, old, new, after)
        if is_name and edit.logp < NAME_LOGP:
            return math.inf
        return UNKNOWN_COST if is_name or is_known else 0.0

    def is_readable(self, window, edit):
        """Whether the new text has the ids by which the edit was judged."""
        low = max(0, edit.start - 3)
        after = window[edit.stop : edit.stop + 3]
        new = [*window[low : edit.start], *self.new_tokens(window, edit), *after]
        old = [*window[low : edit.stop], *after]
        return self.cutter.reads_as(old) and self.cutter.reads_as(new)

    def new_tokens(self, window, edit):
        """The Tokens of an edit."""
        old = window[edit.start : edit.stop]
        first = old[0] if old else None
        tokens = [Token(id, self.cutter.written(id, first), is_changed=True) for id in edit.ids]
        for new, replaced in zip(tokens, old):
            new.lead = replaced.lead
            new.number = replaced.number
        return tokens

    def apply(self, window, end, edits, made):
        """(the window after the edits, its end, the places near a change); adds to `made`."""
        shift = 0
        near = set()
        window = list(window)
        for edit in edits:
            start = edit.start + shift
            new = self.new_tokens(window, edit._replace(start=start, stop=edit.stop + shift))
            known = [token.number for token in window[:start] if token.number is not None]
            made.append((max(known, default=-1) + 0.5, edit))
            window[start : edit.stop + shift] = new
            near.update(range(start - REACH, start + len(new) + REACH))
            shift += edit.growth
        return window, end + shift, near


def moved(edits, made):
    """Edits of the text after others were made; without those that touch them."""
    return [
        edit._replace(start=edit.start + shift, stop=edit.stop + shift)
        for edit in edits
        if all(edit.stop < other.start or other.stop < edit.start for other in made)
        for shift in [sum(other.growth for other in made if other.stop < edit.start)]
    ]


# ---- Names and repetitions
class Words:
    """How often each word occurs in a text, in upper or lower case."""

    def __init__(self, text=""):
        self.counts = Counter(WORD.findall(text.lower()))

    def has_elsewhere(self, words):
        """Whether each of these words, which a place of the text has, occurs at another one too."""
        return all(self.counts[word] > n for word, n in Counter(words).items())

    def lost(self, before, old, new, after):
        """(whether an edit turns a name into unknown words, whether words that are elsewhere too)

        before, after: the text around the edit, which turns the text `old` into `new`
        """
        lead, begin = re.fullmatch(r"(.*?)([^\W_]*)", before, re.DOTALL).groups()
        end = re.match(r"[^\W_]*", after)[0]
        old, new = (WORD.findall(begin + text + end) for text in (old, new))
        while old and new and old[0].lower() == new[0].lower():
            old, new = old[1:], new[1:]
        while old and new and old[-1].lower() == new[-1].lower():
            old, new = old[:-1], new[:-1]
        if not old or all(self.counts[word.lower()] for word in new):
            return False, False
        is_name = all(looks_like_a_name(words[0], lead.rstrip(" ")) for words in (old, new))
        return is_name, self.has_elsewhere([word.lower() for word in old])


def looks_like_a_name(word, before):
    """Whether a word after other text is in capitals, or begins with one within a sentence."""
    is_within = before[-1:].isalnum() or before.endswith(",")
    return len(word) > 1 and word[0].isupper() and (word.isupper() or is_within)
