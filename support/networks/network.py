"""Network: what a folder of Hugging Face holds, and how it is opened.

A Network is the library's configuration, what predicts tokens, and the id of [MASK]. `build` makes
a Pretrained of it (model.py). Checkpoints keep it in network.json.

Encoders have a [MASK] of their own, a token of the tokenizer that is never predicted: its logit is
-inf. Decoders get one: a further row of the embedding, at first the mean of the others. A decoder
predicts a token at the position before it, --shift; the first token of a text has none before it
and is predicted at its own position.
"""

import contextlib
import copy
import gc
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from nanomdlm.kernels.launch import warn
from nanomdlm.kernels.operations import grouped_attention
from nanomdlm.support.cli import files
from nanomdlm.support.cli.networks import FILE
from nanomdlm.support.data.chat import ChatTemplate
from nanomdlm.support.data.sources import slices_of
from nanomdlm.support.data.tokenizer import MASKS, describe
from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import (
    attention,
    attention_masks,
    explain,
    library,
    lora,
    remote_code,
    weights,
)
from nanomdlm.support.networks.model import Pretrained

FORMAT = "mdlm-network"
BETWEEN = "<|endoftext|>"  # between the texts of which many decoders learned
MASKED, EMBEDDING, CAUSAL = "masked", "embedding", "causal"  # kinds of heads
CLASSES = dict(masked="AutoModelForMaskedLM", causal="AutoModelForCausalLM", embedding="AutoModel")
# Settings that say in which layers a token sees a window, as attention_masks reads them.
WINDOWS = {"sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers"}
# Settings of tokenizer_config.json that an export has again. Others say how to frame a text.
KEPT = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
KEPT += ["padding_side", "truncation_side"]


