"""The CPU quickstart: real GRPO in real verl or OpenRLHF with a real vLLM on a laptop, with one flag for speculation."""
