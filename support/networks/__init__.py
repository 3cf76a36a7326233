"""Pretrained networks of Hugging Face, trained and sampled as diffusion models."""
