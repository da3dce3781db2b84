"""What a plugin's author reads, and what crosses a process boundary: hooks, events, options, errors, spans.

Called by every other room, and by plugins of other people; runs in whichever process holds a session. It imports nothing of
the rest of this package.
"""
