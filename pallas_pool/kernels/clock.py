"""Clocks of two int32 words, `epoch * 2**31 + word` with both words >= 0, as scalars of a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_pool.config import INT32_MAX

Clock = tuple[jax.Array, jax.Array]  # epoch, word


def tick(clock: Clock, by: jax.Array) -> Clock:
    """The clock `by` (0 or 1) later."""
    epoch, word = clock
    sum_ = word + by
    return epoch + (sum_ < 0).astype(jnp.int32), sum_ & INT32_MAX


def minus_product(clock: Clock, a: jax.Array, b: int) -> Clock:
    """`clock - a * b`, with an epoch below 0 where that is negative; 0 <= a < 2**31, 0 < b <= 2**15.

    `a` is multiplied in digits of 16 bits, so that no product leaves int32; the sign bit of a sum of
    two words is its carry.
    """
    high = (a >> 16) * b
    low = (a & 0xFFFF) * b
    sum_ = ((high & 0x7FFF) << 16) + low
    epoch = (high >> 15) + (sum_ < 0).astype(jnp.int32)
    difference = clock[1] - (sum_ & INT32_MAX)
    borrow = (difference < 0).astype(jnp.int32)
    return clock[0] - epoch - borrow, difference & INT32_MAX


def before(a: Clock, b: Clock) -> jax.Array:
    """a < b, of scalars or lane by lane."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def remainder(clock: Clock, n: jax.Array) -> jax.Array:
    """`clock % n` for n >= 1. The loop runs only once an epoch has passed."""

    def add(a, b):  # (a + b) % n without leaving int32
        return jnp.where(a >= n - b, a - (n - b), a + b)

    epoch, word = clock
    doublings = jnp.where(epoch > 0, jnp.int32(31), epoch)
    shifted = lax.fori_loop(jnp.int32(0), doublings, lambda _, r: add(r, r), lax.rem(epoch, n))
    return add(shifted, lax.rem(word, n))
