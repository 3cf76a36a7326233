"""The base of all variants."""


class Variant:
    """An objective that changes some of what `inner` does, and leaves the rest to it.

    What inner.batch shows is made by inner.view: who overrides `view` overrides `batch` too, as
    time_conditioning.py does.
    """

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":  # not there yet: copy and pickle ask before they fill it in
            raise AttributeError(name)
        return getattr(self.inner, name)
