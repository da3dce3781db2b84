#!/bin/bash
# pluggy 1.6.0, `PluginManager.register` of a plugin that has a `functools.cached_property`, and of one that has a `property`.
#
# A good guess: a plugin's hooks are its functions that carry the marker; nothing else of it is touched before somebody asks for it.
# Seen with 1.6.0: register() reads every attribute, so both are computed there and then, before a host's "configure" hook has
#   told the plugin anything. A property is merely computed too early (and its exception is register()'s); a cached_property *keeps*
#   what it was then: the hook answers "unset" for ever, also after the plugin was configured. 1.7.0 reads neither.
# So a plugin that works with one of the two versions, both of which `pluggy>=1.5` allows, answers something else with the other.
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/ask.py" <<'PY'
import functools
from importlib.metadata import version

import pluggy

spec, impl = pluggy.HookspecMarker("host"), pluggy.HookimplMarker("host")


class Specs:
    @spec
    def configure(self, name): ...

    @spec(firstresult=True)
    def title(self): ...


class Plugin:
    name, computed = "unset", ()

    @property
    def plain(self):
        self.computed += ("property",)
        return self.name

    @functools.cached_property
    def cached(self):
        self.computed += ("cached_property",)
        return self.name.title()

    @impl
    def configure(self, name):
        self.name = name

    @impl
    def title(self):
        return self.cached


manager, plugin = pluggy.PluginManager("host"), Plugin()
manager.add_hookspecs(Specs)
manager.register(plugin)
computed = ",".join(sorted(plugin.computed)) or "nothing"
manager.hook.configure(name="configured")
print(version("pluggy"), "computed while it was registered:", computed, "| the hook says:", manager.hook.title())
PY
for version in 1.6.0 1.7.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "pluggy==$version"
  "$folder/$version/bin/python" "$folder/ask.py" | tee "$folder/said-$version"
done
grep -qx "1.6.0 computed while it was registered: cached_property,property | the hook says: Unset" "$folder/said-1.6.0"
grep -qx "1.7.0 computed while it was registered: nothing | the hook says: Configured" "$folder/said-1.7.0"
