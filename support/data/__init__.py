"""Data sets and tokenizers: files of all kinds to ids."""
