"""Write a model for other programs.

    python export.py --to=hf --out_dir=out --dest=my-model   # for transformers
    python export.py --to=page --out_dir=out --dest=my-page  # runs in a browser
    python export.py --to=checkpoint --weights=bfloat16 --out_dir=out --dest=small  # for mdlm

my-model can be loaded without this project, by AutoModelForMaskedLM (AutoModelForCausalLM for a run
with --objective=ar) with trust_remote_code=True, and AutoTokenizer; its README.md says how. An
adapted Hugging Face network (docs/pretrained.md) is written in its original architecture, and needs
no custom code unless it came with some. my-page is for any web server: python -m http.server
--directory my-page. Creating it needs onnx and onnxscript (pip install onnx onnxscript), and npm, a
part of Node.js. small is a checkpoint without the optimizer's state, in half the size of float32,
for all programs here and for --init_from.
"""

from nanomdlm.support.cli import entry, environment

entry.start(__name__)

import contextlib
import inspect
import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_safetensors

import mdlm
import sample
from nanomdlm.kernels import reference
from nanomdlm.support import abilities
from nanomdlm.support.cli import files, outputs
from nanomdlm.support.cli.settings import Reads, Writes, names_of, parse
from nanomdlm.support.data import tokenizer_json
from nanomdlm.support.data.hf_tokenizer import explained
from nanomdlm.support.errors import UserError
from nanomdlm.support.export import FOLDER
from nanomdlm.support.run import checkpoint_score, plots
from nanomdlm.support.run import config as run_config
from nanomdlm.support.run.checkpoint import (
    default_run,
    is_export,
    read_newest,
    saved_buffers,
    without_state,
)
from nanomdlm.support.view import View
from nanomdlm.support.web import live_page
from nanomdlm.variants import positions, time_conditioning
from nanomdlm.variants.documents import view_of_documents

# Two lines of support/export/modeling_mdlm.py.
PLACE = "Model = View = view_of_documents = masked_fraction = rotary_tables = None\n"
PLACE += "attention_ref = norm_conv_ref = told_rate = with_positions = None\n"
SOURCES = [View, reference.document_spans, reference.is_visible, reference.masked_fraction]
SOURCES += [reference.neighbors, reference.norm_conv_ref, reference.rotary_tables]
SOURCES += [reference.rotate, reference.prepare, reference.attention_ref]
SOURCES += [view_of_documents, mdlm.Layer, mdlm.Model]
SOURCES += [time_conditioning.RateEmbedding, time_conditioning.AdaLN, time_conditioning.told_rate]
SOURCES += [positions.with_positions]
# The number types that each kind can have, the first by default.
WEIGHTS = dict(hf=("float32",), page=("int8", "float32"), checkpoint=("float32", "bfloat16"))
NumberType = Literal["auto", "int8", "bfloat16", "float32"]
NEEDS = " In transformers before 5.2 it is causal, since these ignore `is_causal` in config.json."
# The settings that make the network.
NETWORK = (*run_config.NETWORK, "block_size", "dropout", "objective", "prompt_column")


@dataclass
class Options:
    """What to export."""

    to: Literal["hf", "page", "checkpoint"] = "hf"  # for transformers, a page, or weights alone
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    dest: Writes = ""  # the new folder to create
    pad_to_context: bool = False  # for --to=hf: pad texts to the context length, as in training
    weights: NumberType = "auto"  # page: int8 or float32; checkpoint: float32 or bfloat16
    trust_remote_code: bool = False  # allow custom code from the checkpoint


