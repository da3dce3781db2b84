"""A real small language model under GRPO, with the flag and without."""
