"""``spec-plugin project``: what the flag would do for a model on cards that are not here, from sizes alone or from a run."""

from spec_plugin.commands.project.command import project

__all__ = ["project"]
