"""Agents as users write them, with the client of the API alone; some are faulty."""

import json
import os
import time
import urllib.error
import urllib.request


def client(base_url, **options):
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key="any", **options)


def ask(base_url, messages, **options):
    """Without any package, as a foreign program may."""
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as found:
        return json.loads(found.read())["choices"][0]["message"]


def post(base_url, score):
    body = json.dumps({"score": score}).encode()
    request = urllib.request.Request(f"{base_url}/reward", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as found:
            return found.status
    except urllib.error.HTTPError as error:
        return error.code


def user(text):
    return {"role": "user", "content": text}


def any_of_these(task, base_url):
    """The agent that the task names."""
    return globals()[task["agent"]](task, base_url)


def sums(task, base_url):
    """One question by the openai package; the share of the answer's characters that are right."""
    found = client(base_url).chat.completions.create(model="policy", messages=task["messages"])
    return float(task["answer"] in (found.choices[0].message.content or ""))


def plain_sums(task, base_url):
    """The same without the package."""
    return float(task["answer"] in ask(base_url, task["messages"])["content"])


def spoken(task, base_url):
    """What it was told: the verifier judges it."""
    return ask(base_url, task["messages"])["content"]


async def three_turns(task, base_url):
    """Goes on with what it is told, then posts a reward; a second one is refused."""
    messages = list(task["messages"])
    for n in range(3):
        told = ask(base_url, messages)
        messages += [{"role": "assistant", "content": told["content"]}, user(str(n))]
    assert (post(base_url, 0.5), post(base_url, 1.0)) == (200, 400)


def branches(task, base_url):
    """Goes on twice behind the same answer, once behind an edited one, and asks something else."""
    first = [*task["messages"]]
    told = ask(base_url, first)["content"]
    begun = [*first, {"role": "assistant", "content": told}]
    ask(base_url, [*begun, user("1")])
    ask(base_url, [*begun, user("2")])
    ask(base_url, [*first, {"role": "assistant", "content": "no"}, user("3")])
    ask(base_url, [user("else")])
    return 1.0


def raising(task, base_url):
    ask(base_url, task["messages"])
    raise KeyError("unit")


def sleeping(task, base_url):
    ask(base_url, task["messages"])
    time.sleep(3600)


def dying(task, base_url):
    os._exit(3)


def silent(task, base_url):
    return 1.0


def strange(task, base_url):
    ask(base_url, task["messages"])
    return {"score": 1}


def too_long(task, base_url):
    """A conversation that outgrows the context is refused, which ends the agent."""
    messages = [user("a")]
    while True:
        told = ask(base_url, messages)["content"]
        messages += [{"role": "assistant", "content": told}, user("b" * 60)]


def endless(task, base_url):
    while True:
        ask(base_url, task["messages"])


def foreign(task, base_url):
    """Another episode's key, a body that is none, several answers at once: each is refused, and why."""
    codes = []
    for url, options in (
        (base_url[:-4] + "0000", {}),
        (base_url, {"n": 2}),
        (base_url, {"tools": 3}),
        (base_url, {"tool_choice": "required"}),
    ):
        try:
            ask(url, task["messages"], **options)
        except urllib.error.HTTPError as error:
            codes.append(error.code)
    assert codes == [404, 400, 400, 400], codes
    ask(base_url, task["messages"])
    return 1.0


def twice(task, base_url):
    """The same question twice is two draws; a client that tries again is told what it was told before."""
    body = json.dumps({"messages": task["messages"]}).encode()

    def told(**headers):
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as found:
            return json.loads(found.read())["choices"][0]["message"]["content"]

    first, second = told(), told()
    assert told(**{"x-stainless-retry-count": "1"}) == first
    return float(first != second)


def tools(task, base_url):
    """Offers a tool, and goes on with whatever came of it."""
    add = {"name": "add", "description": "adds", "parameters": {"properties": {"a": {"type": "integer"}}}}
    offered = [{"type": "function", "function": add}]
    made = client(base_url)
    messages = list(task["messages"])
    found = made.chat.completions.create(model="policy", messages=messages, tools=offered)
    said = found.choices[0].message
    messages.append(said)
    calls = said.tool_calls or []
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls] or [user("?")]
    made.chat.completions.create(model="policy", messages=messages, tools=offered)
    return 1.0 + len(calls)


def stopped(task, base_url):
    """Ends its answers before a string, at once and as a stream; the last one is judged."""
    asked = list(task["messages"])
    assert ask(base_url, asked, stop="+7")["content"] == "5"
    asked += [{"role": "assistant", "content": "5"}, user("again")]
    assert streamed(base_url, asked, stop=["+7"]) == "5"


def streaming(task, base_url):
    return streamed(base_url, task["messages"])


def streamed(base_url, messages, **options):
    body = json.dumps({"messages": messages, "stream": True, **options}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body)) as found:
        events = [line.removeprefix(b"data: ") for line in found if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
