"""A decoder-only language model whose MLPs are mixtures of experts.

After Mixtral (Jiang et al., 2024, arXiv:2401.04088): a router chooses two of several
SwiGLU experts for every token and weighs them by a softmax over the two. Tokens are
sorted by expert and none is dropped, as in MegaBlocks (Gale et al., 2022,
arXiv:2211.15841). Two terms of the loss keep the router in order: the z-loss of ST-MoE
(Zoph et al., 2022, arXiv:2202.08906) and the load-balancing loss of the Switch
Transformer (Fedus et al., 2021, arXiv:2101.03961).

Simplified: the load is balanced within each row of the batch rather than over all of
it, so that every term of the loss is a mean over rows; attention has no sliding window.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from .decoder import Attention, DecoderConfig, make_embed, make_linear, make_norm

Losses = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class MoEConfig(DecoderConfig):
    """Sizes of the model; `mlp_width` is that of one expert."""

    num_kv_heads: int = 2
    activation: Callable[[jax.Array], jax.Array] = nnx.silu
    num_experts: int = 8
    experts_per_token: int = 2


class Experts(nnx.Module):
    """SwiGLU experts with stacked weights, each applied to rows of its own."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        num, width, hidden = config.num_experts, config.width, config.mlp_width
        self.activation = config.activation
        self.gate = nnx.Param(init(rngs.params(), (num, width, hidden)))
        self.up = nnx.Param(init(rngs.params(), (num, width, hidden)))
        self.down = nnx.Param(init(rngs.params(), (num, hidden, width)))

    def __call__(self, x: jax.Array, counts: jax.Array) -> jax.Array:
        """Apply expert 0 to the first `counts[0]` rows, 1 to the next, and so on."""

        def project(x: jax.Array, kernels: nnx.Param[jax.Array]) -> jax.Array:
            return jax.lax.ragged_dot(x, kernels[...].astype(x.dtype), counts)

        hidden = self.activation(project(x, self.gate)) * project(x, self.up)
        return project(hidden, self.down)


class MixtureOfExperts(nnx.Module):
    """Send each token to its experts, and add up what they return."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = make_linear(config, rngs, config.width, config.num_experts)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Losses]:
        """Map `(rows, length, width)` to the same shape, and the router's losses."""
        k, num_experts = self.config.experts_per_token, self.config.num_experts
        logits = self.router(x).astype(jnp.float32)  # (rows, length, experts)
        best, chosen = jax.lax.top_k(logits, k)  # (rows, length, k)
        weights = nnx.softmax(best).astype(x.dtype)

        expert = chosen.reshape(-1)  # of each copy: token 0, 0, 1, 1, ... for k = 2
        order = jnp.argsort(expert)
        copies = x.reshape(-1, x.shape[-1])[order // k]
        out = self.experts(copies, jnp.bincount(expert, length=num_experts))
        out = jnp.zeros_like(out).at[order].set(out)
        out = out.reshape(*chosen.shape, -1)
        return jnp.einsum("rtkd,rtk->rtd", out, weights), router_losses(logits, chosen)


def router_losses(logits: jax.Array, chosen: jax.Array) -> Losses:
    """Means over rows of `(rows, length, experts)` logits and `(..., k)` choices."""
    num_experts = logits.shape[-1]
    z_loss = jnp.square(nnx.logsumexp(logits, axis=-1)).mean()
    share = nnx.one_hot(chosen, num_experts).mean(axis=(1, 2))  # (rows, experts)
    probability = nnx.softmax(logits).mean(axis=1)  # (rows, experts)
    balance = num_experts * (share * probability).sum(axis=-1).mean()
    return {"z_loss": z_loss, "load_balance": balance}


class MoELayer(nnx.Module):
    """Attention and experts, each behind a norm and around a skip connection."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = make_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = make_norm(config, rngs)
        self.moe = MixtureOfExperts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Losses]:
        x = x + self.attention(self.norm1(x))[0]
        out, losses = self.moe(self.norm2(x))
        return x + out, losses


class MoETransformer(nnx.Module):
    """Tokens `(rows, length)` to logits `(rows, length, vocab_size)` and losses."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.embed = make_embed(config, rngs)
        self.layers = nnx.List(
            [MoELayer(config, rngs=rngs) for _ in range(config.depth)]
        )
        self.norm = make_norm(config, rngs)
        self.head = make_linear(config, rngs, config.width, config.vocab_size)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Losses]:
        """Logits of the next tokens, and the router's losses as means over layers."""
        x, all_losses = self.embed(tokens), []
        for layer in self.layers:
            x, losses = layer(x)
            all_losses.append(losses)
        means = jax.tree.map(lambda *each: sum(each) / len(each), *all_losses)
        return self.head(self.norm(x)), means
