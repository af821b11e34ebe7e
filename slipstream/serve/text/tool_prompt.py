"""Tools and calls in a conversation, as templates expect them, and as plain text for templates without tools. Pure.

The plain text is the one that Hermes and Qwen models are trained on. Other small models follow it best too.
"""

import json
from typing import Any

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def call_for_template(call: Any) -> dict[str, Any]:
    """An assistant's earlier call: its arguments as the object that templates write out, or as the text that they are.

    Clients send back what a model wrote, and a call that max_tokens cut is not valid JSON.
    """
    if call.type == "custom":
        function = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
        return {"id": call.id, "type": "function", "function": function}
    text = call.function.arguments
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = text
    arguments = arguments if isinstance(arguments, dict) else text
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def in_plain_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation for a template without tools: tools go into the system message, calls and results into messages."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("_results"):
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "_results": True})
        elif message.get("tool_calls"):
            calls = [json.dumps(c["function"], ensure_ascii=False) for c in message["tool_calls"]]
            parts = [message["content"]] if message["content"] else []
            parts += [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
            rest = {k: v for k, v in message.items() if k != "tool_calls"}
            out.append({**rest, "content": "\n".join(parts)})
        else:
            out.append(message)
    out = [{k: v for k, v in m.items() if k != "_results"} for m in out]
    if not tools:
        return out
    shown = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    if out and out[0]["role"] == "system":
        return [{**out[0], "content": f"{out[0]['content']}\n\n{shown}"}, *out[1:]]
    return [{"role": "system", "content": shown}, *out]
