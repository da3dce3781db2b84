"""What is known before anything starts: which vLLM class, runner and hub folder a run would get, and what would be refused.

Called by the commands, by adapters as they read a trainer's options, and by methods; runs in the driver, or in a person's shell.
It reads vLLM's sources and imports neither vLLM nor torch.
"""
