"""What runs inside vLLM: the worker extension, the scheduler, the self-test, the lossless allow-list, CPU repairs."""
