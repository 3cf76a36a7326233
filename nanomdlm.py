"""The name under which kernels/, support/ and variants/ are imported: nanomdlm.kernels, and so on.

Those are the folders beside this file. (The wheel has them in a folder of this name instead.) So
the imports are the same in a clone and after an installation, and nothing is called `kernels`,
which is also the name of a package of Hugging Face.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
