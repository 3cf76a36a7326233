"""The page of `sample.py --html=FILE`: one self-contained file that replays how the text appeared.

The page itself is viewer.html, written by hand; the samples go into it as one JSON object. Whatever a model
writes stays text there: no "<" of it reaches the HTML parser, the page's script builds the DOM from text
nodes alone, and a Content-Security-Policy forbids every load.
"""

import json
from pathlib import Path

from common import Refusal, write_atomically

TEMPLATE = Path(__file__).with_name("viewer.html")
ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&"})  # in JSON these stand in strings only


def write_page(path, samples, settings):
    """Write a page that replays `samples`, and raise Refusal if the file cannot be written.

    settings  name -> value, shown as they are
    samples   a list of dicts, each of a text of n positions made in s steps:
              text, title, calls, seconds
              given   n booleans: the position belongs to the template and never changes
              tokens  n strings: the final token of each position, "" where another one carries the character
              frames  s lists, step by step, of the changes [position, token, confidence, alternatives];
                      token None: masked again; alternatives: up to 5 [token, probability]
    """
    path = Path(path)
    shown = {name: str(value) for name, value in settings.items()}
    data = json.dumps(dict(samples=samples, settings=shown), separators=(",", ":"), allow_nan=False)
    page = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data.translate(ESCAPES))
    try:
        if path.exists() and not path.is_file():  # a folder, or a device, which a rename would replace
            raise OSError(None, "it is no regular file")
        write_atomically(path, page.encode())
    except OSError as e:
        raise Refusal(f"--html={path} cannot be written ({e.strerror}); "
                      "give a file in a folder that exists and is yours") from None
