"""--prompt_column: prompts are given, and their answers are learned.

[END] follows a prompt. It is never masked, so the network always sees where the answer begins.
"""

from dataclasses import dataclass

import torch.nn.functional as F

from .documents import GivenTokens

REFUSED = dict(
    documents="an answer continues until its [END], so its length is learned",
    rates="prompts need the default's masks and weights",
)


@dataclass
class Settings:
    """Prompts and answers."""

    prompt_column: str = ""  # column of prompts, which are given; --text_column is learned
    chat_column: str = ""  # column of conversations; only the assistant's messages are learned


FLAG = "prompt_column"


def wrap(objective, end_id, mean_length):
    return objective if end_id is None else Prompts(objective, end_id, mean_length)


class Prompts(GivenTokens):
    """A prompt and its answer in each window; everything after the first [END] is predicted."""

    def scored_mask(self, x0):
        is_end = x0[:, :-1] == self.end_id
        return F.pad(is_end, (1, 0)).cumsum(1) > 0  # from the token after the first [END] on
