"""Data preparation: every source becomes a folder with train.bin, val.bin, tokenizer.json and
meta.json."""

import numpy as np

from support.data import patterns, sources, texts
from support.data.tokenizer import build_tokenizer


def prepare(config, folder, tokenizer=None, network=None):
    """Tokenize config.data into `folder`: nine tenths of its text train, the rest validates.

    tokenizer: that of a model to start from, else config.tokenizer says which one is made.
    network: a pretrained.Network, or None: ours
    """
    template = network.chat if network else getattr(tokenizer, "chat", None)
    source = texts.open_source(config, template)
    if source is None:
        sources.write_meta(folder, *patterns.write(folder, config))
        return
    n = source.survey()  # how many characters a tokenizer may learn from
    source.doing = "making a tokenizer"
    if tokenizer is None:
        kind = (config.tokenizer, config.vocab_size or 16384, sources.has_documents(config))
        tokenizer = build_tokenizer(*kind, source, n, config.end)
    else:
        texts.check_characters(source, tokenizer, config)
    if network:
        network.fit(tokenizer)  # no text may have the [MASK] of an encoder
    source.doing = "encoding"
    largest = tokenizer.vocab_size - 1
    dtype = next(d for d in (np.uint8, np.uint16, np.int32) if largest <= np.iinfo(d).max)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for ids, is_train in source.encode(tokenizer):
            (train if is_train else val).write(ids.astype(dtype).tobytes())
    characters = [source.cut, source.n - source.cut]
    meta = dict(source=config.data, dtype=np.dtype(dtype).name, characters=characters)
    sources.write_meta(folder, tokenizer, meta)
