"""Which implementation an operation runs: one rule and one message for all of them."""

import contextlib
import functools
import typing
import warnings
from collections.abc import Iterator

import jax

Implementation = typing.Literal["auto", "pallas", "xla", "reference"]

# Data-centre GPUs from Ampere on: others have less shared memory than the kernels are cut for.
_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")
_automatic: Implementation = "auto"


@contextlib.contextmanager
def automatic(implementation: Implementation) -> Iterator[None]:
    """What "auto" stands for meanwhile, in all threads, in functions that are not traced yet.

    The kernels are made for one sequence: programs over many at once, by `vmap`, may prefer "xla".

    Args:
      implementation: see `choose`; "auto" changes nothing.

    Raises:
      ValueError: an unknown implementation.
    """
    global _automatic
    _check(implementation)
    before, _automatic = _automatic, implementation
    try:
        yield
    finally:
        _automatic = before


def choose(op: str, implementation: Implementation, refusal: str | None = None) -> Implementation:
    """Returns "pallas", "xla" or "reference" for an operation on the default device.

    "auto" takes the kernel where it runs compiled. On a GPU that it does not support it falls
    back to XLA and says so once; on a CPU XLA is the natural choice, and nothing is said.

    Args:
      op: name of the public function, for messages.
      implementation: what the caller asked for. "pallas" runs interpreted on a CPU.
      refusal: why the kernel does not take these shapes; None if it does.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: "pallas" on a device or shape it does not support.
    """
    _check(implementation)
    if implementation == "auto":
        implementation = _automatic
    if implementation not in ("auto", "pallas"):
        return implementation
    platform = jax.default_backend()
    reason = refusal or _unsupported_device(platform)
    if implementation == "pallas":
        if reason:
            raise NotImplementedError(f"{op} as a Pallas kernel: {reason}")
        return "pallas"
    if platform == "cpu":
        return "xla"
    if reason:
        _warn_once(op, reason)
        return "xla"
    return "pallas"


def interpreted() -> bool:
    """Whether kernels run interpreted: on a CPU, where there is nothing to compile them for."""
    return jax.default_backend() == "cpu"


def capability() -> str:
    """Compute capability of the default device, "unknown" if that is no NVIDIA GPU."""
    return str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))


def _check(implementation: Implementation) -> None:
    if implementation not in typing.get_args(Implementation):
        options = ", ".join(typing.get_args(Implementation))
        raise ValueError(f"implementation must be one of {options}, got {implementation!r}")


def _unsupported_device(platform: str) -> str | None:
    if platform == "cpu":
        return None
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, got platform {platform!r}"
    found = capability()
    if found in _CAPABILITIES:
        return None
    return f"it needs compute capability {', '.join(_CAPABILITIES)}, got {found}"


@functools.cache
def _warn_once(op: str, reason: str) -> None:
    warnings.warn(f"{op} falls back to XLA: {reason}", stacklevel=5)
