"""The hooks, fired in the order of a run: the session, the plugins that it makes, its fresh starts and its sums.

Called by the trainer's room on every actor rank, and by the engine's front end; each of these processes has one session. It
holds law 6: what fails in draft work turns speculation off, and the run goes on.
"""
