"""The base of all variants."""


class Variant:
    """An objective that changes some of what `inner` does, and leaves the rest to it."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":  # not there yet: copy and pickle ask before they fill it in
            raise AttributeError(name)
        return getattr(self.inner, name)
