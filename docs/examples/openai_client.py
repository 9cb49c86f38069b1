"""The official `openai` client against TokenFleet; needs OPENAI_BASE_URL and OPENAI_API_KEY (`. DIR/env` of `up`)."""

import openai

# retries are TokenFleet's work: it knows other instances and sites, and says in Retry-After when to come again
client = openai.OpenAI(max_retries=0)

for model in client.models.list():
    print("model", model.id)

# Class, task and deadline are wishes; what the key is entitled to caps them.
answer = client.chat.completions.with_raw_response.create(
    model="chat-8b",
    messages=[{"role": "user", "content": "Hello"}],
    max_tokens=16,
    metadata={"class": "interactive", "task": "greeting", "deadline_ms": "10000"},
)
print("request", answer.headers["x-request-id"], "served at", answer.headers["x-tokenfleet-site"])
print("usage", answer.parse().usage)

with client.chat.completions.create(
    model="chat-8b@2",
    messages=[{"role": "user", "content": "Count to a hundred"}],
    max_tokens=100,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    for number, chunk in enumerate(stream):
        print(chunk.choices[0].delta.content or "" if chunk.choices else chunk.usage, end="", flush=True)
        if number == 20:
            break  # leaving ends the engine's work
print()

try:
    client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "Hello"}])
except openai.NotFoundError as error:
    print("error", error.status_code, error.code)
except openai.RateLimitError as error:
    print("come again in", error.response.headers["retry-after"], "s:", error.code)
