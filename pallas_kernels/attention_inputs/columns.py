"""Where the heads of a layer lie in its projections."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadColumns:
    """First column of each part in an array [N, ...] that may hold them side by side.

    Multiples of 8 keep the kernel's reads wide.

    Attributes:
      q: the first query head; head h begins at `q + h * step`.
      k: keys, G * D.
      v: values, G * D.
      step: columns from one query head to the next, 2 * D where an output gate's lie between.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    step: int