@dataclass
class Network:
    config: object  # the library's; from `fit` on with a row for [MASK]
    head: str  # a key of CLASSES. embedding: an encoder whose head is its embedding
    mask_id: int | None = None  # None until `fit` is told the tokenizer
    code: remote_code.Code | None = None  # with its classes; None: they are the library's
    chat: ChatTemplate | None = None  # of its tokenizer
    tokenizer: dict = field(default_factory=dict)  # KEPT of tokenizer_config.json
    generation: dict = field(default_factory=dict)  # generation_config.json
    base: dict | None = None  # lora.identity of the weights that adapters are for
    folder: Path | None = None  # of the weights that a run begins with; None: random ones
    find_weight: object = None  # (names in the library, shape) -> tensor; None: random ones
    adapted: Pretrained | None = None  # with --lora: the first one built; others share its weights
    begin_id: int | None = None  # of the token before a text, once `fit` is told the tokenizer
    takes_spans: bool | None = None  # whether it can have our attention; None: not tried yet

    @property
    def auto_class(self):
        """The class of the library that loads it."""
        return CLASSES[self.head]

    @property
    def is_decoder(self):
        return self.head == CAUSAL

    @property
    def first_position(self):
        """The number of the first position: in RoBERTa those up to that of [PAD] are not used."""
        kind = self.config.model_type
        is_roberta = "roberta" in kind or kind in ("camembert", "mpnet")
        return (self.config.pad_token_id or 0) + 1 if is_roberta else 0

    def dropout_rates(self):
        """The names of the dropout rates in the config."""
        numbers = [n for n, v in self.config.to_dict().items() if isinstance(v, (int, float))]
        return [name for name in numbers if "dropout" in name or name.endswith("_pdrop")]

    # ---- The tokenizer
    def fit(self, tokenizer):
        """Choose the id of [MASK], which the tokenizer gets too, and the rows of the embedding.

        Raises UserError for a tokenizer that does not fit the weights.
        """
        V = tokenizer.vocab_size
        config = self.config
        if self.folder:
            where = self.folder / "tokenizer.json"
            if tokens_of(*describe(where)[:2]) != tokens_of(tokenizer.kind, tokenizer.vocab):
                fix = "give text, or ids that it made with that file beside them"
                raise UserError(f"the data have other tokens than {where}; {fix}")
        rows = config.vocab_size
        if rows < V and (self.folder or self.mask_id is not None):
            what = f"the tokenizer has {V} tokens, the network {rows}"
            raise UserError(f"{what}; restore the tokenizer.json that it was trained with")
        if self.mask_id is None:
            self.mask_id = self.find_mask(tokenizer)
            needed = max(V, self.mask_id + 1)
            config.vocab_size = max(rows, needed) if self.folder else needed
        for name, id in config.to_dict().items():  # of another vocabulary
            if name.endswith("_token_id") and isinstance(id, int) and id >= V:
                setattr(config, name, None)
        specials = tokenizer.special_ids()
        begins = [specials[n] for n in (BETWEEN, self.tokenizer.get("bos_token")) if n in specials]
        if getattr(config, "bos_token_id", None) in specials.values():  # else it is a default
            begins.append(config.bos_token_id)
        self.begin_id = begins[0] if begins else None
        tokenizer.mask_id = self.mask_id
        tokenizer.chat = self.chat
        if self.chat:
            self.chat.forbid(tokenizer.special_ids())

    def find_mask(self, tokenizer):
        """The id of a [MASK] that the tokenizer has already, else a new one.

        Decoders have one only if their tokenizer_config.json says so: they are diffusion models.
        """
        names = [self.tokenizer.get("mask_token"), *(() if self.is_decoder else MASKS)]
        ids = tokenizer.special_ids()
        own = next((ids[name] for name in names if name in ids), None)
        if own is None and self.folder and not self.is_decoder:
            fix = "give an encoder that was trained with masks"
            raise UserError(f"{self.folder / 'tokenizer.json'} has no [MASK] {MASKS}; {fix}")
        return tokenizer.vocab_size if own is None else own

    def fit_data(self, ids):
        """Fit to the tokenizer of sources.Ids; UserError for ids with an encoder's own [MASK]."""
        self.fit(ids.tokenizer)
        is_token = self.mask_id < ids.tokenizer.vocab_size
        if is_token and any((piece == self.mask_id).any() for piece in slices_of(ids.arrays)):
            raise UserError(f"the data have the id {self.mask_id}, which is [MASK]; remove it")

    # ---- Its weights
    def maker(self):
        """The class of the library or the code that makes it, and with which settings."""
        name = self.auto_class
        kind = self.code.find(self.config.auto_map[name]) if self.code else getattr(library(), name)
        has_sdpa = self.code is None or getattr(kind, "_supports_sdpa", False)
        return kind, dict(attn_implementation="sdpa" if has_sdpa else "eager", dtype=torch.float32)

    def make_body(self, dropout=None):
        """The library's module with random weights. dropout: None leaves the rates as they are."""
        config = copy.deepcopy(self.config)
        for name in self.dropout_rates() if dropout is not None else ():
            setattr(config, name, dropout)
        with explain(f"no network of model_type {config.model_type!r} can be made"):
            kind, settings = self.maker()
            make = kind._from_config if self.code else kind.from_config
            return make(config, **settings)

    def open(self, in_parts=False, is_base=False):
        """Find the weights of `folder` and try such a network, before any work begins.

        in_parts: read weights only where they are used. is_base: its weights stay as they are, and
        checkpoints name them (--lora). Raises UserError for weights that are not all there, and for
        networks that cannot be used.
        """
        if self.folder is None:
            self.config.dtype = torch.float32  # of exports; here all are float32
            self.try_out()
            return self
        stored = self.check_weights(self.folder)
        self.find_weight = stored.find if in_parts else self.load()
        if is_base:
            self.base = lora.identity(self.folder)
        return self

    def check_weights(self, folder, prefix=None):
        """The WeightFiles of a folder, which have the shapes of this network; it is tried too."""
        stored = weights.WeightFiles(folder)
        if self.config.num_hidden_layers > len(stored.paths):  # before they are made
            what = f"config.json says {self.config.num_hidden_layers} layers"
            raise UserError(f"{folder} has {len(stored.paths)} tensors, but {what}")
        with torch.device("meta"):
            stored.check_shapes(self.make_body(), prefix)
        self.try_out()
        return stored

    def open_checkpoint(self, folder, in_parts):
        """The same for a checkpoint: `build` makes a network into which its weights are loaded."""
        if self.base:  # what adapters are for is not in the checkpoint
            lora.check_identity(self.base)
            origin = read(Path(self.base["folder"]) / "config.json", self.code is not None)
            origin.folder = Path(self.base["folder"])
            self.find_weight = origin.open(in_parts).find_weight
        else:
            self.check_weights(folder, "body")
            self.find_weight = lambda names, shape: torch.zeros(shape)
        return self

    def try_out(self, trial=attention_masks.check):
        """Return what a trial says of a shallow network of this kind. By default: raise UserError
        unless tokens see what a View says."""
        other = replace(self, config=weights.shallow(self.config))
        some = SimpleNamespace(shift=False)
        model = Pretrained(other, other.make_body(), some, self.config.vocab_size, None)
        result = trial(model)
        del model
        gc.collect()  # modules hold each other in circles: free the memory now, not later
        return result

    def gets_our_attention(self, config, ops):
        """Whether `build` makes networks with our attention: that needs our kernels, heads that
        they support, no dropout, and a network that computes the same with it, by a trial."""
        if getattr(ops, "grouped_attention", None) is not grouped_attention:
            return False
        if config.dropout or self.code or not attention.is_for(self.config):
            takes = "heads of 32, 64 and 128, no dropout, and no code of their own"
            warn(f"attention of this network runs in PyTorch (SDPA): the kernels take {takes}")
            return False
        if self.takes_spans is None:
            with torch.random.fork_rng(devices=[]):  # a run draws the same with and without it
                self.takes_spans = self.try_out(attention_masks.takes_spans)
            if not self.takes_spans:
                why = "the kernels compute another one"
                warn(f"attention of this network runs in PyTorch (SDPA): {why}")
        return self.takes_spans

    def load(self):
        """The weights of `folder` as the library reads them, which knows their former names: a
        function as find_weight. UserError if some are missing."""
        only = dict(use_safetensors=True, local_files_only=True, trust_remote_code=False)
        only |= dict(output_loading_info=True, config=copy.deepcopy(self.config))
        with explain(f"{self.folder} cannot be loaded"):
            kind, settings = self.maker()
            body, found = kind.from_pretrained(str(self.folder), **only, **settings)
        # The library only warns of both, and makes up what is missing.
        missing = [name for name in found["missing_keys"] if "pooler." not in name]
        more = [name for name in found["unexpected_keys"] if re.search(r"\.\d+\..*weight$", name)]
        if missing or more:
            why = "lacks weights" if missing else "has more layers than its config.json"
            what = f"{self.folder} {why}: {min(missing or more)[:80]}"
            raise UserError(f"{what}; copy the whole model again")
        read = body.state_dict()

        def find(names, shape):
            return next((read[name].clone() for name in names if name in read), None)

        return find

    def build(self, config, V, ops, shard_fn):
        """A Pretrained with the weights that were found, or with random ones.

        shard_fn: called with each layer with --shard, to spread it over the ranks. Layers are
        filled one by one, so that a rank never holds them all.
        """
        with weights.on_meta() if self.find_weight else contextlib.nullcontext():
            body = self.make_body(config.dropout)
        model = Pretrained(self, body, config, V, ops)
        if self.gets_our_attention(config, ops):
            attention.adopt(body)
            model.has_our_attention = True
        if config.lora:
            lora.add(model, config.lora, config.dropout)
        # What a network with adapters shares with the one before. With --shard the embedding is
        # spread together with the row of [MASK], which is trained.
        layers = f"body.{model.layers_name}."
        shared = layers if config.shard else ""
        parameters = {name for name, _ in torch.nn.Module.named_parameters(model)}

        def find(name, shape):
            if self.adapted and name in model.frozen and name.startswith(shared):
                return None
            value = self.first_value(model, name, shape)
            if value is None and name in parameters:
                what = f"{self.folder} has no weights of the name {name}, by which ranks read them"
                raise UserError(f"{what}; leave --shard out")
            return value

        for i, layer in enumerate(model.layers if config.shard else ()):
            weights.fill(model, find, f"{layers}{i}.")
            shard_fn(layer)
        if self.find_weight:
            weights.fill(model, find)
        if self.adapted:
            lora.share(self.adapted, model, shared)
        self.adapted = model if config.lora else None
        return model

    def first_value(self, model, name, shape):
        """The value with which a tensor of a Pretrained begins; None: that of the library."""
        V = model.vocab_size
        if name == "mask_vector":
            embedding = model.body.get_input_embeddings()
            weight = self.first_value(model, model.embedding_name, embedding.weight.shape)
            return lora.mask_vector(embedding, weight, self.mask_id)
        if lora.is_trained(name):
            return lora.first_value(name, shape, model.config.seed)
        t = self.find_weight(model.names_in_library(name), shape)
        if t is None:
            return None
        if t.shape != shape:  # the rows that it lacks become the mean of others
            rows = t[:V].mean(0).expand(shape[0] - len(t), *t.shape[1:])
            t = torch.cat((t, rows))
        if name == model.embedding_name and self.mask_id == V:
            # A text that is predicted from left to right begins after this token.
            is_begin = model.config.objective == "ar" and self.begin_id is not None
            t[V] = t[self.begin_id] if is_begin else t[:V].mean(0)
        return t

    # ---- In checkpoints
    def files(self):
        """The files of a checkpoint, beside those of any run: name -> bytes."""
        facts = dict(format=FORMAT, version=1, head=self.head, mask_id=self.mask_id)
        facts |= dict(tokenizer=self.tokenizer, generation=self.generation, base=self.base)
        facts |= dict(chat=self.chat and self.chat.to_json())
        facts |= dict(code=self.code and [*self.code.sources], config=settings_of(self.config))
        facts = {name: value for name, value in facts.items() if value is not None}
        sources = self.code.sources if self.code else {}
        return {FILE: json.dumps(facts, indent=1).encode()} | sources


