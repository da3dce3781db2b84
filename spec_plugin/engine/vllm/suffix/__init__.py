"""Suffix decoding in the engine: the tree of each prompt, and the one patch that lets vLLM's proposer use it."""
