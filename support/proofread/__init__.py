"""Proofreading: finds mistakes in a text, and corrections for them."""