def tokens_of(kind, vocab):
    """What two tokenizers have in common if a text has the same ids; files may differ elsewhere."""
    return kind, json.loads(vocab)["model"]["vocab"] if kind == "file" else vocab


def settings_of(config):
    """All settings of the library's configuration, as JSON has them."""
    return json.loads(config.to_json_string(use_diff=False))


# ---- Files
def read(path, trust_remote_code):
    """The Network of a config.json of Hugging Face or of a network.json; UserError for others."""
    content = files.read_json(path, "network")
    if content.get("format") == FORMAT:
        return of_checkpoint(path, content, trust_remote_code)
    code = None
    classes = remote_code.classes_of(content)
    if classes and (trust_remote_code or content.get("model_type") not in library().CONFIG_MAPPING):
        code = remote_code.of_folder(path.parent, classes, trust_remote_code)
        content["auto_map"] = classes
    config = read_config(path, content, code)
    head = head_of(path, config, code)
    if head == CAUSAL:
        config.is_causal = False
    found = {}
    for name in ("tokenizer_config", "generation_config"):
        beside = path.with_name(f"{name}.json")
        found[name] = files.read_json(beside, name) if beside.exists() else {}
    words = {name: found["tokenizer_config"].get(name) for name in KEPT}
    words = {n: t.get("content") if isinstance(t, dict) else t for n, t in words.items()}
    words = {name: word for name, word in words.items() if isinstance(word, str)}
    chat = ChatTemplate.of_folder(path.parent)
    more = dict(code=code, chat=chat, tokenizer=words, generation=found["generation_config"])
    return Network(config, head, **more)


