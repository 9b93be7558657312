"""Steps for compute-sanitizer: as many experts as lanes, one, and half as many, in turn.

  compute-sanitizer --tool memcheck python sanitized.py fused,masked,loop
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pallas_pool as pp

L, E = 48, 512
for width in (16, 64):
    config = pp.PoolConfig(L, E, 258, width, width, step_map=True)
    for kernel in sys.argv[1].split(","):
        step = jax.jit(functools.partial(pp.step, config, kernel=kernel), donate_argnums=0)
        state = pp.init_state(config)
        rng = np.random.default_rng(0)
        promoted = 0
        for i in range(36):
            n = (width, 1, width // 2)[i % 3]
            ids = np.full(width, -1, np.int32)
            ids[:n] = rng.permutation(E)[:n]
            plan, state = step(state, jnp.int32(i % L), jnp.asarray(ids))
            promoted += int(plan.promoted_count)
        pp.check_state(config, state)
        print(kernel, width, "promoted", promoted, flush=True)
