"""The built-in plugins that decide: when to draft, how the draft is trained, whether log-probs are the target's, what is logged.

Called through the hooks of ``spec_plugin.api.hookspecs``, as anybody's plugin; they run on every actor rank. None of them knows a
drafting method by its name.
"""
