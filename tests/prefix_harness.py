"""Token ids and the hash key of tests of the prefix index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
KEY = bytes(range(16))


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int32)
