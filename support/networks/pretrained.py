"""Networks of the transformers library instead of mdlm.Model: BERT, GPT-2, Llama, Qwen ...

A Network describes one: the config.json of the library, what predicts tokens, and the id of [MASK].
`Network.build` makes a Pretrained of it, a module that takes a View like mdlm.Model:

    ids      their embeddings are the library's inputs_embeds
    at       position_ids
    sees     a 4-D mask, and in layers with a sliding window the window: the library takes a 4-D
             mask as it is and drops the window
    causal   a triangular mask. Otherwise nothing is causal: is_causal=False in the config makes
             decoders of the library bidirectional

Libraries ignore masks silently, so `Pretrained.check` tries what a network sees before it is used.

The head is taken out of the library's module, whose `logits` are then the input of the head (in
BERT, for example, after the dense layer and norm); it is applied only at the predicted rows.

Encoders have their own [MASK], a token of the tokenizer that is never predicted: its logit is -inf.
Decoders get one: an additional row of the embedding, at first the mean of the others. A decoder
predicts a token at the position before it, --shift; the first token of a text has no position
before it and is predicted at its own.
"""

import contextlib
import copy
import gc
import inspect
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open

from nanomdlm.kernels.reference import document_spans, is_visible
from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.data.chat import ChatTemplate
from nanomdlm.support.data.sources import slices_of
from nanomdlm.support.data.tokenizer import describe
from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import lora, remote_code, sharded_loading
from nanomdlm.support.run import checkpoint
from nanomdlm.support.run.checkpoint import explain_safetensors
from nanomdlm.support.view import View

FORMAT = "mdlm-network"
FILE = "network.json"  # in checkpoints
SHIFT = "mdlm_shift"  # in the config.json of exports: whether they were trained with --shift
OLDEST = (5, 2)  # the oldest version of transformers whose decoders can be bidirectional
MASKS = ("[MASK]", "<mask>", "<|mask|>")  # tokens that stand for a hidden one, in encoders
MASKED, EMBEDDING, CAUSAL = "masked", "embedding", "causal"  # kinds of heads
NEVER = -3e4  # logit of [MASK] in the loss: its probability is 0, and float16 can hold it
NEVER_DRAWN = -1e4  # bias of [MASK] in exports: finite, so that guidance by others stays finite
CLASSES = dict(masked="AutoModelForMaskedLM", causal="AutoModelForCausalLM", embedding="AutoModel")
SIZES = dict(num_hidden_layers=1024, num_attention_heads=1024, hidden_size=1 << 16)
SIZES |= dict(vocab_size=1 << 24)
# Settings that say in which layers a token sees a window, as `windows_of` reads them.
WINDOWS = {"sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers"}
# What suits weights that are trained already (docs/pretrained.md), and what an architecture that is
# not ours.
FINE_TUNING = dict(optimizer="muon", learning_rate=3e-4, muon_lr=0.01, weight_decay=0.01)
LORA = dict(optimizer="adamw", learning_rate=3e-3, weight_decay=0.0)
FROM_NOTHING = dict(optimizer="muon", learning_rate=1e-3, muon_lr=0.02, weight_decay=0.1)


