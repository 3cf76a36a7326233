"""Web pages: a replay of how a text was unmasked, and a model that runs in the browser."""