# ---- Tokenizers
def begin_once(content):
    """The JSON of a tokenizer that puts a space only before the beginning of a text, not after
    [MASK]; as it was, where that cannot be written."""
    tokenizers = environment.optional("tokenizers", "--to=hf")
    first = dict(type="Metaspace", replacement="▁", prepend_scheme="first", split=False)
    before = dict(type="Prepend", prepend="▁")
    spaces = dict(type="Replace", pattern=dict(String=" "), content="▁")
    normalizer = content.get("normalizer") or {}
    splitter = content.get("pre_tokenizer") or {}
    changed = content
    if normalizer.get("normalizers") == [before, spaces] and not splitter:  # Llama 2's
        changed = content | dict(normalizer=None, pre_tokenizer=first)
    elif splitter.get("prepend_scheme") == "always":  # T5's
        changed = content | dict(pre_tokenizer=splitter | dict(prepend_scheme="first"))
    text = "To be, or not to be:\nthat is  the question."
    try:
        with explained("it does not know these words"):
            libraries = [tokenizers.Tokenizer.from_str(json.dumps(c)) for c in (content, changed)]
            both = [each.encode(text, add_special_tokens=False).ids for each in libraries]
    except UserError:
        return content
    return changed if both[0] == both[1] else content


def to_library(tokenizer, names=("[MASK]", "[PAD]")):
    """A Tokenizer -> (tokenizer.json as a dict, its [END]).

    It has special tokens of these names after all others, and no BPE dropout, as in training.
    Raises UserError if it cannot have these.
    """
    has_end = tokenizer.end_id is not None
    try:
        if tokenizer.kind != "file":
            content = tokenizer_json.to_content(tokenizer.kind, tokenizer.vocab, tokenizer.end)
            kept = ("[END]", *names)
            added = [token for token in content["added_tokens"] if token["content"] in kept]
            return content | dict(added_tokens=added), "[END]" if has_end else None
        library = tokenizer.library.library
        nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
        content = json.loads(tokenizer.vocab) | nothing
        if content["model"].get("dropout"):
            content["model"]["dropout"] = None
        content = begin_once(content) if names else content
        tokenizer_json.add_specials(content, library.get_vocab(), names=names)
        return content, library.id_to_token(tokenizer.end_id) if has_end else None
    except ValueError as e:
        raise UserError(f"this tokenizer cannot be exported: {e}") from e


# ---- Hugging Face
def quality(folder, config):
    """The log's record of a run's checkpoint `folder`."""
    with contextlib.suppress(UserError):  # no log
        key, logged = plots.validations(plots.read_log(folder.parent))
        for r in logged:
            if f"step-{r['step']}" == folder.name and not config.infill_share:  # that of blocks
                name = {"val_nll": "NLL", "val_nelbo": "NELBO (a bound of the NLL)"}[key]
                error = f" +- {r[f'{key}_se']:.4f}" if r[f"{key}_se"] else ""
                return f"validation {name} {r[key]:.4f}{error} nats per token"
    return "not logged: `python eval.py` of mdlm (--whole) measures it"


