"""Proofreading: finds what does not belong in a text, and what to write there."""
