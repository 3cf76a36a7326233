"""What an exported model contains besides its weights: the code that runs it, and its card."""

from pathlib import Path

FOLDER = Path(__file__).parent
