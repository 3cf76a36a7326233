"""The base of all variants."""


class Variant:
    """An objective that changes some of what `inner` does, and leaves the rest to it.

    inner.batch calls inner.view, so a variant that overrides `view` must override `batch` too, as
    time_conditioning.py does.
    """

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":  # not set yet: copy and pickle look it up before they set it
            raise AttributeError(name)
        return getattr(self.inner, name)