# ---- The library
def library():
    """The transformers library, without its warnings; UserError if it is missing or too old."""
    transformers = optional("transformers", "a network of Hugging Face")
    version = transformers.__version__
    if tuple(int(n) for n in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        fix = "type: pip install -U transformers"
        raise UserError(f"transformers {version} is older than {oldest}, which is needed; {fix}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def explain_library(what):
    """Context manager: turn what the library raises into a UserError of one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # it raises errors of all kinds
        said = " ".join(str(e).split())[:200]
        why = f"{type(e).__name__} {said}".strip() if isinstance(e, KeyError) or not said else said
        raise UserError(f"{what} ({why}); give another one") from e


# ---- Which network
class Network:
    """What defines a network; checkpoints keep it in network.json.

    settings  the config.json of the library, as a dict
    head      masked: the library's AutoModelForMaskedLM; causal: its AutoModelForCausalLM;
              embedding: its AutoModel, an encoder whose head is its embedding
    mask_id   the id of [MASK]; None until `fit` is told the tokenizer
    folder    where its weights are, or None: random ones
    code      a remote_code.Code with its classes, or None: they are the library's
    """

    def __init__(self, settings, head, mask_id=None, folder=None, mask_token="", code=None):
        self.settings = settings
        self.head = head
        self.mask_id = mask_id
        self.folder = folder
        self.mask_token = mask_token
        self.code = code
        self.rows = settings["vocab_size"]  # of the embedding in `folder`
        self.weights = None  # those of `folder`, name -> tensor, until networks are built
        self.is_checked = False  # whether such a network has passed Pretrained.check
        self.is_resumed = False  # whether a checkpoint has its weights
        self.chat = None  # the chat.ChatTemplate of its tokenizer
        self.base = None  # lora.identity of the weights that adapters are for
        self.adapted = None  # a network with adapters that was built, whose weights others share

    @property
    def model_type(self):
        return self.settings["model_type"]

    @property
    def auto_class(self):
        """The class of the library that loads it."""
        return CLASSES[self.head]

    @property
    def positions(self):
        """How many positions it knows."""
        n = getattr(self.library_config(), "max_position_embeddings", None) or 1 << 16
        return n - self.first_position

    @property
    def first_position(self):
        """The number of the first position: in RoBERTa those up to that of [PAD] are not used."""
        is_roberta = "roberta" in self.model_type or self.model_type in ("camembert", "mpnet")
        return (self.settings.get("pad_token_id") or 0) + 1 if is_roberta else 0

    def library_config(self):
        """The configuration object of the library."""
        with explain_library(f"the config.json of model_type {self.model_type!r} cannot be used"):
            return config_class(self.settings, self.code).from_dict(dict(self.settings))

    def fit(self, tokenizer):
        """Choose the id of [MASK], which the tokenizer gets too, and the rows of the embedding.

        Raises UserError for a tokenizer that does not fit the weights.
        """
        V = tokenizer.vocab_size
        if self.folder:
            self.check_tokenizer(tokenizer)
        if self.mask_id is None:
            own = self.own_mask(tokenizer)
            self.mask_id = V if own is None else own
            needed = V + (own is None)
            self.settings["vocab_size"] = max(self.rows, needed) if self.folder else needed
        rows = self.settings["vocab_size"]
        if self.mask_id > V or rows < max(V, self.mask_id + 1):
            fix = "give the tokenizer that it was trained with"
            raise UserError(f"the tokenizer has {V} ids, the network {rows}; {fix}")
        for name, id in self.settings.items():  # of another vocabulary
            if name.endswith("_token_id") and isinstance(id, int) and id >= V:
                self.settings[name] = None
        tokenizer.mask_id = self.mask_id
        tokenizer.chat = self.chat
        if self.chat:
            self.chat.forbid(tokenizer.special_ids())

    def check_tokenizer(self, tokenizer):
        """Raise UserError for a tokenizer that is not that of the weights."""
        where = self.folder / "tokenizer.json"
        if tokenizer.vocab_size > self.rows:
            what = f"{where} has {tokenizer.vocab_size} tokens, the network {self.rows}"
            raise UserError(f"{what}; restore the tokenizer that it was trained with")
        if not have_equal_tokens(describe(where), (tokenizer.kind, tokenizer.vocab)):
            fix = "give text, or ids made by that tokenizer, with its file beside them"
            raise UserError(f"the data have different tokens than {where}; {fix}")

    def own_mask(self, tokenizer):
        """The id of a [MASK] that the tokenizer has already; None for a network that gets one.

        Decoders have one only if their tokenizer_config.json says so: they are diffusion models.
        """
        is_encoder = self.head != CAUSAL
        names = [name for name in (self.mask_token, *MASKS * is_encoder) if name]
        ids = tokenizer.special_ids()
        own = next((ids[name] for name in names if name in ids), None)
        if own is None and is_encoder and self.folder:
            where = self.folder / "tokenizer.json"
            fix = "give an encoder that was trained with masks"
            raise UserError(f"{where} has no token for [MASK] ({', '.join(names)}); {fix}")
        return own

    def fit_data(self, ids):
        """Fit to the tokenizer of sources.Ids; UserError for ids with an encoder's own [MASK]."""
        self.fit(ids.tokenizer)
        if self.mask_id >= ids.tokenizer.vocab_size:
            return
        for piece in slices_of(ids.arrays):
            if (piece == self.mask_id).any():
                fix = "remove it from the data"
                raise UserError(f"the data have the id {self.mask_id}, which is [MASK]; {fix}")

    def count_weights(self, tokenizer):
        """How many numbers the weights are with this tokenizer, without memory for them."""
        self.fit(tokenizer)
        if self.base:  # they are not in the checkpoint
            return 1
        with torch.device("meta"):
            return sum(p.numel() for p in self.make_body().parameters())

    def build(self, config, vocab_size, ops, shard_fn=None):
        """A Pretrained with the weights of `folder`, or with random ones.

        shard_fn: called with each layer with --shard, to spread it over the ranks.
        """
        if config.shard:
            return self.build_in_parts(config, vocab_size, ops, shard_fn)
        body = self.make_body(config.dropout)
        if self.weights:
            self.copy_weights(body, vocab_size)
        model = Pretrained(self, body, config, vocab_size, ops)
        if not self.is_checked:
            model.check()
            self.is_checked = True
        if config.lora:
            lora.add(model, config.lora, config.dropout, config.seed)
            lora.share(self.adapted or model, model)
            self.adapted = model
        return model

    def build_in_parts(self, config, V, ops, shard_fn):
        """`build` for ranks that never hold the whole network, unless its weights are random."""
        is_known = self.weights is not None or self.is_resumed
        with sharded_loading.on_meta() if is_known else contextlib.nullcontext():
            body = self.make_body(config.dropout)
        model = Pretrained(self, body, config, V, ops)
        names = self.names_in_files(model)
        embedding = body.get_input_embeddings()
        is_shared = self.adapted is not None
        of_embedding = next(name for name, p in model.named_parameters() if p is embedding.weight)
        if config.lora:
            lora.add(model, config.lora, config.dropout, config.seed)

        def find(name, shape):
            if lora.is_adapter(name):
                return lora.first_value(name, shape, config.seed)
            if name == "mask_vector":
                weight = find(of_embedding, embedding.weight.shape)
                return lora.mask_vector(embedding, weight, self.mask_id)
            if self.is_resumed and not self.base:  # all will be loaded
                return torch.zeros(shape)
            if is_shared and name.startswith(within):  # of the network before
                return None
            t = self.weights.find(names(name))
            if t.shape != shape:  # of the vocabulary
                rows = t[:V].mean(0).expand(shape[0] - min(len(t), shape[0]), *t.shape[1:])
                t = torch.cat((t[: shape[0]], rows))
            if name == of_embedding and self.mask_id == V:
                t = t.clone()
                t[V] = t[:V].mean(0)
            return t

        within = f"body.{model.layers_name}."
        for layer in model.layers:
            sharded_loading.fill(model, layer, find)
            shard_fn(layer)
        sharded_loading.fill(model, model, find)
        if config.lora:
            lora.share(self.adapted or model, model, within)
            self.adapted = model
        return model

    def names_in_files(self, model):
        """A function: name of a parameter of a Pretrained -> the names that it has in the library,
        one of which files have."""
        head = {"head": [f"{model.head_place}.weight"]}
        others = [".".join(place) for place in model.bias_places]
        head["bias"] = [f"{model.head_place}.bias", *others]
        return lambda name: head.get(
            name, [name.removeprefix("body.").replace(".base_layer.", ".")]
        )

    def make_body(self, dropout=0.0):
        """The library's module with random weights."""
        settings = {
            name: dropout if is_dropout(name, value) else value
            for name, value in self.settings.items()
        }
        config = Network(settings, self.head, code=self.code).library_config()
        with explain_library(f"no network of model_type {self.model_type!r} can be made"):
            kind = self.network_class()
            make = kind.from_config if self.code is None else kind._from_config
            return without_pooler(make(config, **self.loading(kind)))

    def network_class(self):
        """The class that makes it: one of the library, which has it made, or of the code."""
        if self.code is None:
            return getattr(library(), self.auto_class)
        return self.code.find(self.settings["auto_map"][self.auto_class])

    def loading(self, kind):
        """How the library is to make it, of the network_class `kind`."""
        has_sdpa = self.code is None or getattr(kind, "_supports_sdpa", False)
        return dict(attn_implementation="sdpa" if has_sdpa else "eager", dtype=torch.float32)

    def open(self, in_parts=False):
        """Read the weights of `folder` and try a network, before any work begins; returns itself.

        in_parts: read them only when they are used, and try a shallow network with random weights.
        Raises UserError for weights that are not all there, and for networks that cannot be used.
        """
        settings = self.settings
        if in_parts:
            settings = sharded_loading.shallow(settings, self.library_config())
            body = Network(settings, self.head, code=self.code).make_body()
            if self.folder:
                self.weights = sharded_loading.WeightFiles(self.folder, body.base_model_prefix)
        elif self.folder:
            body = self.load()
            self.weights = body.state_dict()
        else:
            body = self.make_body()
        tried = Network(settings, self.head, mask_id=0, code=self.code)
        depth = tried.library_config().num_hidden_layers
        some = SimpleNamespace(n_layer=depth, shift=False)
        Pretrained(tried, body, some, self.rows, None).check()
        if in_parts:  # modules hold each other in circles: free the memory now, not later
            del body
            gc.collect()
        self.is_checked = True
        return self

    def load_base(self, in_parts=False):
        """Read the weights that adapters of a run with --lora are for; in_parts: as in `open`."""
        folder = Path(self.base["folder"])
        first = read(folder / "config.json", self.code is not None)
        first.folder = folder
        self.weights = first.open(True).weights if in_parts else first.load().state_dict()

    def load(self):
        """The library's module with the weights of `folder`; UserError if some are missing."""
        check_weights(self.folder)
        only = dict(use_safetensors=True, local_files_only=True, trust_remote_code=False)
        only |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
        with explain_library(f"{self.folder} cannot be loaded"):
            kind = self.network_class()
            only |= dict(config=self.library_config()) | self.loading(kind)
            body, found = kind.from_pretrained(str(self.folder), **only)
        check_loaded(self.folder, body, found)
        return without_pooler(body)

    def without_weights(self):
        """A copy without the weights that were read."""
        other = copy.copy(self)
        other.weights = other.adapted = None
        return other

    @torch.no_grad()
    def copy_weights(self, body, V):
        """Copy what was read to a body; rows that its embedding lacks become the mean of others."""
        for name, into in body.state_dict().items():
            whole = self.weights[name]
            n = min(len(whole), len(into)) if whole.dim() else 0
            if whole.shape == into.shape:
                into.copy_(whole)
            else:  # of the vocabulary
                into[:n] = whole[:n]
                into[n:] = whole[:V].mean(0)
        if self.mask_id == V:
            weight = body.get_input_embeddings().weight
            weight[V] = weight[:V].mean(0)

    def to_json(self):
        facts = dict(format=FORMAT, version=1, head=self.head, mask_id=self.mask_id)
        facts |= dict(code=self.code.listed()) if self.code else {}
        facts |= dict(base=self.base) if self.base else {}
        facts |= dict(chat=self.chat.to_json()) if self.chat else {}
        return json.dumps(facts | dict(config=self.settings), indent=1)

    def files(self):
        """The additional files of a checkpoint: name -> bytes."""
        return {FILE: self.to_json().encode()} | (self.code.sources if self.code else {})


def without_pooler(body):
    """An encoder of the library without the layer that makes one vector of a text."""
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    return body


def have_equal_tokens(one, other):
    """Whether two tokenizers, (kind, vocab, ...) each, have the same tokens; files of the library
    may differ elsewhere."""
    vocabs = [
        json.loads(vocab)["model"]["vocab"] if kind == "file" else vocab
        for kind, vocab, *_ in (one, other)
    ]
    return one[0] == other[0] and vocabs[0] == vocabs[1]


def is_dropout(name, value):
    """Whether a setting of the library is a dropout rate."""
    return ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, (int, float))


def read(path, trust_remote_code):
    """The Network of a Hugging Face config.json or of a network.json; UserError for other files."""
    content = files.read_json(path, "network")
    if content.get("format") == FORMAT:
        settings, head, mask_id = (content.get(key) for key in ("config", "head", "mask_id"))
        kinds = (type(settings), type(mask_id), head in [*CLASSES])
        if content.get("version") != 1 or kinds != (dict, int, True) or mask_id < 0:
            raise UserError(f"{path} is damaged, or of a later version; restore it from a copy")
        code = None
        if "code" in content:
            code = remote_code.of_checkpoint(path, content["code"], trust_remote_code)
        network = Network(checked_settings(path, settings, code), head, mask_id, code=code)
        if "base" in content:
            lora.check_identity(content["base"], path)
            network.base = content["base"]
        if "chat" in content:
            network.chat = ChatTemplate.from_json(content["chat"], path)
        return network
    classes = remote_code.classes_of(content)
    code = None
    if classes and (trust_remote_code or not is_known(content.get("model_type"))):
        code = remote_code.of_folder(path, classes, trust_remote_code)
        content["auto_map"] = classes
    network = Network(*settings_of(path, content, code), code=code)
    network.chat = ChatTemplate.of_folder(path.parent)
    return network


def is_known(model_type):
    """Whether the library has this model_type, of a file."""
    return isinstance(model_type, str) and model_type in library().CONFIG_MAPPING


def config_class(settings, code):
    """The library's class of the settings, or that of the Code that comes with them."""
    if code is not None:
        return code.find(settings["auto_map"]["AutoConfig"])
    return library().CONFIG_MAPPING[settings["model_type"]]


def checked_settings(path, settings, code=None):
    """Settings that the class of their model_type takes, with all its defaults."""
    kind = settings.get("model_type")
    if code is None and not is_known(kind):
        what = f"{path} has the model_type {str(kind)[:40]!r}"
        version = library().__version__
        raise UserError(f"{what}, which transformers {version} does not have; give another one")
    with explain_library(f"{path} cannot be read by transformers"):
        config = config_class(settings, code).from_dict(dict(settings))
        settings = json.loads(config.to_json_string(use_diff=False))
    for name, most in SIZES.items():
        size = settings.get(name) if name == "vocab_size" else getattr(config, name, None)
        if type(size) is not int or not 1 <= size <= most:
            what = f"{path} has {name} {str(size)[:40]!r}, not 1 to {most}"
            raise UserError(f"{what}; give the config.json of a language model")
    windows = [name for name in settings if "window" in name and settings[name]]
    if unknown := [name for name in windows if name.lstrip("_") not in WINDOWS]:
        what = f"{path} has {unknown[0][:40]}={str(settings[unknown[0]])[:40]}"
        raise UserError(f"{what}, a window that this project does not know; give another network")
    others = set(settings.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if others:
        what = f"{path} has layers of {', '.join(sorted(others))}"
        raise UserError(f"{what}, which have no masks; give a network with attention")
    return settings


def settings_of(path, content, code=None):
    """The arguments of Network for the config.json of a Hugging Face model."""
    if "model_type" not in content:
        raise UserError(f"{path} has no model_type; give a config.json of Hugging Face")
    settings = checked_settings(path, content, code)
    auto = library().models.auto.modeling_auto
    kind = settings["model_type"]
    names = settings.get("architectures") or []
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if code is not None:
        head = head_of_code(settings["auto_map"], name)
    elif name.endswith(("ForCausalLM", "LMHeadModel")) and causal:
        head = CAUSAL
    elif masked:
        trained = not name or name.endswith(("ForMaskedLM", "ForPreTraining"))
        head = MASKED if trained else EMBEDDING
    elif causal:
        head = CAUSAL
    else:
        head = None
    if head is None:
        what = f"{path} has the model_type {kind!r}, which is not a language model"
        raise UserError(f"{what}; give an encoder such as BERT or a decoder such as Llama")
    if head == CAUSAL:
        settings["is_causal"] = False
    mask_token = ""
    words = path.parent / "tokenizer_config.json"
    if words.exists():
        token = files.read_json(words, "tokenizer's settings").get("mask_token") or ""
        mask_token = token.get("content", "") if isinstance(token, dict) else str(token)
    return settings, head, None, None, mask_token


def head_of_code(classes, name):
    """The kind of head of custom code: that of the class `name`, if an auto_map has it, else the
    first of the three that it has; None if it has none."""
    heads = [head for head, auto in CLASSES.items() if auto in classes]
    own = [head for head in heads if classes[CLASSES[head]].endswith(f".{name}")]
    return next(iter(own + heads), None)


# ---- Pretrained weights
def check_weights(folder):
    """Raise UserError unless the safetensors of a model are all there and can be opened."""
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.exists():
        parts = [whole]
    elif index.exists():
        map_of = files.read_json(index, "index of weights").get("weight_map")
        if not isinstance(map_of, dict) or not map_of:
            raise UserError(f"{index} names no files; restore it from a copy")
        names = sorted({str(name) for name in map_of.values()})
        if any(os.path.basename(name) != name for name in names):
            raise UserError(f"{index} names files in other folders; restore it from a copy")
        parts = [folder / name for name in names]
    else:
        others = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt")]
        fix = "save it as safetensors: save_pretrained of transformers does"
        kind = f", only {sorted(others)[0]}, a pickle, which is never loaded" if others else ""
        raise UserError(f"{folder} has no model.safetensors{kind}; {fix}")
    for part in parts:
        if not part.exists():
            raise UserError(f"{folder} lacks {part.name}; copy all parts of the model there")
        with explain_safetensors(part), safe_open(part, "pt") as f:
            f.keys()


def check_loaded(folder, body, found):
    """Raise UserError if weights of a folder are missing or damaged; found: what the library says
    of loading them into the body."""
    missing = sorted(name for name in found["missing_keys"] if "pooler." not in name)
    misshapen = sorted(str(each) for each in found["mismatched_keys"])
    numbered = sorted(name for name in found["unexpected_keys"] if is_of_layer(name))
    for names, why in (
        (missing, "lacks the weights"),
        (misshapen, "does not fit its config.json:"),
        (numbered, "has weights of more layers than its config.json, such as"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{folder} {why} {names[0][:80]}{more}; copy the whole model again")
    for name, t in body.state_dict().items():
        if t.is_floating_point() and not t.isfinite().all():
            raise UserError(f"{folder}: {name} has numbers that are not finite; copy it again")


def is_of_layer(name):
    """Whether a weight that a network lacks is of a layer, which bears a number."""
    return any(part.isdecimal() for part in name.split(".")) and name.endswith(".weight")


# ---- The module
class Features(nn.Module):
    """Replaces the head: returns what the head would read."""

    def forward(self, x):
        return x


class Pretrained(nn.Module):
    """A network of transformers that takes a View, as mdlm.Model does.

    body: the library's module; its head is taken out. The weights are float32. mask_id: the id of
    [MASK], vocab_size or an id below it. layers: the library's ModuleList of layers.
    """

    def __init__(self, network, body, config, vocab_size, ops):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.mask_id = network.mask_id
        self.ops = ops
        self.network = network.without_weights()
        self.body = body
        self.windows = windows_of(body.config)
        self.head = None  # the weight of the head, unless it is the embedding's
        self.bias = None  # of the head
        self.head_place = ""  # the name of the head in the body
        self.bias_places = []  # other names of its bias
        self.mask_vector = None  # with --lora: the embedding of [MASK]
        self.frozen = None  # with --lora: the names of parameters that are not trained
        body.config.use_cache = False
        takes = inspect.signature(body.forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"
        embedding = body.get_input_embeddings()
        embedding.padding_idx = None  # it is a token as others, and gets gradients
        head = body.get_output_embeddings()
        if network.head != EMBEDDING or head is not None:
            self.take_head(head, embedding)
        lists = [(n, m) for n, m in body.named_modules() if isinstance(m, nn.ModuleList)]
        depth = config.n_layer
        self.layers_name = next((name for name, m in lists if len(m) == depth), None)
        if self.layers_name is None:
            self.refuse(f"has no list of {depth} layers")

    def refuse(self, why):
        kind = self.network.model_type
        fix = "give a network of another model_type"
        raise UserError(f"the network of model_type {kind!r} {why}, so it cannot be used; {fix}")

    def take_head(self, head, embedding):
        """Move the weight and bias of the head here, and put Features in its place."""
        if not isinstance(head, nn.Linear):
            self.refuse("has no linear head")
        self.head_place = next(name for name, m in self.body.named_modules() if m is head)
        self.body.set_submodule(self.head_place, Features())
        if head.weight is not embedding.weight:
            self.head = head.weight
        self.bias = head.bias
        for name, module in self.body.named_modules():
            for key, p in [*module._parameters.items()]:
                if p is not None and p is head.bias:
                    module.register_parameter(key, None)
                    self.bias_places.append((name, key))

    @property
    def layers(self):
        return self.body.get_submodule(self.layers_name)

    @property
    def head_weight(self):
        """The weight of the head (rows, C); rows beyond V - 1 are never used."""
        return self.body.get_input_embeddings().weight if self.head is None else self.head

    def masks(self, view):
        """The library's attention_mask of a View: bool (B or 1, 1, queries, keys), None where all
        is seen, or a dict of these for the kinds of layers."""
        N = view.ids.shape[1]
        at = torch.arange(N, device=view.ids.device)
        visible = None  # (B or 1, N, N), of a call with a cache (1, N, all that is kept and these)
        if view.sees is not None:
            visible = is_visible(view.sees, at)
        if view.causal:
            visible = (at[:, None] >= at)[None]
        # Windows are of positions in the text, of which rows of blocks have each one twice.
        of_queries = of_keys = at if view.at.dim() > 1 else view.at
        if view.cache is not None:
            of_keys = torch.arange(view.cache.length + N, device=at.device)
            visible = (of_keys // view.cache.S <= of_queries[:, None] // view.cache.S)[None]
        by_type = {}
        for kind, window in self.windows.items():
            mask = visible
            if window is not None and window < len(of_keys):
                distance = (of_queries[:, None] - of_keys).abs()
                # As the library: a causal window counts the position itself.
                near = (distance < window if view.causal else distance <= window)[None]
                mask = near if mask is None else mask & near
            by_type[kind] = None if mask is None else mask[:, None]
        return by_type if len(by_type) > 1 else mask_of(by_type)

    def encode(self, embedded, view):
        """What the head reads (B, N, C), from embeddings (B, N, C); each at its own position."""
        B, N, _ = embedded.shape
        at = (view.at + self.network.first_position).expand(B, N)
        inputs = dict(inputs_embeds=embedded, position_ids=at, attention_mask=self.masks(view))
        if view.cache is not None:
            inputs |= {self.cache_name: view.cache.update(), "use_cache": True}
        return output_of(self.body(**inputs))

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
            if rows is None:
                rows = torch.arange(B * N, device=h.device).view(B, N)
            left = torch.arange(-1, N - 1, device=h.device) if view.before is None else view.before
            offset = torch.arange(B, device=h.device)[:, None] * N
            here = torch.arange(B * N, device=h.device).view(B, N)
            rows = torch.where(view.at > 0, left + offset, here).flatten()[rows]
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
        return self.ops.linear_cross_entropy(h, W, targets, weights)

    # ---- With --lora, parameters are what is trained (support/networks/lora.py)
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """As nn.Module's, without frozen ones; with recurse=False, as FSDP asks, with them."""
        left_out = (self.frozen or ()) if recurse else ()
        start = f"{prefix}." if prefix else ""
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            if name.removeprefix(start) not in left_out:
                yield name, p

    def state_dict(self, *args, prefix="", **more):
        """As nn.Module's, without frozen ones."""
        tensors = super().state_dict(*args, prefix=prefix, **more)
        for name in self.frozen or ():
            tensors.pop(prefix + name, None)
        return tensors

    def load_state_dict(self, tensors, strict=True, assign=False):
        """As nn.Module's; frozen ones are not expected."""
        return super().load_state_dict(tensors | self.frozen_tensors(), strict, assign)

    def frozen_tensors(self):
        return {name: self.get_parameter(name) for name in self.frozen or ()}

    # ---- Does it do what a View says?
    def check(self):
        """Raise UserError unless a trial shows that tokens see exactly what they should."""
        was_training = self.training
        self.eval()
        what = (
            f"a network of model_type {self.network.model_type!r} fails with a mask and positions"
        )
        with explain_library(what):
            self.check_head()
            self.check_documents()
            self.check_positions()
            self.check_windows()
        self.train(was_training)

    def try_view(self, n=6):
        """A View of random tokens, two documents of n / 2 tokens."""
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (1, n), generator=g).to(self.head_weight.device)
        at = torch.arange(n, device=ids.device)
        spans = document_spans((at == n // 2 - 1)[None] | (at == n - 1))
        return View(ids, at % (n // 2), sees=spans)

    @torch.no_grad()
    def check_head(self):
        """The library must return what the head gives, and see all without a mask."""
        read = []  # what Features is given
        place = self.body.get_submodule(self.head_place) if self.head_place else None
        hook = place.register_forward_hook(lambda m, args, out: read.append(out)) if place else None
        try:
            view = self.try_view()
            view = view._replace(sees=None, at=torch.arange(6, device=view.ids.device))
            embedded = self.body.get_input_embeddings()(view.ids)
            plain = output_of(self.body(inputs_embeds=embedded))
            if read and not torch.equal(read[0], plain):
                self.refuse("changes its logits after the head")
            if not torch.allclose(self.encode(embedded, view), plain, rtol=1e-4, atol=1e-5):
                self.refuse("does not compute the same with positions and masks")
        finally:
            if hook:
                hook.remove()

    def check_documents(self):
        """Documents must not see each other, nor tokens what is later in a causal View."""
        view = self.try_view()
        at = torch.arange(6, device=view.ids.device)
        documents = is_visible(view.sees, at)[0]
        alone = view._replace(sees=None, at=at)
        if not self.influence(alone).all():
            self.refuse("is causal, or does not see all of a text")
        if not torch.equal(self.influence(view), documents):
            self.refuse("does not obey a mask of documents")
        other = view._replace(ids=view.ids.roll(1, 1).where(at >= 3, view.ids))
        with torch.no_grad():
            both = [self.features(each)[:, :3] for each in (view, other)]
        if not torch.allclose(*both, rtol=1e-4, atol=1e-5):
            self.refuse("lets a document see another one")
        causal = View(view.ids, at, causal=True)
        if self.network.head == CAUSAL and not torch.equal(
            self.influence(causal), at[:, None] >= at
        ):
            self.refuse("does not obey a causal mask")

    @torch.no_grad()
    def check_positions(self):
        """Tokens in another order, at their positions, must be the same text."""
        view = self.try_view()
        order = torch.tensor([3, 0, 5, 1, 4, 2], device=view.ids.device)
        view = view._replace(sees=None, at=torch.arange(6, device=order.device))
        embedded = self.embed(view.ids)
        moved = self.encode(embedded[:, order], view._replace(at=order))
        if not torch.allclose(moved, self.encode(embedded, view)[:, order], rtol=1e-4, atol=1e-5):
            self.refuse("does not take the positions that it is given")

    def check_windows(self):
        """Layers with a sliding window must obey it: with windows of width 0 no token may see
        another one, and all may if one kind of layers has none."""
        windows = self.windows
        if not any(windows.values()):
            return
        view = self.try_view()
        view = view._replace(sees=None, at=torch.arange(6, device=view.ids.device))
        try:
            for free in (None, *windows):  # the kind of layers without a window
                self.windows = {kind: None if kind == free else 0 for kind in windows}
                seen = self.influence(view)
                itself = torch.eye(len(seen), dtype=torch.bool, device=seen.device)
                if not torch.equal(seen, itself if free is None else torch.ones_like(itself)):
                    self.refuse("does not obey the sliding windows of its layers")
        finally:
            self.windows = windows

    def influence(self, view):
        """(N, N) bool: whether the features at i depend on the token at j, by gradients."""
        N = view.ids.shape[1]
        embedded = self.body.get_input_embeddings()(view.ids).detach().repeat(N, 1, 1)
        embedded.requires_grad_()
        with torch.enable_grad():
            h = self.encode(embedded, view)
            weight = torch.linspace(-1, 1.3, h.shape[-1], device=h.device)  # not alike: norms
            at = torch.arange(N, device=h.device)
            (grad,) = torch.autograd.grad((h[at, at] * weight).sum(), embedded)
        return grad.abs().sum(-1) > 0

    # ---- Out again
    def to_library(self, end_id=None):
        """A copy of the library's module with its head in place; end_id: of [END], if there is."""
        if self.frozen is not None:
            return lora.merge(self).to_library(end_id)
        body = copy.deepcopy(self.body)
        rows = range(len(self.head_weight))
        never = [i for i in rows if i >= self.vocab_size or i == self.mask_id]  # to be drawn
        if self.head_place:
            weight = body.get_input_embeddings().weight
            if self.head is not None:
                weight = nn.Parameter(self.head.detach().clone())
            rows, C = weight.shape
            head = nn.Linear(C, rows, bias=self.bias is not None, device="meta")
            head.weight = weight
            if self.bias is not None:
                head.bias = nn.Parameter(self.bias.detach().clone())
                head.bias.data[never] = NEVER_DRAWN
            body.set_submodule(self.head_place, head)
            for name, key in self.bias_places:
                body.get_submodule(name).register_parameter(key, head.bias)
        settings = self.network.settings
        for name, value in settings.items():
            if is_dropout(name, value):  # as it was, not as --dropout trained it
                setattr(body.config, name, value)
        body.config.use_cache = settings.get("use_cache", False)
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

    def files_of_library(self, end_id=None):
        """The files that the library writes for it: config.json, its weights ...; name -> bytes."""
        with tempfile.TemporaryDirectory() as folder:
            self.to_library(end_id).save_pretrained(folder)
            found = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        return found | (self.network.code.sources if self.network.code else {})


def mask_of(by_type):
    (mask,) = by_type.values()
    return mask


def output_of(result):
    """The logits that the library returns, or the last hidden state if there is no head."""
    return result.logits if "logits" in result else result.last_hidden_state


def windows_of(config):
    """Kind of layers -> their sliding window, or None; a single kind "" where all are alike.

    config: the library's, as some compute the window.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or [])
    if not kinds:
        return {"": window}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


# ---- Flags
def find_network(given):
    """The Network that the flags of a new run ask for; None: ours."""
    source = given.get("init_from")
    is_trusted = given.get("trust_remote_code", False)
    network = None
    if given.get("network"):
        if source:
            raise UserError("--init_from brings a network; leave --network out")
        network = read(Path(given["network"]), is_trusted)
    elif source and checkpoint.is_foreign(source):
        network = read(Path(source) / "config.json", is_trusted)
        network.folder = Path(source)
        check_weights(network.folder)
    elif source and (path := file_of_run(source)):
        network = read(path, is_trusted)
        if network.base:
            fix = "export it, which merges its adapters, and give that folder"
            raise UserError(f"--init_from={source} is a run with --lora; {fix}")
    return network


def file_of_run(source):
    """The network.json of a run or checkpoint; None if it has none."""
    folders = [Path(source), *checkpoint.checkpoints(source)]
    return next((p / FILE for p in folders if (p / FILE).exists()), None)


def open_network(config, folder):
    """The Network of a run with this Config; folder: the checkpoint that it resumes, or None."""
    is_trusted = config.trust_remote_code
    if folder:
        network = read(folder / FILE, is_trusted)
        network.is_resumed = True
        if network.base:
            network.load_base(in_parts=bool(config.shard))
        return network
    source = dict(init_from=config.init_from) if config.init_from else dict(network=config.network)
    network = find_network(source | dict(trust_remote_code=is_trusted))
    network.open(in_parts=bool(config.shard))
    if config.lora:
        network.base = lora.identity(network.folder)
    return network


def implied(given, settings):
    """The settings that a pretrained network implies, besides those of the preset; {} for ours.

    given: the flags of a new run. Raises UserError for flags that do not fit such a network.
    """
    network = find_network(given)
    if network is None:
        return {}
    source = given.get("init_from") or given["network"]
    flag = f"--{'init_from' if given.get('init_from') else 'network'}={source}"
    check_flags(given, network, flag)
    sizes = network.library_config()
    result = dict(n_layer=sizes.num_hidden_layers, n_head=sizes.num_attention_heads)
    result |= dict(n_embd=sizes.hidden_size, attention_every=1, conv=0, pos="learned", tie=False)
    result |= dict(dropout=0.0, block_size=min(settings["block_size"], network.positions))
    result |= FINE_TUNING if given.get("init_from") else FROM_NOTHING
    result |= LORA if given.get("lora") else {}
    if network.folder:
        result["network"] = str(network.folder / "config.json")
        result["tokenizer"] = str(network.folder / "tokenizer.json")
        is_shifted = network.settings.get(SHIFT, network.head == CAUSAL)
        result["shift"] = is_shifted and given.get("objective") != "ar"
        if not Path(result["tokenizer"]).exists():
            fix = "save it there: save_pretrained of a fast tokenizer does"
            raise UserError(f"{flag} has no tokenizer.json; {fix}")
    elif given.get("init_from"):
        result["network"] = str(file_of_run(source))
        content = files.read_json(file_of_run(source).with_name("config.json"), "config")
        was = content.get("config")
        was = was if isinstance(was, dict) else {}  # damaged: the checkpoint is verified later
        is_shifted = was.get("shift") is True or was.get("objective") == "ar"
        result["shift"] = is_shifted and given.get("objective") != "ar"
    return result


def check_flags(given, network, flag):
    """Raise UserError for flags that do not work with a pretrained network."""
    kind = f"{flag}, a network of {network.model_type}"
    if network.head != CAUSAL:
        why = "which sees what follows"
        if given.get("objective") == "ar":
            raise UserError(f"--objective=ar does not work with {kind}, {why}; leave it out")
        if given.get("shift") and not network.code:
            why = "which was trained to predict a token at its own position"
            raise UserError(f"--shift does not work with {kind}, {why}; leave it out")
        if given.get("block_length"):
            fix = "give a decoder, or leave it out"
            raise UserError(f"--block_length does not work with {kind}, an encoder; {fix}")
    if given.get("lora"):
        lora.library()
        if not network.folder:
            needs = "needs weights to adapt; give a folder of Hugging Face with --init_from"
            raise UserError(f"--lora={given['lora']} {needs}")
    if given.get("shift") and given.get("objective") == "ar":
        why = "which predicts the next token anyway"
        raise UserError(f"--shift has no effect with --objective=ar, {why}; leave it out")
    T = given.get("block_size", 0)
    most = network.positions
    if most < T:
        fix = f"give {most} or less"
        raise UserError(f"--block_size={T} is above the {most} positions of {kind}; {fix}")
