"""Flax NNX modules of the three networks; no decoding logic."""
