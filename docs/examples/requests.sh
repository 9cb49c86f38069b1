#!/bin/sh
# TokenFleet by curl; needs OPENAI_BASE_URL and OPENAI_API_KEY (`. DIR/env` of `tokenfleet up`).
set -eu

ask() {
    curl -sS --no-buffer "$OPENAI_BASE_URL/$1" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H 'Content-Type: application/json' -d "$2"
    echo
}

# an answer, a stream with usage, an exact version with a class and a deadline, a plain completion
ask chat/completions '{"model": "chat-8b", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}'
ask chat/completions '{"model": "chat-8b", "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true},
    "messages": [{"role": "user", "content": "Hello"}]}'
ask chat/completions '{"model": "chat-8b@2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}],
    "metadata": {"class": "batch", "task": "nightly", "deadline_ms": 60000}}'
ask completions '{"model": "chat-8b", "max_tokens": 8, "prompt": "Once upon a time"}'

# errors look like OpenAI's
ask chat/completions '{"model": "no-such-model", "messages": [{"role": "user", "content": "Hello"}]}'
