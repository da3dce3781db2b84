"""What the CPU packages of the trainers share: a fork server, shims, and sleep and patience for vLLM's CPU build.

Nothing is imported here: vLLM reaches those packages in each of its processes.
"""

#: variable: most requests that an engine runs at once, for trainers that have no option for it; none: what they or vLLM choose
MAX_NUM_SEQS = "SPEC_PLUGIN_CPU_MAX_NUM_SEQS"
