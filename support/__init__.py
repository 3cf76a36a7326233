"""What is not about diffusion, in rooms: data, training, infill, web; flags, ranks and more.

The folder kernels/ beside this one is imported as support.kernels, because a package of Hugging
Face, which transformers imports, is called kernels too: under this name the two never meet,
whichever comes first on Python's path.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parent.parent))
