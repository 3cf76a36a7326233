"""Gaps that must match a regular expression, or be one of a list of texts."""
