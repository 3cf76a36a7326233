"""Global and shared memory of the emulator, and what is checked at each access.

- bounds: a global access lies in an argument of the kernel, a shared one in the program's memory
- alignment: to the size of the access
- races: two warps access the same place, at least one writes, and no barrier lies in between; or
  two programs of a grid do so
- shared memory is read only where something was written, and not while a copy (cp.async) still
  writes it; it is not overwritten while a matrix product (wgmma) still reads it
- a matrix product that reads shared memory through the asynchronous proxy sees what was written
  before only after a fence
"""

from __future__ import annotations

import ctypes

import numpy as np

WORD = 4  # bytes of shared memory that are watched together
NEVER = -1
SEVERAL_PROGRAMS = 1 << 62
WARPS = 64  # more than a program has
EPOCHS = 1 << 24  # more than a program has barriers


class Violation(Exception):
    """The kernel did what is wrong or undefined on a GPU."""


class AccessLog:
    """Who read and wrote each place last, as one number: program, barriers so far, warp."""

    def __init__(self, places, what):
        self.writer = np.full(places, NEVER, np.int64)
        self.reader = np.full(places, NEVER, np.int64)
        self.what = what

    @staticmethod
    def stamp(program, epoch, warp):
        return (program * EPOCHS + epoch) * WARPS + warp

    def _conflicts(self, seen, own, program, epoch):
        """Whether earlier accesses are of another program, or of another warp since the barrier."""
        first = self.stamp(program, 0, 0)
        since = self.stamp(program, epoch, 0)
        is_ordered = (first <= seen) & (seen < since)
        return (seen != NEVER) & (seen != own) & ~is_ordered

    def read(self, at, program, epoch, warps):
        """Note that `warps` (n,) read the places `at` (n,); raise if that is a race."""
        own = self.stamp(program, epoch, warps)
        if self._conflicts(self.writer[at], own, program, epoch).any():
            raise Violation(f"race: {self.what} is read after another wrote it, with no barrier")
        seen = self.reader[at]
        several = self.stamp(program, epoch, WARPS - 1)
        is_other = self._conflicts(seen, own, program, epoch)
        is_foreign = is_other & ((seen < self.stamp(program, 0, 0)) | (seen > several))
        now = np.where(is_foreign, SEVERAL_PROGRAMS, np.where(is_other, several, own))
        self.reader[at] = now
        together = self.reader[at] != now  # several warps read the place in this instruction
        self.reader[at[together]] = np.maximum(several, now[together])

    def write(self, at, program, epoch, warps):
        """Note that `warps` (n,) write the places `at` (n,); raise if that is a race."""
        own = self.stamp(program, epoch, warps)
        if self._conflicts(self.writer[at], own, program, epoch).any():
            raise Violation(f"race: {self.what} is written by two, with no barrier between them")
        if self._conflicts(self.reader[at], own, program, epoch).any():
            raise Violation(f"race: {self.what} is written after another read it, with no barrier")
        self.writer[at] = own


def scatter(data, at, values):
    """data[at] = values, for places (n, size) and bytes of n threads; they may agree on a place."""
    data[at] = values
    if not np.array_equal(data[at], values):
        raise Violation("race: threads write different values to the same place in one instruction")


