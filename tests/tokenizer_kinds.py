"""Tokenizers as others have them, small: the parts of their tokenizer.json, trained on a text."""

import json

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def train(library, trainer, text, size, **options):
    trainer = trainer(vocab_size=size, show_progress=False, **options)
    library.train_from_iterator(text.splitlines(keepends=True), trainer)
    return library


def llama(text):
    """SentencePiece BPE: ▁ before the text, spaces as ▁, bytes for unknown characters."""
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁\n]+"), "isolated")  # in training
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    train(library, trainers.BpeTrainer, text, 900, special_tokens=["<unk>", "</s>", *BYTES])
    content = json.loads(library.to_str())
    content["pre_tokenizer"] = None
    kept = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    content["added_tokens"] = kept
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def gemma(text):
    """As Llama's, without a ▁ before the text."""
    content = json.loads(llama(text).to_str())
    content["normalizer"] = content["normalizer"]["normalizers"][1]
    content["decoder"]["decoders"].pop()
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unigram(text, normalizer, splitter):
    library = tokenizers.Tokenizer(models.Unigram())
    library.normalizer = normalizer
    library.pre_tokenizer = splitter
    library.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    specials = dict(special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    train(library, trainers.UnigramTrainer, text, 800, **specials)
    end = ("</s>", 1)
    library.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [end])
    return library


def t5(text):
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
    normalizer = normalizers.Sequence([normalizers.NFKC(), *spaces])
    return unigram(text, normalizer, pre_tokenizers.Metaspace("▁", prepend_scheme="always"))


def albert(text):
    """Unigram, in small letters without accents; XLM-R splits as it does."""
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    plain = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    return unigram(text, normalizers.Sequence([*quotes, *plain]), splitter)


def bert(text, lowercase=True):
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece("##", cleanup=True)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return train(library, trainers.WordPieceTrainer, text, 900, special_tokens=specials)


def gpt2(text, prefix=False):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return train(
        library, trainers.BpeTrainer, text, 700, special_tokens=["<|endoftext|>"], **options
    )


def qwen(text):
    library = gpt2(text)
    library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return library


def words(text, **unknown):
    """Whole words, and nothing for those that it does not know, unless there is an unk_token."""
    library = tokenizers.Tokenizer(models.WordLevel(**unknown))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = list(unknown.values())
    return train(library, trainers.WordLevelTrainer, text, 20_000, special_tokens=specials)


def unknown_words(text):
    return words(text, unk_token="[UNK]")


def letters(text):
    """A BPE without [UNK] and without bytes, which drops the characters that it does not know."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    library.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    return train(library, trainers.BpeTrainer, text, 400, special_tokens=[])


KINDS = dict(
    llama=llama,
    gemma=gemma,
    t5=t5,
    albert=albert,
    bert=bert,
    bert_cased=lambda text: bert(text, lowercase=False),
    gpt2=gpt2,
    roberta=lambda text: gpt2(text, prefix=True),
    qwen=qwen,
    words=words,
    letters=letters,
)
KEEPS_TEXT = ("llama", "gemma", "gpt2", "qwen", "char", "byte", "word", "bpe")
