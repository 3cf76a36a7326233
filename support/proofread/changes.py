"""What proofreading changes in a text, and where."""

from typing import NamedTuple

from nanomdlm.support.proofread.races import Edit


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


class Place:
    """Follows a text: its characters, lines and columns."""

    def __init__(self):
        self.position = 0
        self.line = 1
        self.column = 1

    def after(self, text):
        """Go on to the end of a text."""
        self.position += len(text)
        lines = text.count("\n")
        self.line += lines
        self.column = len(text) - text.rfind("\n") if lines else self.column + len(text)

    def compare(self, original, done, edits):
        """Parts of the `original` tokens of a window and of what is `done`; edits: with keys."""
        parts = []
        kept = b""
        old = new = b""  # since the last token that was kept
        at = 0
        low = original[0].number - 1
        for token in [*done, None]:
            is_kept = token is None or not token.is_changed
            if not is_kept:
                new += token.lead + token.own
                continue
            number = original[-1].number + 1 if token is None else token.number
            while at < len(original) and original[at].number < number:
                old += original[at].lead + original[at].own
                at += 1
            if old != new:
                if kept:
                    parts.append(self.kept(kept))
                    kept = b""
                near = [edit for key, edit in edits if low < key < number]
                parts.append(self.change(old.decode(), new.decode(), near))
            else:
                kept += old
            old = new = b""
            if token is not None:
                kept += token.lead + token.own
                at += 1
                low = number
        if kept:
            parts.append(self.kept(kept))
        return parts

    def kept(self, text):
        text = text.decode()
        self.after(text)
        return Part(text, text)

    def change(self, before, after, edits):
        """A Part that is changed; text that both have at their ends is not a part of the Change."""
        only = edits[0] if len(edits) == 1 else Edit(0, 0, (), "substitution")
        gain = sum(edit.gain for edit in edits)
        where = (self.position, self.line, self.column)
        self.after(before)
        said = (only.kind, before, after, gain, only.p_before, only.p_after)
        return Part(before, after, Change(*where, *said))
