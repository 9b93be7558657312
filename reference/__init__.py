"""The planner's step in plain jnp: one lane after another, to be read beside the semantics."""

from reference.planner import step

__all__ = ["step"]
