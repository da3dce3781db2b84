"""The kit's calculator as a tool of verl's: the file of ``rollout.multi_turn.function_tool_path``."""

from spec_plugin_conformance import calculator
from verl.tools.function_tool import function_tool

function_tool(calculator.add)
