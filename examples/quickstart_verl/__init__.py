"""The CPU quickstart: real GRPO in real verl with a real vLLM on a laptop, with one flag for speculative rollouts."""
