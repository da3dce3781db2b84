"""What the CPU packages of verl and OpenRLHF share: a fork server, and sleep and patience for vLLM's CPU build.

Nothing is imported here: vLLM reaches the two packages in each of its processes.
"""
