"""Puts a whole answer together from an engine's stream, for clients that asked for no stream.

Engines are asked to stream whenever the request allows it (`tokenfleet.gateway.openai.ASSEMBLED`): only a stream tells
when the first token came, which is what frees an instance's prefill room for the next request, and only a stream shows
within seconds that an engine died. Decides how deltas become a message; refuses to know when and from where.
"""

from typing import Any

import msgspec

from tokenfleet.gateway.openai import Endpoint

_decode = msgspec.json.Decoder(dict[str, Any]).decode

#: fields of a stream's chunks that a whole answer does not have
_CHUNK_ONLY = ("choices", "object", "usage")


class Assembly:
    """One answer in the making: `take` the events that the scanner passed, then `body`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}
        #: bytes taken in
        self.size = 0

    def take(self, events: bytes) -> None:
        """Whole events, as `Scanner.feed` returns them."""
        self.size += len(events)
        for event in events.split(b"\n\n"):
            if event.startswith(b"data:"):
                self._chunk(_decode(event[5:]))

    def body(self) -> bytes:
        """The answer as JSON, in the shape of the endpoint's whole answers."""
        for (index, name), parts in self._texts.items():
            choice = self._choices[index]
            target = choice["message"] if self._endpoint == "chat" else choice
            target[name] = "".join(parts)
        chat = self._endpoint == "chat"
        answer = {
            **self._head,
            "object": "chat.completion" if chat else "text_completion",
            "choices": [choice for _, choice in sorted(self._choices.items())],
            "usage": self._usage,
        }
        return msgspec.json.encode(answer)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        for name, value in chunk.items():
            if name not in _CHUNK_ONLY and (value is not None or name not in self._head):
                self._head[name] = value
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = self._begin(index)
            for name, value in part.items():
                if name == "delta":
                    self._delta(index, choice["message"], value or {})
                elif name == "text":
                    self._texts.setdefault((index, "text"), []).append(value or "")
                elif value is not None or name not in choice:
                    choice[name] = value

    def _begin(self, index: int) -> dict[str, Any]:
        if self._endpoint != "chat":
            return {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        message = {"role": "assistant", "content": None, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": None}

    def _delta(self, index: int, message: dict[str, Any], delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                self._texts.setdefault((index, name), []).append(value)
            elif value is not None or name not in message:
                message[name] = value
