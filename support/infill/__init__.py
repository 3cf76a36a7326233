"""Infilling: templates with gaps, the network calls that fill them, and ranking by likelihood."""
