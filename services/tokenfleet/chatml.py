"""The ChatML chat template, as the emulated models have it. Decides only how messages become one prompt.

Refuses to know models and tokenizers. Source: OpenAI's ChatML, the template of Qwen and many others. The gateway
renders the same by jinja; a test holds both together.
"""

from collections.abc import Iterable, Mapping
from typing import Any

#: the same template in jinja; newlines are written in expressions, so that no environment option trims them
JINJA = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)


def render(messages: Iterable[Mapping[str, Any]]) -> str:
    """The prompt text of a conversation, ending where the assistant is to speak.

    A message has `role` and `content`: a string, null, or a list of parts of which those of type `text` are joined.
    """
    parts: list[str] = []
    for message in messages:
        content = message.get("content")
        if content is None:
            content = ""
        elif not isinstance(content, str):
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        parts.append(f"<|im_start|>{message['role']}\n{content}<|im_end|>\n")
    parts.append("<|im_start|>assistant\n")
    return "".join(parts)