class Region:
    """The memory of one argument, at an address of its own, far from all others."""

    def __init__(self, name, start, size, item, number):
        self.name = name
        self.start = start  # on the CPU
        self.end = start + size
        self.item = item  # bytes that are watched together
        # The kernel gets other addresses, so that one beyond an argument is in no other argument,
        # and that an address of 32 bits is in none. They are aligned as the tensor is, and some way
        # from the multiple of 2^40 by which an address before them is told.
        self.address = ((number + 1) << 40) + (1 << 20) + start % 4096
        self.data = np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
        self.log = AccessLog(-(-size // item), name)


class GlobalMemory:
    """The tensors that a launch may touch.

    tensors: pairs of a name and a tensor on the CPU; those that overlap share a region
    """

    def __init__(self, tensors):
        spans = []  # of memory: start, end, bytes of an item, name
        for name, x in tensors:
            if x.numel():
                last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
                size = (last + 1) * x.element_size()
                spans.append([x.data_ptr(), x.data_ptr() + size, x.element_size(), name])
        merged = []
        for span in sorted(spans):
            if merged and span[0] < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], span[1])
                merged[-1][2] = min(merged[-1][2], span[2])
                merged[-1][3] += f" and {span[3]}"
            else:
                merged.append(span)
        self.regions = [
            Region(name, start, end - start, item, i)
            for i, (start, end, item, name) in enumerate(merged)
        ]
        self.program = 0  # number of the program that runs

    def address(self, pointer):
        """Return the kernel's address of a place in one of the tensors; of others, a wrong one."""
        for region in self.regions:
            if region.start <= pointer < region.end:
                return region.address + pointer - region.start
        return 8  # an empty tensor, which must not be touched

    def _find(self, addresses, size, what):
        """Yield each region that is accessed, which accesses are in it, and their offsets."""
        if (addresses % np.uint64(size)).any():
            raise Violation(f"{what} of {size} bytes in global memory is not aligned")
        number = (addresses >> np.uint64(40)).astype(np.int64) - 1
        for i in np.unique(number):
            here = np.nonzero(number == i)[0]
            if not 0 <= i < len(self.regions):
                raise Violation(f"{what} of {size} bytes at {addresses[here[0]]:#x}: no argument")
            region = self.regions[i]
            offset = addresses[here].astype(np.int64) - region.address
            if (offset < 0).any() or (offset + size > len(region.data)).any():
                wrong = offset[(offset < 0) | (offset + size > len(region.data))][0]
                raise Violation(
                    f"{what} of {size} bytes at {wrong}, beyond {region.name} "
                    f"of {len(region.data)} bytes"
                )
            yield region, here, offset

    def _watch(self, region, offset, size, warps):
        """Return the places that are accessed, and the warp of each, both (n,)."""
        items = max(1, size // region.item)
        places = offset[:, None] // region.item + np.arange(items)
        return places.reshape(-1), np.repeat(warps, items)

    def read(self, addresses, size, warps, epoch):
        """Return the bytes (n, size) at addresses (n,) uint64, read by warps (n,)."""
        out = np.zeros((len(addresses), size), np.uint8)
        for region, here, offset in self._find(addresses, size, "a read"):
            at, who = self._watch(region, offset, size, warps[here])
            region.log.read(at, self.program, epoch, who)
            out[here] = region.data[offset[:, None] + np.arange(size)]
        return out

    def write(self, addresses, values, warps, epoch):
        """Write bytes (n, size) to addresses (n,) uint64, by warps (n,)."""
        size = values.shape[1]
        for region, here, offset in self._find(addresses, size, "a write"):
            at, who = self._watch(region, offset, size, warps[here])
            region.log.write(at, self.program, epoch, who)
            scatter(region.data, offset[:, None] + np.arange(size), values[here])


class SharedMemory:
    """The shared memory of one program.

    size: bytes
    """

    def __init__(self, size):
        size = -(-size // 16) * 16
        words = size // WORD
        self.data = np.full(size, 0xCD, np.uint8)  # no zeros, which could hide a missing write
        self.log = AccessLog(words, "shared memory")
        self.is_written = np.zeros(words, bool)
        self.copies = np.zeros(words, np.int32)  # that have been started and not waited for
        self.products = np.zeros(words, np.int32)  # that still read
        self.fence = np.full(words, NEVER, np.int64)  # number of fences when it was written
        self.epoch = 0  # number of barriers so far
        self.fences = 0  # number of proxy fences so far

    def _words(self, addresses, size):
        """Return the words of accesses of `size` bytes, (n, words of an access)."""
        at = addresses.astype(np.int64)
        if at.size and (at.min() < 0 or at.max() + size > len(self.data)):
            raise Violation(
                f"an access to shared memory at {at.min()} .. {at.max() + size} "
                f"of {len(self.data)} bytes"
            )
        if (at % size).any():
            raise Violation(f"an access of {size} bytes to shared memory is not aligned")
        return at[:, None] // WORD + np.arange(max(1, size // WORD))

    def _check_readable(self, words):
        if not self.is_written[words].all():
            raise Violation("shared memory is read where nothing was written")
        if self.copies[words].any():
            raise Violation("shared memory is read while cp.async still writes it")

    def read(self, addresses, size, warps):
        """Return the bytes (n, size) at addresses (n,), read by warps (n,)."""
        words = self._words(addresses, size)
        self._check_readable(words)
        self.log.read(words.reshape(-1), 0, self.epoch, np.repeat(warps, words.shape[1]))
        return self.data[addresses.astype(np.int64)[:, None] + np.arange(size)]

    def _note_write(self, words, warps):
        if self.copies[words].any():
            raise Violation("shared memory is written while cp.async still writes it")
        if self.products[words].any():
            raise Violation("shared memory is written while wgmma still reads it")
        self.log.write(words.reshape(-1), 0, self.epoch, np.repeat(warps, words.shape[1]))

    def write(self, addresses, values, warps):
        """Write bytes (n, size) to addresses (n,), by warps (n,)."""
        words = self._words(addresses, values.shape[1])
        self._note_write(words, warps)
        self.is_written[words] = True
        self.fence[words] = self.fences
        scatter(self.data, addresses.astype(np.int64)[:, None] + np.arange(values.shape[1]), values)

    def start_copy(self, addresses, size, warps):
        """Note that warps (n,) start to write `size` bytes each."""
        words = self._words(addresses, size)
        self._note_write(words, warps)
        np.add.at(self.copies, words, 1)

    def finish_copy(self, addresses, values, warps):
        """Write what a copy brought, when the threads that started it have waited for it.

        Other warps see it after a barrier, as after a write at this moment.
        """
        words = self._words(addresses, values.shape[1])
        np.subtract.at(self.copies, words, 1)
        self.write(addresses, values, warps)

    def start_product(self, addresses):
        """Return the two-byte numbers at addresses (n,), which a matrix product begins to read.

        It may read until finish_product is called with the words that are returned too.
        """
        words = np.unique(self._words(addresses, 2))
        self._check_readable(words)
        if (self.fence[words] >= self.fences).any():
            raise Violation("wgmma reads what was written with no fence.proxy.async since")
        # A warpgroup reads together: no warp of it may have written since the last barrier.
        self.log.read(words, 0, self.epoch, np.full(len(words), WARPS - 2))
        self.products[words] += 1
        return self.data.view(np.uint16)[addresses // 2], words

    def finish_product(self, words):
        self.products[words] -= 1
