"""A model that mdlm trained, for Hugging Face transformers: load it with trust_remote_code=True.

MDLMForMaskedLM sees a text in which some tokens are [MASK], and predicts every position at once.
MDLMForCausalLM, of a run with --objective=ar, predicts the next token.
"""

import math  # noqa: F401 (the model uses it)
from collections.abc import Callable  # noqa: F401 (the model uses it)
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple  # noqa: F401 (the model uses it)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor  # noqa: F401 (the model uses it)
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput

Dropout = nn.Dropout
Embedding = nn.Embedding
# export.py puts their source here:
Model = View = view_of_documents = masked_fraction = rotary_tables = None
attention_ref = norm_conv_ref = told_rate = with_positions = None

NEVER = -1e4  # the logit of [MASK] and [PAD]: finite, and after division by a temperature too


class MDLMConfig(PretrainedConfig):
    """Settings of mdlm, with its names. vocab_size is that of the tokenizer: [MASK] (mask_token_id)
    and [PAD] (the next id) count, and so do tokens that were added later."""

    model_type = "mdlm"


class MDLMForMaskedLM(PreTrainedModel):
    config_class = MDLMConfig
    base_model_prefix = "model"
    output = MaskedLMOutput
    # With tie_word_embeddings:
    _tied_weights_keys: ClassVar = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        ops = SimpleNamespace(attention=attention_ref, norm_conv=norm_conv_ref)
        network = told_rate(Model) if config.time_conditioning else Model
        if config.pos != "rope":
            network = with_positions(network)
        self.model = network(config, config.mask_token_id, ops)
        # transformers expects a row for each id, in both. Those of [PAD], and the head's of [MASK],
        # are never read.
        self.model.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.model.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # Documents of known lengths: [END] is given, and each sees itself alone.
        self.has_documents = config.end_id >= 0 and not config.prompt_column
        self.pad_id = config.end_id if self.has_documents else self.model.mask_id
        self.post_init()

    def _init_weights(self, module):
        if module is self.model:  # transformers makes modules without numbers, and loads weights
            D = 2 * module.cos.shape[1]
            for table, numbers in zip((module.cos, module.sin), rotary_tables(len(module.cos), D)):
                table.copy_(numbers)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if self.config.tie else 1)
        elif module is self.model.head and not self.config.tie:
            nn.init.zeros_(module.weight)

    def get_input_embeddings(self):
        return self.model.embed

    def set_input_embeddings(self, value):
        self.model.embed = value

    def get_output_embeddings(self):
        return self.model.head

    def set_output_embeddings(self, value):
        self.model.head = value

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        """As in transformers. Added tokens follow [PAD], and are predicted like others.

        Raises ValueError if [MASK] or [PAD] would lose its row.
        """
        least = self.model.mask_id + 2
        if new_num_tokens is not None and new_num_tokens < least:
            raise ValueError(
                f"new_num_tokens is {new_num_tokens}, but [MASK] and [PAD] are the ids {least - 2} "
                f"and {least - 1}: give {least} or more"
            )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def predict(self, ids, output_hidden_states=False):
        """(n, T) ids, without padding -> (n, T, vocab_size) logits, and the hidden states."""
        T = ids.shape[1]
        room = self.config.block_size - T
        if room < 0:
            raise ValueError(f"{T} tokens are more than the context of {self.config.block_size}")
        if self.config.pad_to_context:
            ids = F.pad(ids, (0, room), value=self.pad_id)
        hidden = []  # what each layer reads
        layers = self.model.layers if output_hidden_states else []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0][:, :T]))
            for layer in layers
        ]
        # Weights of less precision compute as in training with --dtype: tables of positions and the
        # mask rate stay float32.
        precision = nullcontext()
        if self.dtype != torch.float32:
            precision = torch.autocast(ids.device.type, self.dtype)
        try:
            with precision:
                h = self.model.features(self.view(ids))
        finally:
            for hook in hooks:
                hook.remove()
        if output_hidden_states:
            hidden.append(h[:, :T])  # what the head reads
        V = self.model.mask_id
        W = self.model.head.weight
        logits = F.pad(F.linear(h, W[:V]).float(), (0, 2), value=NEVER)
        if len(W) > V + 2:  # added tokens
            logits = torch.cat((logits, F.linear(h, W[V + 2 :]).float()), -1)
        return logits[:, :T], *hidden

    def view(self, ids):
        """What the model is shown of ids (n, T)."""
        view = View(ids, torch.arange(ids.shape[1], device=ids.device))
        if self.has_documents:
            view = view_of_documents(view, self.config.end_id, self.config.pos != "rope")
        if self.config.time_conditioning:
            text = ids != self.config.end_id
            view = view._replace(rate=masked_fraction(ids == self.model.mask_id, text, view.sees))
        return view

    def forward(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """(B, T) ids -> logits (B, T, vocab_size), and with labels (B, T) their mean cross-entropy.

        attention_mask (B, T): 0 for padding; [PAD] is padding too. A padded row gives what it gives
        without its padding. Labels of -100 are not scored; the loss is 0 if none is scored. [PAD]
        with another token's label is not padding, but a collator's random id: it is read as [MASK],
        and so is an [END] that is given (documents of known lengths, prompts).

        output_hidden_states: n_layer + 1 of (B, T, n_embd): what each layer reads, then what the
        head reads. token_type_ids and use_cache have no effect: there are no segments, and the
        whole text is computed at each call.

        Raises ValueError for more tokens than the context, and for the arguments that it names.
        """
        pad_id = self.config.pad_token_id
        if labels is not None:
            input_ids = self.without_random(input_ids, labels)
        keep = input_ids != pad_id
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError("attention_mask must be (B, T), as input_ids: 1, or 0 for padding")
            keep = keep & attention_mask.bool()
        if labels is not None and (labels[~keep] != -100).any():
            raise ValueError("labels must be -100 where attention_mask is 0: padding is not scored")
        if position_ids is not None and ((position_ids - keep.cumsum(1) + 1) * keep).any():
            raise ValueError("position_ids must be 0, 1, 2 ... except at padding, or left out")
        config = self.config
        if output_attentions if output_attentions is not None else config.output_attentions:
            raise ValueError("output_attentions is not possible: leave it out")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        sizes = [config.vocab_size]
        if output_hidden_states:
            sizes += [config.n_embd] * (config.n_layer + 1)
        dtypes = [torch.float32] + [self.dtype] * len(sizes[1:])
        outputs = [
            torch.zeros(*input_ids.shape, size, dtype=dtype, device=input_ids.device)
            for size, dtype in zip(sizes, dtypes)
        ]
        outputs[0][..., self.model.mask_id : self.model.mask_id + 2] = NEVER
        length = keep.sum(1)
        for n in length.unique().tolist():
            at = keep & (length == n)[:, None]
            if n:
                predicted = self.predict(input_ids[at].view(-1, n), output_hidden_states)
                for output, part in zip(outputs, predicted, strict=True):
                    output[at] = part.flatten(0, 1).to(output.dtype)
        logits, *hidden = outputs
        loss = None
        if labels is not None:
            targets = self.targets(labels)
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = total / (targets != -100).sum().clamp(min=1)
        hidden = tuple(hidden) if output_hidden_states else None
        output = self.output(loss=loss, logits=logits, hidden_states=hidden)
        if return_dict is None:
            return_dict = config.return_dict
        return output if return_dict else output.to_tuple()

    def targets(self, labels):
        """(B, T) what each position should predict."""
        return labels

    def without_random(self, input_ids, labels):
        """input_ids with [MASK] for random ids that are not part of a text. Checks the labels."""
        if labels.shape != input_ids.shape:
            raise ValueError("labels must be (B, T), as input_ids: ids, or -100 for no score")
        scored = labels != -100
        pad_id = self.config.pad_token_id
        mask_id = self.model.mask_id
        outside = (labels < 0) | (labels >= self.config.vocab_size)
        if (scored & (outside | (labels == mask_id) | (labels == pad_id))).any():
            raise ValueError(
                f"labels must be ids below {self.config.vocab_size}, or -100 where nothing is "
                f"scored; [MASK] ({mask_id}) and [PAD] ({pad_id}) are never predicted"
            )
        special = (input_ids == pad_id) | (input_ids == self.config.end_id)
        return input_ids.masked_fill(scored & special & (input_ids != labels), mask_id)


class MDLMForCausalLM(MDLMForMaskedLM, GenerationMixin):
    """An autoregressive model: logits[:, i] predict token i + 1, as in all of transformers.

    In mdlm logits[:, i] predict token i, and the first token of a text too: the network reads
    [MASK] as the beginning of a text, then the text without its last token.
    """

    output = CausalLMOutput

    def predict(self, ids, output_hidden_states=False):
        """As above. After a full context the logits are 0, as the network has no such position."""
        T = ids.shape[1]
        room = self.config.block_size - T
        if room < 0:
            raise ValueError(f"{T} tokens are more than the context of {self.config.block_size}")
        begun = F.pad(ids, (1, 0), value=self.model.mask_id)
        begun = begun if room else begun[:, :-1]
        found = super().predict(begun, output_hidden_states)
        return [F.pad(x[:, 1:], (0, 0, 0, T + 1 - begun.shape[1])) for x in found]

    def view(self, ids):
        return super().view(ids)._replace(causal=True)

    def targets(self, labels):
        """The next token: labels are those of input_ids, and the first one's is not scored."""
        return F.pad(labels[:, 1:], (0, 1), value=-100)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        """The arguments of a call: the whole text, as there is no cache."""
        context = self.config.block_size
        if input_ids.shape[1] >= context:
            raise ValueError(f"the context of {context} tokens is full: give fewer max_new_tokens")
        return dict(input_ids=input_ids, attention_mask=attention_mask)
