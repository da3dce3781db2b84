"""vLLM's side, and all that imports it: worker extension, scheduler, patches with their guards, look-ups.

Called by the engine's front end and by vLLM itself, by name; runs in EngineCore and in the workers.
"""
