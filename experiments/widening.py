"""Tensors made larger without changing what a network computes.

Channels of a wide axis are copies of those of a small one. What writes to the axis gives every
copy the same value, bit for bit; what reads it adds up a few copies with weights whose shares sum
to one, and reads the other copies in pairs with random weights of opposite sign. So every weight
is in use, none is zero, and the sums are the small network's up to the rounding of float32 sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.config import ConfigError

PADDING = -1
Rule = Callable[[jax.Array, jax.Array], jax.Array]  # (small tensor, random key) -> wide tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How a row of weights reads a wide axis.

    Attributes:
      share: [W] float32, part of the small weight; zero for copies that are read as noise.
      sign: [W] float32, factor of the noise: 1, -1 or -1/2, all exact in 16 bits; zero for copies
        with a share.
      partner: [W] int32, whose noise a copy takes: its own or that of an earlier copy.
    """

    share: np.ndarray
    sign: np.ndarray
    partner: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Axis:
    """A small axis inside a wide one.

    Attributes:
      real: channels of the small axis.
      source: [W] int32, the channel that each wide one copies; PADDING where it stays at zero.
    """

    real: int
    source: np.ndarray

    def __post_init__(self) -> None:
        missing = np.setdiff1d(np.arange(self.real), self.source)
        if missing.size:
            raise ConfigError(
                f"{self.real} channels do not fit {self.wide} wide ones: no copy of "
                f"{missing[:5].tolist()}"
            )

    @property
    def wide(self) -> int:
        return len(self.source)

    @property
    def padded(self) -> np.ndarray:
        """[W] bool, which channels copy none."""
        return self.source == PADDING

    @functools.cached_property
    def kept(self) -> Reading:
        """Reads the value of every small channel."""
        return self._reading(keep=True)

    @functools.cached_property
    def cancelled(self) -> Reading:
        """Reads nothing: the weights of all copies of a channel sum to zero."""
        return self._reading(keep=False)

    def blocks(self, size: int) -> Axis:
        """The axis of heads as an axis of their channels, `size` for each."""
        within = np.arange(size)
        source = np.where(
            self.padded[:, None], PADDING, self.source[:, None] * size + within
        ).reshape(-1)
        return Axis(real=self.real * size, source=source.astype(np.int32))

    def _reading(self, *, keep: bool) -> Reading:
        share, sign = np.zeros(self.wide, np.float32), np.ones(self.wide, np.float32)
        partner = np.arange(self.wide, dtype=np.int32)
        order = np.argsort(self.source, kind="stable")[self.padded.sum() :]
        for copies in np.split(order, np.cumsum(np.bincount(self.source[order]))[:-1]):
            odd = len(copies) % 2
            if keep:
                parts = [1.0] if len(copies) == 1 else [0.5, 0.25, 0.25] if odd else [0.5, 0.5]
                share[copies[: len(parts)]] = parts
                sign[copies[: len(parts)]] = 0.0
                copies = copies[len(parts) :]
            elif len(copies) == 1:
                raise ConfigError("a channel with one copy alone cannot be cancelled")
            elif odd:
                sign[copies[1:3]] = -0.5
                partner[copies[1:3]] = copies[0]
                copies = copies[3:]
            sign[copies[1::2]] = -1.0
            partner[copies[1::2]] = copies[::2]
        return Reading(share=share, sign=sign, partner=partner)


