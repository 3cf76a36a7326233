"""studies/questions.py: the questions have the answers that it says, and it counts right ones."""

import re

import pytest

from nanomdlm.support.cli import entry
from studies import questions


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    at = tmp_path_factory.mktemp("questions") / "qa.jsonl"
    assert entry.run(questions.main, ["write", f"--dest={at}", "--records=400", "--seed=3"]) == 0
    return at


def test_answers_are_right_and_new(data):
    pairs = questions.read(data)
    assert len(pairs) == 400 and set(map(questions.kind_of, dict(pairs))) == {
        *questions.KINDS.values()
    }
    ways = [
        (r"Reverse (\w+)\.", lambda word: word[::-1]),
        (r"Upper case: (\w+)\.", str.upper),
        (r"How long is (\w+)\?", lambda word: questions.NUMBERS[len(word)]),
        (
            r"What is (\w+) plus (\w+)\?",
            lambda *two: questions.NUMBERS[sum(map(questions.NUMBERS.index, two))],
        ),
    ]
    for question, answer in pairs:
        [(match, way)] = [
            (m, way) for pattern, way in ways if (m := re.fullmatch(pattern, question))
        ]
        assert way(*match.groups()) == answer
    kept = questions.unseen(pairs)
    learned = " ".join(question for question, _ in pairs[:360])
    for kind, some in kept.items():
        assert some
        assert kind == "sums" or not any(
            re.search(rf"\b{q.split()[-1][:-1]}\b", learned) for q, _ in some
        )
