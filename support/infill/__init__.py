"""Gaps: templates, the network calls that fill them, and fills ranked by exact likelihood."""
