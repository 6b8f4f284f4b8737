"""A message, a tool, and a call of the tool as a model generates it."""

from __future__ import annotations

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ós </tool_call>lo"}}\n</tool_call>'
CLOSING = "\n</think>\n\n"
