"""Forward-mode differentiation: where it cannot go, it is refused with advice.

What must not live here: differentiating anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr

from fsdp_jax._callees import equations_inside

# The linear part of a custom_vjp, in jax 0.10 to 0.12: reverse mode transposes it away,
# forward mode leaves it in the program, which then cannot be compiled.
_LEFT_OVER = "custom_lin"
_REFUSED = "forward-mode autodiff"

_ADVICE = (
    "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian, jax.linearize) "
    "went through a custom_vjp, such as the gathers of a sharded module, which have a "
    "gradient but no forward-mode rule. Use reverse mode, which works to any order "
    "(jax.jacrev, or nnx.grad of nnx.grad). With respect to inputs alone forward mode "
    "works on global arrays, and with reshard_after_forward=False everywhere."
)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Say it in our words where JAX refuses it while tracing.

    Raises:
        NotImplementedError: JAX did.
    """
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        if _LEFT_OVER not in str(error) and _REFUSED not in str(error):
            raise
        raise NotImplementedError(_ADVICE) from error


def check(closed: ClosedJaxpr) -> None:
    """Raise if a traced program cannot be compiled because of it.

    Raises:
        NotImplementedError: it cannot.
    """
    if any(e.primitive.name == _LEFT_OVER for e in equations_inside(closed)):
        raise NotImplementedError(_ADVICE)
