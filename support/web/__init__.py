"""Pages: the replay of an unmasking, and a model that runs in the browser."""
