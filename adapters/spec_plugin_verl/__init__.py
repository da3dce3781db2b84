"""spec-plugin's adapter for verl. The one flag: ``actor_rollout_ref.model.external_lib=spec_plugin_verl``.

verl imports this module in TaskRunner, actor workers, vLLM servers and agent loops, before it looks anything up in its
registries; importing it puts three classes there, and nothing else happens until verl asks for one of them.
"""

from spec_plugin.adapter import configure_logging
from spec_plugin_verl.registration import register

configure_logging()
register()