def card(folder, model, tokenizer, config, name):
    """README.md of the folder `name`: what the model is, its score, how to load it and sample."""
    size = f"{config.n_layer} layers x {config.n_embd}, context {config.block_size}"
    length = config.block_size
    end = ""
    if abilities.knows_lengths(model):
        counts = model.length_counts.double().cpu()
        mean = (counts @ torch.arange(len(counts)).double() / counts.sum()).item()
        length = min(length, 1 + round(mean))
        end = "x[0, -1] = tokenizer.eos_token_id  # a text ends in [END], which is given\n"
    if config.prompt_column:
        end = "x[0, 0] = tokenizer.eos_token_id  # of an empty prompt; else its ids first\n"
    fields = dict(name=" ".join(name.split()), path=json.dumps(name), data=json.dumps(config.data))
    fields |= dict(quality=quality(folder, config), size=size, end=end)
    count = sum(p.numel() for _, p in torch.nn.Module.named_parameters(model))  # frozen ones too
    fields |= dict(millions=count / 1e6)
    fields |= dict(V=tokenizer.vocab_size, kind=tokenizer.kind, pad_id=tokenizer.vocab_size + 1)
    fields |= dict(length=length, more=min(100, length // 2), context=config.block_size)
    fields["prompt"] = tokenizer.decode([0])
    with contextlib.suppress(UserError):  # a letter that the vocabulary does not have
        fields["prompt"] = tokenizer.decode(tokenizer.encode("The"))
    form = "card_ar.md" if config.objective == "ar" else "card.md"
    if config.network:
        network = model.network
        form = "card_network_ar.md" if config.objective == "ar" else "card_network.md"
        fields |= dict(mask_id=model.mask_id, hook=hook_code(model))
        kind = network.config.model_type
        fields |= dict(auto=network.auto_class, kind=kind)
        fields["logits"] = f"model(x).logits[..., :{model.vocab_size}]"  # of tokens of a text
        fields |= dict(trust="", loads="it loads without code of others", needs="")
        if network.is_decoder:
            fields["needs"] = NEEDS
        if network.code:
            trust = ", trust_remote_code=True"
            fields |= dict(trust=trust, loads="its *.py files are those of the model before")
        fields["end"] = end.replace("tokenizer.eos_token_id", str(tokenizer.end_id))
    return (FOLDER / form).read_text(encoding="utf-8").format(**fields)


# ---- Hugging Face networks, in their original architecture
def tokens_of_network(model, tokenizer):
    """(tokenizer.json with the network's [MASK] as a dict, tokenizer_config.json as a dict)."""
    ids = tokenizer.special_ids()
    mask = next((word for word, id in ids.items() if id == model.mask_id), None)
    # A [MASK] that is new gets an id; the network has no row for a [PAD].
    content, end = to_library(tokenizer, names=() if mask else ("[MASK]",))
    words = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    words["model_max_length"] = model.config.block_size
    pad = next((word for word in ("[PAD]", "<pad>") if word in ids), None)
    words |= dict(pad_token=pad) if pad else {}
    was = model.network.tokenizer  # what came with the network
    words |= {n: word for n, word in was.items() if word in ids or n.endswith("_side")}
    return content, words | dict(mask_token=mask or "[MASK]") | (dict(eos_token=end) if end else {})


def hook_code(model):
    """The lines of the card that turn the library's output into logits of each token (B, T, V)."""
    V = model.vocab_size
    lines = [f"logits = output.logits[..., :{V}]"]
    if not model.has_head:
        lines = [f"weight = network.get_input_embeddings().weight[:{V}]"]
        lines.append("logits = output.last_hidden_state @ weight.T  # the embedding is the head")
    if model.config.shift:
        shifted = "logits = torch.cat((logits[:, :1], logits[:, :-1]), 1)"
        lines.append(f"{shifted}  # a token is predicted at the one before it")
    if model.mask_id < V:
        lines.append(
            f"logits[..., {model.mask_id}] = {model.NEVER_DRAWN:g}  # [MASK] is never drawn"
        )
    return "\n".join(f"    {line}" for line in lines)


def contents_of_network(folder, model, tokenizer, config, options):
    """The files of a Hugging Face network: its own files, without our code."""
    content, words = tokens_of_network(model, tokenizer)
    if config.objective == "ar":
        begin = words["mask_token"]
        words |= dict(bos_token=begin, model_input_names=["input_ids", "attention_mask"])
        content["post_processor"] = tokenizer_json.prepend(begin, model.mask_id)
    if template := model.network.chat:  # texts may begin and end with other tokens than it writes
        words = template.tokens | words
        words["chat_template"] = template.source_beside(words)
    name = Path(options.dest).name
    text = card(folder, model, tokenizer, config, name)
    contents = {
        "tokenizer.json": tokenizer_json.dumps(content).encode(),
        "tokenizer_config.json": json.dumps(words, indent=1).encode(),
        "README.md": text.encode(),
    }
    dtype = None if options.weights == "auto" else getattr(torch, options.weights)
    return contents | model.files_of_library(tokenizer.end_id, dtype)


def contents_of(folder, model, tokenizer, config, options):
    """The files of a Hugging Face model, name -> bytes."""
    is_causal = config.objective == "ar"
    tokens, end = to_library(tokenizer)
    V = tokenizer.vocab_size
    ids = dict(eos_token_id=tokenizer.end_id if end else V + 1, pad_token_id=V + 1)
    kind = "ForCausalLM" if is_causal else "ForMaskedLM"
    name = f"MDLM{kind}"
    places = dict.fromkeys(["AutoModel", f"AutoModel{kind}"], f"modeling_mdlm.{name}")
    places["AutoConfig"] = "modeling_mdlm.MDLMConfig"
    settings = dict(model_type="mdlm", architectures=[name], auto_map=places, dtype="float32")
    end_id = -1 if is_causal else model.objective.end_id  # a token like others, if it is predicted
    settings |= ids | dict(vocab_size=V + 2, mask_token_id=V, end_id=end_id, use_cache=False)
    settings |= {key: getattr(config, key) for key in NETWORK}
    settings |= dict(pad_to_context=options.pad_to_context, tie_word_embeddings=config.tie)
    settings["calibration"] = model.calibration
    words = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=config.block_size)
    words |= dict(mask_token="[MASK]", pad_token="[PAD]", eos_token=end or "[PAD]")
    words["padding_side"] = "left" if is_causal else "right"  # a text is continued at its end
    words["model_input_names"] = ["input_ids", "attention_mask"]
    words["clean_up_tokenization_spaces"] = False  # a text has the spaces that were learned
    weights = {f"model.{key}": value.detach() for key, value in model.named_parameters()}
    for key in {"model.embed.weight", "model.head.weight"} & weights.keys():  # a row for each id
        weights[key] = F.pad(weights[key], (0, 0, 0, V + 2 - len(weights[key])))
    source = "\n\n\n".join(map(inspect.getsource, SOURCES))
    before, _, after = (FOLDER / "modeling_mdlm.py").read_text(encoding="utf-8").partition(PLACE)
    contents = {
        "config.json": json.dumps(settings, indent=1),
        "tokenizer.json": tokenizer_json.dumps(tokens),
        "tokenizer_config.json": json.dumps(words, indent=1),
        "modeling_mdlm.py": before + source + after,
        "README.md": card(folder, model, tokenizer, config, Path(options.dest).name),
    }
    contents = {name: text.encode() for name, text in contents.items()}
    return contents | {"model.safetensors": to_safetensors(weights, dict(format="pt"))}


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    is_page, is_checkpoint = options.to == "page", options.to == "checkpoint"
    accepted = WEIGHTS[options.to]
    weights = accepted[0] if options.weights == "auto" else options.weights
    if weights not in accepted:
        what = f"--weights={weights} is not for --to={options.to}"
        raise UserError(f"{what}; give {' or '.join(accepted)}")
    if len(names_of(options.out_dir)) > 1:
        what = f"--out_dir={options.out_dir} names several networks"
        raise UserError(f"{what}, but only one can be exported; give one")
    dest = Path(options.dest)
    outputs.check_new_folder("dest", options.dest)
    trusted = options.trust_remote_code
    read = partial(mdlm.load, kernel="torch", whole=True, trust_remote_code=trusted)
    folder, loaded = read_newest(default_run(options.out_dir), read)
    model, _, config = loaded
    if is_page and config.network:
        raise UserError("--to=page is for networks of mdlm.py; give --to=hf for pretrained ones")
    if is_checkpoint:
        if is_export(folder):
            raise UserError(f"--out_dir={options.out_dir} is an export; give a run or a checkpoint")
        contents = without_state(folder, getattr(torch, weights), saved_buffers(model))
        program = f"{environment.python_command()} sample.py"
        hint = f"{program} --out_dir={environment.quote(options.dest)} reads it"
    elif is_page:
        contents = live_page.contents_of(*loaded, weights, sample.unmask)
        serve = f"{environment.python_command()} -m http.server"
        hint = f"{serve} -d {environment.quote(options.dest)} shows it on localhost:8000"
    else:
        # The library's plain calls see whole texts.
        if not (abilities.fills_gaps(model) or config.objective == "ar"):
            raise UserError("--to=hf is not for --block_length without --infill_share")
        of_kind = contents_of_network if config.network else contents_of
        contents = of_kind(folder, *loaded, options)
        hint = "load it as its README.md says"
    checkpoint_score.introduce([folder], options.out_dir)
    with files.naming(dest), files.new_folder(dest.parent) as tmp:
        for name, content in contents.items():
            files.write_synced(tmp / name, content)
        outputs.check_new_folder("dest", options.dest)  # a run may have begun there meanwhile
        os.rename(tmp, dest)
    print(f"{environment.quote(dest)}: {hint}")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
