"""The n-gram method: drafts are looked up in the request's own text, nothing is trained."""

from __future__ import annotations

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.methods.tables import common_settings, refuse_options_of_a_draft

#: length of the end of the text that is looked up: from the longest down to the shortest
LONGEST, SHORTEST = 4, 2


class NgramMethod:
    """Prompt lookup (Saxena, 2023): what followed the last few tokens the last time that they occurred is the draft.

    It finds nothing for most requests of most steps. vLLM's acceptance length counts only those with a draft;
    ``spec/tokens_per_forward`` counts all, and so do controller and guard.
    """

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """Any target, any k; served from the first rollout, as long as it pays.

        Raises:
            SpecConfigError: if options of a draft are set.
        """
        if config.method != "ngram":
            return None
        refuse_options_of_a_draft(config)
        settings = {
            "method": "ngram",
            **common_settings(config, target),
            "prompt_lookup_max": LONGEST,
            "prompt_lookup_min": SHORTEST,
        }
        return Method("ngram", settings, pretrained=True, variable_length=True)
