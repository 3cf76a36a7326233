"""A model that mdlm trained, for Hugging Face transformers: load it with trust_remote_code=True.

MDLMForMaskedLM sees a text in which some tokens are [MASK], and predicts every position at once.
"""

import math  # noqa: F401 (the model uses it)
from collections.abc import Callable  # noqa: F401 (the model uses it)
from types import SimpleNamespace
from typing import Any, NamedTuple  # noqa: F401 (the model uses it)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor  # noqa: F401 (the model uses it)
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

Dropout = nn.Dropout
# export.py puts their source here:
Model = View = view_of_documents = masked_share = rotary_tables = None
attention_ref = norm_conv_ref = None


class MDLMConfig(PretrainedConfig):
    """Settings of mdlm, with its names. vocab_size counts [MASK] and [PAD], the last two ids."""

    model_type = "mdlm"


class MDLMForMaskedLM(PreTrainedModel):
    config_class = MDLMConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        ops = SimpleNamespace(attention=attention_ref, norm_conv=norm_conv_ref)
        self.model = Model(config, config.vocab_size - 2, ops)
        # Documents of known lengths: [END] is given, and each sees itself alone.
        self.has_documents = config.end_id >= 0 and not config.prompt_column
        self.pad_id = config.end_id if self.has_documents else self.model.mask_id
        self.post_init()

    def _init_weights(self, module):
        if module is self.model:  # transformers makes modules without numbers, and loads weights
            D = 2 * module.cos.shape[1]
            for table, numbers in zip((module.cos, module.sin), rotary_tables(len(module.cos), D)):
                table.copy_(numbers)

    def predict(self, ids):
        """(n, T) ids, without padding -> (n, T, V) logits."""
        T = ids.shape[1]
        room = self.config.block_size - T
        if room < 0:
            raise ValueError(f"{T} tokens are more than the context of {self.config.block_size}")
        if self.config.pad_to_context:
            ids = F.pad(ids, (0, room), value=self.pad_id)
        return self.model(self.view(ids))[:, :T]

    def view(self, ids):
        """What the model is shown of ids (n, T)."""
        view = View(ids, torch.arange(ids.shape[1], device=ids.device))
        if self.has_documents:
            view = view_of_documents(view, self.config.end_id, self.config.pos != "rope")
        if self.config.time_conditioning:
            text = ids != self.config.end_id
            view = view._replace(rate=masked_share(ids == self.model.mask_id, text, view.sees))
        return view

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, labels=None, return_dict=True
    ):
        """(B, T) ids -> logits (B, T, vocab_size), and with labels (B, T) their mean cross-entropy.

        attention_mask (B, T): 0 for padding; [PAD] is padding too. A padded row gives what it gives
        without its padding. Labels of -100 are not scored.
        """
        keep = input_ids != self.config.pad_token_id
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError("attention_mask must be (B, T), as input_ids: 1, or 0 for padding")
            keep = keep & attention_mask.bool()
        if position_ids is not None and ((position_ids - keep.cumsum(1) + 1) * keep).any():
            raise ValueError("position_ids must be 0, 1, 2 ... of what is no padding, or left out")
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size, device=input_ids.device)
        length = keep.sum(1)
        for n in length.unique().tolist():
            at = keep & (length == n)[:, None]
            if n:
                found = self.predict(input_ids[at].view(-1, n)).flatten(0, 1)
                logits[at] = F.pad(found, (0, 2)).to(logits.dtype)
        logits[..., -2:] = -1e4  # finite, and after division by a temperature too
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()