def of_checkpoint(path, content, trust_remote_code):
    """The Network of a network.json with this content."""
    if content.get("version") != 1 or content.get("head") not in [*CLASSES]:
        raise UserError(f"{path} is damaged, or of a later version; restore it from a copy")
    code = None
    if "code" in content:
        code = remote_code.Code(remote_code.read(path.parent, content["code"], trust_remote_code))
    config = read_config(path, content["config"], code)
    chat = ChatTemplate.from_json(content["chat"], path) if "chat" in content else None
    more = {name: content[name] for name in ("tokenizer", "generation", "base") if name in content}
    return Network(config, content["head"], content["mask_id"], code, chat, **more)


def read_config(path, settings, code):
    """The library's configuration of the settings in a file, by its class or that of the Code."""
    kind = settings.get("model_type")
    with explain(f"{path}, of model_type {kind!r}, is not that of a language model"):
        if code is None:
            made = library().CONFIG_MAPPING[kind]
        else:
            made = code.find(settings["auto_map"]["AutoConfig"])
        config = made.from_dict(dict(settings))
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            getattr(config, name)
    # The trial of a network is too short to see a long window, or chunks of attention.
    settings = settings_of(config)
    windows = [name for name in settings if "window" in name and settings[name]]
    unknown = {f"{n}={settings[n]}" for n in windows if n.lstrip("_") not in WINDOWS}
    unknown |= {*(settings.get("layer_types") or [])} - {"full_attention", "sliding_attention"}
    if unknown:
        what = f"{path} has {', '.join(sorted(unknown))[:200]}"
        raise UserError(f"{what}, which is not known here; give another network")
    return config


def head_of(path, config, code):
    """The kind of head of a network, by the name of its class if config.json has it."""
    auto = library().models.auto.modeling_auto
    kind = config.model_type
    name = (config.architectures or [""])[0]
    if code is not None:  # the class of that name, else the first of the three that it has
        classes = {head: config.auto_map.get(each, "") for head, each in CLASSES.items()}
        found = [head for head, each in classes.items() if each.endswith(f".{name}")]
        found += [head for head, each in classes.items() if each]
        if found:
            return found[0]
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if causal and (not masked or name.endswith(("ForCausalLM", "LMHeadModel"))):
        return CAUSAL
    if masked:
        has_head = not name or name.endswith(("ForMaskedLM", "ForPreTraining"))
        return MASKED if has_head else EMBEDDING
    fix = "give an encoder such as BERT or a decoder such as Llama"
    raise UserError(f"{path} has the model_type {kind!r}, which is no language model; {fix}")
