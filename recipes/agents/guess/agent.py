"""Plays a guessing game with a model behind the OpenAI chat API; nothing here knows of posttrain."""

import re

from openai import OpenAI

GUESSES = 4
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="any")


def play(task, base_url):
    """The reward of a game: the share of its guesses that heed all hints before them."""
    client = CLIENT.with_options(base_url=base_url)
    messages, secret = list(task["messages"]), int(task["answer"])
    low, high, heeded = 1, 15, 0
    for made in range(1, GUESSES + 1):
        answer = client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content
        guess = int(said) if re.fullmatch(r"\d{1,2}", said) else 0
        heeded += low <= guess <= high
        if guess == secret:
            break
        told = "higher" if guess < secret else "lower"
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    return heeded / made
