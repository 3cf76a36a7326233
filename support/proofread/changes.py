"""What proofreading changes in a text, and where."""

from typing import NamedTuple

from nanomdlm.support.proofread.races import Edit
from nanomdlm.support.proofread.tokens import bytes_of


class Change(NamedTuple):
    """A change that proofreading makes in a text.

    position: of the first character that is changed, from 0; line and column: the same, from 1
    kind: substitution, insertion, deletion or swap; several near each other are a substitution
    gain: nats by which the text becomes likelier, see `Proofreader.decide`
    p_before, p_after: probability of the old token, and of the new one,
        masked as it was found; None if there is none, or several
    """

    position: int
    line: int
    column: int
    kind: str
    before: str
    after: str
    gain: float
    p_before: float | None
    p_after: float | None


class Part(NamedTuple):
    """A part of a text: what was there, what is there now, and the Change (None: it is kept)."""

    before: str
    after: str
    change: Change | None = None


def compare(text, position, original, done, edits):
    """Yield the Parts of a window.

    text, position: the whole text, and where in it the window begins
    original, done: Tokens of the window before and after; edits: [(key, Edit), ...], as
        `Proofreader.correct` returns them
    """
    first = original[0].number
    low = first - 1  # number of the last token that was kept
    kept = new = b""
    for token in [*done, None]:
        if token and token.is_changed:
            new += bytes_of([token])
            continue
        number = token.number if token else original[-1].number + 1
        old = bytes_of(original[low + 1 - first : number - first])
        if old == new:
            kept += old
        else:
            kept = kept.decode()
            if kept:
                yield Part(kept, kept)
            position += len(kept)
            old, kept = old.decode(), b""
            near = [edit for key, edit in edits if low < key < number]
            yield Part(old, new.decode(), change(text, position, old, new.decode(), near))
            position += len(old)
        new = b""
        low = number
        kept += bytes_of([token] if token else [])
    if kept:
        yield Part(kept.decode(), kept.decode())


def change(text, position, before, after, edits):
    """The Change of one or several Edits at a position of a text."""
    only = edits[0] if len(edits) == 1 else Edit(0, 0, (), "substitution")
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    gain = sum(edit.gain for edit in edits)
    said = (only.kind, before, after, gain, only.p_before, only.p_after)
    return Change(position, line, column, *said)
