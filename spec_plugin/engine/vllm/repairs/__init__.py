"""Every patch of vLLM, each with its reason and its guard."""
