"""Infilling: templates with gaps, the search for their fills, lengths, and log-probabilities."""