def spread(real: int, wide: int) -> Axis:
    """Every channel next to its copies, as many of each as fit, give or take one."""
    return Axis(real=real, source=(np.arange(wide) * real // wide).astype(np.int32))


def evenly(real: int, wide: int) -> Axis:
    """Every channel next to its copies, equally many of each; what is left over is padding.

    For axes that are normed: the mean square of the copies is that of the small axis.
    """
    copies = wide // real
    source = np.arange(wide) // max(copies, 1)
    return Axis(real=real, source=np.where(source < real, source, PADDING).astype(np.int32))


def exactly(real: int, wide: int) -> Axis:
    """One copy of each channel in its own place, then padding: token ids keep their numbers."""
    source = np.arange(wide)
    return Axis(real=real, source=np.where(source < real, source, PADDING).astype(np.int32))


def grouped(owners: Axis, ratio: int, wide_ratio: int) -> Axis:
    """Heads that share another head, as value heads share a key head.

    Args:
      owners: axis of the shared heads; wide head j belongs to wide owner j // wide_ratio.
      ratio: heads for each owner in the small model.
      wide_ratio: in the wide one.
    """
    source = np.empty(owners.wide * wide_ratio, np.int32)
    for owner in range(owners.real):
        mine = np.flatnonzero(np.repeat(owners.source, wide_ratio) == owner)
        source[mine] = owner * ratio + np.arange(len(mine)) % ratio
    return Axis(real=owners.real * ratio, source=source)


def joined(axes: Iterable[Axis]) -> Axis:
    """Axes side by side."""
    sources, real = [], 0
    for axis in axes:
        sources.append(np.where(axis.padded, PADDING, axis.source + real))
        real += axis.real
    return Axis(real=real, source=np.concatenate(sources).astype(np.int32))


def product(out: Axis, reads: Axis, *, cancelled: bool = False) -> Rule:
    """Weights [out, in]; padded outputs, or all of them where `cancelled`, come to zero."""

    def widen(weight: jax.Array, key: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)
        scale = weight.std(dtype=jnp.float32) / 2  # the size of a weight shared by two copies
        if cancelled:
            rows = _noise(first, weight.shape[0], reads.cancelled, scale, weight.dtype)
        else:
            reading = reads.kept
            # Padding lies past the end and has no share.
            shared = weight[:, reads.source] * reading.share.astype(weight.dtype)
            noise = _noise(first, weight.shape[0], reading, scale, weight.dtype)
            rows = jnp.where(reading.share > 0, shared, noise)
        padded = out.padded
        if padded.any():
            more = _noise(second, int(padded.sum()), reads.cancelled, scale, weight.dtype)
            rows = jnp.concatenate([rows, more])
        place = np.where(padded, weight.shape[0] + np.cumsum(padded) - 1, out.source)
        return rows if np.array_equal(place, np.arange(len(rows))) else rows[place]

    return widen


def rows(axis: Axis) -> Rule:
    """A tensor whose first axis is `axis`: biases, taps, values of heads; zero in padding."""

    def widen(x: jax.Array, key: jax.Array) -> jax.Array:
        return _gather(x, axis)

    return widen


def columns(axis: Axis) -> Rule:
    """A tensor [..., axis], zero in padding."""

    def widen(x: jax.Array, key: jax.Array) -> jax.Array:
        return copied(x, axis)

    return widen


def copied(x: jax.Array, axis: Axis) -> jax.Array:
    """Values [..., axis] of the small network as the wide one holds them."""
    return _gather(x.T, axis).T


def table(vocabulary: Axis, hidden: Axis) -> Rule:
    """Embeddings [V, H]; rows past the small vocabulary are random."""

    def widen(x: jax.Array, key: jax.Array) -> jax.Array:
        more = jax.random.normal(key, (vocabulary.wide - x.shape[0], x.shape[1]), jnp.float32)
        more = (more * x.std(dtype=jnp.float32)).astype(x.dtype)
        return copied(jnp.concatenate([x, more]), hidden)

    return widen


def norm(axis: Axis, *, zero_centred: bool = False) -> Rule:
    """Weights of an RMS norm over `axis`, smaller by what padding does to the mean square.

    With padding the norm's epsilon weighs a little more, by the share of padding.
    """
    factor = float(np.mean(~axis.padded)) ** 0.5

    def widen(weight: jax.Array, key: jax.Array) -> jax.Array:
        wide = weight[axis.source]  # padding takes the last channel's weight: times zero
        if factor == 1:
            return wide
        centre = 1.0 if zero_centred else 0.0
        return ((wide.astype(jnp.float32) + centre) * factor - centre).astype(weight.dtype)

    return widen


def same(x: jax.Array, key: jax.Array) -> jax.Array:
    """A tensor that the wide network has as it is."""
    return x


def widen_all(
    params: Mapping[str, jax.Array], rules: Mapping[str, Rule], key: jax.Array
) -> dict[str, jax.Array]:
    """Every parameter by the rule of its name.

    Raises:
      ValueError: names without a rule, or rules without a parameter.
    """
    if params.keys() != rules.keys():
        raise ValueError(f"parameters and rules differ in {sorted(params.keys() ^ rules.keys())}")
    keys = jax.random.split(key, len(rules))
    return {name: rules[name](params[name], k) for name, k in zip(sorted(rules), keys, strict=True)}


def _noise(
    key: jax.Array, count: int, reading: Reading, scale: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    noise = jax.random.normal(key, (count, len(reading.sign)), jnp.float32)
    # Rounded before it is given a sign, so that what cancels does so in the weights' own type.
    noise = (noise * scale).astype(dtype)
    return noise[:, reading.partner] * reading.sign.astype(dtype)


def _gather(x: jax.Array, axis: Axis) -> jax.Array:
    padded = axis.padded.reshape(-1, *[1] * (x.ndim - 1))
    wide = x[axis.source]
    return jnp.where(padded, 0, wide) if padded.any() else wide
