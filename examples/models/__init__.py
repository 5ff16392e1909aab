"""Public architectures in plain Flax NNX: none of these files knows of sharding."""
