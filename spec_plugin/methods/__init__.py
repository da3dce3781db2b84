"""Drafting methods, a module each: what vLLM is told, which draft is trained, what is harvested for it.

Called through the hook ``spec_method`` as the session begins; runs in every process that has one. A method is known in its own
module, in ``lifecycle.registry`` and nowhere else.
"""
