"""Pretrained: a network of transformers as a module that takes a View, as mdlm.Model does.

    ids      their embeddings are the library's inputs_embeds
    at       position_ids
    sees     a 4-D mask, or spans where the network has our attention (attention_masks.py)
    causal   a triangular mask. Otherwise nothing is causal: is_causal=False in the config makes
             decoders of the library bidirectional

The head of the library's module returns what it reads, so its `logits` are that (after the dense
layer and norm of BERT, for example); the head is applied here, at the predicted rows alone.
"""

import copy
import inspect
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import attention_masks, lora
from nanomdlm.support.view import View

SHIFT = "mdlm_shift"  # in the config.json of exports: whether they were trained with --shift
NEVER = -3e4  # logit of [MASK] in the loss: its probability is 0, and float16 can hold it


class Pretrained(nn.Module):
    """A network of transformers that takes a View, as mdlm.Model does.

    body: the library's module, with weights in float32. mask_id: the id of [MASK], vocab_size or an
    id below it. layers: the library's ModuleList of layers.
    """

    NEVER_DRAWN = -1e4  # bias of [MASK] in exports: finite, so that guidance stays finite

    def __init__(self, network, body, config, vocab_size, ops):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.mask_id = network.mask_id
        self.ops = ops
        self.network = replace(network, find_weight=None, adapted=None)
        self.body = body
        self.windows = attention_masks.windows_of(body.config)
        self.has_our_attention = False  # attention.py
        self.head = None  # the weight of the head, unless it is the embedding's
        self.bias = None  # of the head
        self.in_body = dict(head=[], bias=[])  # the names that these have in the body
        self.mask_vector = None  # with --lora: the embedding of [MASK]
        self.frozen = set()  # with --lora: the names of parameters that are not trained
        body.config.use_cache = False
        if getattr(body, "pooler", None) is not None:  # it makes one vector of a text
            body.pooler = None
        takes = inspect.signature(body.forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"
        embedding = body.get_input_embeddings()
        embedding.padding_idx = None  # it is a token as others, and gets gradients
        named = self.named_parameters()
        self.embedding_name = next(name for name, p in named if p is embedding.weight)
        head = body.get_output_embeddings()
        if network.head != "embedding" or head is not None:
            self.take_head(head, embedding)
        depth = body.config.num_hidden_layers
        lists = [(n, m) for n, m in body.named_modules() if isinstance(m, nn.ModuleList)]
        self.layers_name = next((name for name, m in lists if len(m) == depth), None)
        if self.layers_name is None:
            self.refuse(f"has no list of {depth} layers")

    def refuse(self, why):
        kind = self.network.config.model_type
        fix = "give a network of another model_type, or type: pip install -U transformers"
        raise UserError(f"the network of model_type {kind!r} {why}, so it cannot be used; {fix}")

    def take_head(self, head, embedding):
        """Make the library's head return what it reads; its weight and bias are parameters here."""
        if not isinstance(head, nn.Linear):
            self.refuse("has no linear head")
        head.forward = what_it_reads
        named = [*self.body.named_parameters(remove_duplicate=False)]
        for key, p in (("head", head.weight), ("bias", head.bias)):
            if p is not None and p is not embedding.weight:
                setattr(self, key, p)
            self.in_body[key] = [name for name, each in named if each is p]

    @property
    def has_head(self):
        return bool(self.in_body["head"])

    def names_in_library(self, name):
        """The names, one of which the library's files have, of a parameter or buffer of this."""
        bare = name.removeprefix("body.").replace(".base_layer.", ".")  # peft's
        return self.in_body.get(name, [bare])

    def hidden(self):
        """The names in the body of what has another name here, or is frozen."""
        names = {f"body.{name}" for names in self.in_body.values() for name in names}
        return self.frozen | (names - {self.embedding_name})

    @property
    def layers(self):
        return self.body.get_submodule(self.layers_name)

    @property
    def head_weight(self):
        """The weight of the head (rows, C); rows beyond V - 1 are never used."""
        return self.body.get_input_embeddings().weight if self.head is None else self.head

    @property
    def steps_are_alike(self):
        """Whether training steps differ only in values, so that CUDA graphs can replay them.

        Not with the library's own masks, for which it reads positions back from the GPU; nor if it
        leaves out layers at random.
        """
        settings = self.body.config.to_dict()
        has_layerdrop = any("layerdrop" in name and settings[name] for name in settings)
        return self.has_our_attention and not has_layerdrop

    def masks(self, view):
        if self.has_our_attention and not view.causal and view.cache is None:
            return attention_masks.spans(view, self.windows)
        return attention_masks.masks(view, self.windows)

    def call_body(self, embedded, **inputs):
        """What the library returns as logits, or the last hidden state where there is no head."""
        result = self.body(inputs_embeds=embedded, **inputs)
        return result.logits if "logits" in result else result.last_hidden_state

    def encode(self, embedded, view):
        """What the head reads (B, N, C), from embeddings (B, N, C); each at its own position."""
        B, N, _ = embedded.shape
        at = (view.at + self.network.first_position).expand(B, N)
        inputs = dict(position_ids=at, attention_mask=self.masks(view))
        if view.cache is not None:
            inputs |= {self.cache_name: view.cache.update(), "use_cache": True}
        return self.call_body(embedded, **inputs)

    def embed(self, ids):
        """The embeddings of ids (B, N)."""
        embedded = self.body.get_input_embeddings()(ids)
        if self.mask_vector is None:
            return embedded
        return torch.where((ids == self.mask_id)[..., None], self.mask_vector, embedded)

    def features(self, view):
        """What the head reads: (B, N, C), or (*rows.shape, C) at view.rows of the flat batch.

        With --shift that of a token is at the position before it, unless it begins a text.
        """
        h = self.encode(self.embed(view.ids), view)
        B, N, _ = h.shape
        rows = view.rows
        if self.config.shift and not view.causal:  # a causal View is shifted already
            here = torch.arange(B * N, device=h.device).view(B, N)
            rows = here if rows is None else rows
            left = torch.arange(-1, N - 1, device=h.device) if view.before is None else view.before
            rows = torch.where(view.at > 0, left + here[:, :1], here).flatten()[rows]
        return h if rows is None else h.flatten(0, 1)[rows]

    def forward(self, view, targets=None, weights=None):
        """Logits, float32: (n, V) at view.rows, or (B, N, V). With targets (n,) and their weights
        (n,) the loss: the sum of weight * cross-entropy."""
        h = self.features(view)
        V = self.vocab_size
        W = self.head_weight[:V]
        bias = None if self.bias is None else self.bias[:V]
        has_mask = self.mask_id < V
        if targets is None:
            logits = F.linear(h, W, bias).float()
            if has_mask:
                logits[..., self.mask_id] = -torch.inf
            return logits
        h = h.flatten(0, -2)
        if has_mask:
            is_mask = torch.arange(V, device=W.device) == self.mask_id
            bias = torch.where(is_mask, NEVER, 0.0 if bias is None else bias)
        if bias is not None:  # a further column of W, which a feature of 1 selects
            W = torch.cat((W, bias[:, None].to(W.dtype)), 1)
            h = F.pad(h, (0, 1), value=1.0)
            if W.is_cuda:  # rows of a multiple of 16 bytes: others make slow products
                W, h = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (W, h))
        return self.ops.linear_cross_entropy(h, W, targets, weights)

    @torch.no_grad()
    def next_token_nll(self, windows):
        """The mean -log p of tokens (W, T) given those before them, as a decoder predicts them;
        without the first of each window. Nats per token."""
        at = torch.arange(windows.shape[1], device=windows.device)
        ce = []
        for x in windows.split(1):
            logits = self(View(x, at, causal=True))[0, :-1]
            ce.append(F.cross_entropy(logits, x[0, 1:]))
        return torch.stack(ce).mean().item()

    def merge_adapters(self):
        """Add the adapters of --lora, if there are any, to the weights."""
        if self.frozen:
            lora.merge(self)

    # ---- With --lora, parameters are what is trained (lora.py)
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """As nn.Module's, without frozen ones; with recurse=False, as FSDP asks, with them."""
        start = f"{prefix}." if prefix else ""
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            if not recurse or name.removeprefix(start) not in self.frozen:
                yield name, p

    def state_dict(self, *args, prefix="", **more):
        """As nn.Module's, without frozen ones; each parameter once."""
        tensors = super().state_dict(*args, prefix=prefix, **more)
        for name in self.hidden():
            tensors.pop(prefix + name, None)
        return tensors

    def load_state_dict(self, tensors, strict=True, assign=False):
        """As nn.Module's; what state_dict leaves out is not expected."""
        others = {name: self.get_parameter(name) for name in self.hidden()}
        return super().load_state_dict(tensors | others, strict, assign)

    # ---- Out again
    def to_library(self, end_id=None):
        """A copy of the library's module with its head in place; end_id: of [END], if there is."""
        if self.frozen:
            merged = copy.deepcopy(self)
            lora.merge(merged)
            return merged.to_library(end_id)
        body = copy.deepcopy(self.body)
        rows = range(len(self.head_weight))
        never = [i for i in rows if i >= self.vocab_size or i == self.mask_id]  # to be drawn
        if self.has_head:
            head = body.get_output_embeddings()
            del head.forward
            if head.bias is not None:
                head.bias.data[never] = self.NEVER_DRAWN
        was = self.network.config
        for name in self.network.dropout_rates():  # as they were, not as --dropout trained it
            setattr(body.config, name, getattr(was, name))
        body.config.use_cache = getattr(was, "use_cache", False)
        is_causal = self.config.objective == "ar"
        setattr(body.config, SHIFT, self.config.shift or is_causal)
        body.config.mask_token_id = self.mask_id
        if is_causal:
            ids = dict(bos_token_id=self.mask_id, eos_token_id=end_id)
            body.config.update(dict(is_causal=True) | ids)
            if body.can_generate():
                ids |= dict(pad_token_id=end_id, suppress_tokens=never)
                body.generation_config.update(**ids, use_cache=body.config.use_cache)
        return body.eval()

    def files_of_library(self, end_id=None, dtype=None):
        """The files that the library writes for it: config.json, its weights ...; name -> bytes.

        dtype: of the weights; None: that of the weights that the run began with.
        """
        network = self.network
        with tempfile.TemporaryDirectory() as folder:
            body = self.to_library(end_id).to(dtype or network.config.dtype or torch.float32)
            body.save_pretrained(folder)
            found = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        if network.generation:
            ours = json.loads(found.get("generation_config.json", "{}"))
            ours = ours if self.config.objective == "ar" else {}
            content = json.dumps(network.generation | ours, indent=1)
            found["generation_config.json"] = content.encode()
        return found | (network.code.sources if network.code else {})


def what_it_reads(x):
    return x
