"""Memory that the engine lends a decode process for one item.

    made    by the engine, as long as the item may become: it takes none before it is written to
    lent    the process writes to it, and can make it no longer
    taken   cut to what is used, sealed for good, mapped read-only; whoever still has it can change it no more

No descriptor of the process's comes back: to close one of those can take as long as whoever made it likes.
"""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""F_SEAL_WRITE is refused by the kernel while anybody has writable pages of it mapped."""


class Output:
    """A block in which it is open; what was mapped outlives it.

    Args:
        most: bytes that may come out.
    """

    def __init__(self, most: int) -> None:
        self.descriptor = os.memfd_create("decoded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, most)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def taken(self, length: int) -> mmap.mmap:
        """So many bytes of it, which its process cannot change, or take away, any more.

        Raises:
            ValueError: it could, or there are not so many.
            OSError: it cannot be mapped just now; each mapping takes a descriptor of the engine's.
        """
        try:
            os.ftruncate(self.descriptor, length)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise ValueError(f"what it wrote cannot be taken: {error.strerror}") from error
        if os.fstat(self.descriptor).st_size != length:  # looked at last: it may have been cut in between
            raise ValueError("what it wrote was cut")
        # Private, which is the same where nobody can write: kernels before 6.7 refuse to share what is sealed.
        return mmap.mmap(self.descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ)
