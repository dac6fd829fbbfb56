"""Tools in chat templates: what is proved of each, text of tools that forges no turn, a resumed run."""

import json
import re

import pytest
from transformers import AutoTokenizer

from mathcheck.plugin.number import Number
from posttrain.base.chat import Chat
from posttrain.base.spelling import Spelling
from posttrain.envs.tools.settings import Tools
from posttrain.envs.tools.template_support import Shown, find_display
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.types import Task, UserError

_HEAD = (
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CALLS = {
    "hermes": ('<tool_call>\\n{"name": "', '", "arguments": ', "}\\n</tool_call>"),
    "llama3": ('{"name": "', '", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]"),
}


def template(name):
    """ChatML that shows tools, and writes a call so."""
    before, between, behind = _CALLS[name]
    call = (
        f"{{{{ '{before}' + c.function.name + '{between}' + c.function.arguments | tojson + '{behind}' }}}}"
    )
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return _HEAD + CHATML.replace("{{ '<|im_end|>", calls + "{{ '<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    """One token a character, and ChatML's marks."""
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def chat(tokenizer):
    """chat(template) -> a chat with it."""
    return lambda text: Chat(tokenizer, template=text)


@pytest.mark.parametrize("name", _CALLS)
def test_a_template_that_shows_tools_is_given_them(name, chat):
    assert find_display(chat(template(name)), "auto") == Shown(name, tools=True, results=True)


def test_what_a_template_does_not_show_is_said_in_messages(chat):
    plain = Shown("plain", tools=False, results=True)
    assert find_display(chat(CHATML), "auto") == plain
    assert find_display(chat(CHATML), "hermes") == Shown("hermes", tools=False, results=True)
    twice = template("hermes").replace("{{ t | tojson }}", "{{ t | tojson }}{{ t | tojson }}")
    assert find_display(chat(twice), "auto") == plain, "a tool that is shown twice"
    spaced = template("hermes").replace("{{ t | tojson }}", "{{ t.function.name }}")
    assert find_display(chat(spaced), "auto") == plain, "a tool whose description is left out"
    quoted = CHATML.replace("m.content", "(m.content | tojson if m.role == 'tool' else m.content)")
    assert not find_display(chat(quoted), "auto").results
    trimmed = CHATML.replace("m.content", "(m.content | trim)")
    assert find_display(chat(trimmed), "auto").results, "results have no blanks at their ends"
    wants = CHATML.replace(
        "{{ '<|im_start|>'",
        "{% if m.role == 'tool' %}{{ raise_exception('no call') }}{% endif %}{{ '<|im_start|>'",
    )
    assert not find_display(chat(wants), "auto").results
    assert find_display(chat("none"), "auto") == plain
    assert "a system message describes the tools" in str(plain)


def test_a_template_is_not_given_tools_in_vain(chat, tokenizer):
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    question = [{"role": "user", "content": "Where?"}]
    assert "Looks." in tokenizer.decode(chat(template("hermes")).render(question, [tool]))
    with pytest.raises(UserError, match="does not show tools"):
        chat(CHATML).render(question, [tool])


def test_text_of_tools_forges_no_special_token(chat, tokenizer):
    made = chat(template("hermes"))
    marks = set(tokenizer.all_special_ids)
    forged = "".join(tokenizer.convert_ids_to_tokens(sorted(marks)))
    question = [{"role": "user", "content": "Where?"}]

    def count(tokens):
        return sum(token in marks for token in tokens)

    def tool(text):
        schema = {"type": "object", "properties": {f"a{text}": {"type": "string", "enum": [text]}}}
        return {"type": "function", "function": {"name": "look", "description": text, "parameters": schema}}

    honest, forging = (made.render(question, [tool(text)]) for text in ("Looks.", forged))
    assert count(forging) == count(honest)
    assert forged in tokenizer.decode(forging)
    said = made.extend([], [{"role": "tool", "name": forged, "tool_call_id": "call00000", "content": forged}])
    plain = made.extend([], [{"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "x"}])
    assert count(said) == count(plain)
    assert Spelling(tokenizer).guard_all({"a": [1, None, "x"]}) == {"a": [1, None, "x"]}


def rows(path, update):
    """The samples of an update."""
    return [json.loads(line) for line in (path / f"samples/{update:06}.jsonl").read_text().splitlines()]


@pytest.fixture
def calling(online, tiny, write, run_cli, tmp_path):
    """A recipe whose policy has been shown calls, so that some of its responses are some."""
    tools = {"builtin": ("calculator",), "max_turns": 3, "max_calls": 2}
    settings = Tools(**tools)
    env = ToolUse(judge=Number(), runners=settings.runners(), settings=settings)
    asked = env.start(Task(id="sum", messages=({"role": "user", "content": "2+3="},))).messages
    said = ("<call calculator>2+3</call>", "<call calculator>1/0</call>", "5", "<call calc", "7")
    taught = [{"messages": [*asked, {"role": "assistant", "content": each}]} for each in said]
    (tmp_path / "taught.jsonl").write_text("".join(json.dumps(each) + "\n" for each in taught))
    sft = {
        "model": {"path": str(tiny), "dtype": "float32", "device": "cpu"},
        "method": {"name": "sft"},
        "task": {"data": {"path": str(tmp_path / "taught.jsonl")}},
        "optim": {"lr": 0.01},
        "run": {"updates": 60, "threads": 1},
        "batch": {"batch_size": 5},
    }
    done = run_cli("train", write(sft), "--run-dir", tmp_path / "taught", "--quiet")
    assert done.code == 0, done.err
    return online | {
        "model": online["model"] | {"path": str(tmp_path / "taught/checkpoints/step_000060/model")},
        "task": online["task"] | {"tools": tools | {"builtin": ["calculator"]}},
        "sampling": {"max_new_tokens": 32},
        "record": {"tokens": 0},
        "checkpoint": {"every": 1},
    }


def test_a_run_with_tools_is_trained_counted_and_resumed(calling, write, run_cli, tmp_path):
    whole = write(calling | {"run": {"updates": 3, "threads": 1}})
    done = run_cli("train", whole, "--run-dir", tmp_path / "whole", "--quiet")
    assert done.code == 0, done.err
    metrics = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("tools/calls", 0) > 0 for line in metrics)
    found = [row for update in (1, 2, 3) for row in rows(tmp_path / "whole", update)]
    called = [row for row in found if row["turns"] > 1]
    assert called, "no response was a call"
    for row in called:
        shown = "".join(
            piece for piece, sampled in zip(row["pieces"], row["sampled"], strict=True) if not sampled
        )
        assert re.search(r"<\|im_start\|>tool\n(5|raised: |malformed: |unknown: )", shown), shown
    half = tmp_path / "half"
    part = write(calling | {"run": {"updates": 2, "threads": 1}}, name="part")
    assert run_cli("train", part, "--run-dir", half, "--quiet").code == 0
    done = run_cli("train", whole, "--run-dir", half, "--resume", "--quiet")
    assert done.code == 0, done.err
    drawn = [
        [(row["pieces"], row["sampled"]) for row in rows(path, 3)] for path in (half, tmp_path / "whole")
    ]
    assert drawn[0] == drawn[1]


def test_validate_plays_an_episode(online, write, run_cli):
    tools = {"task": {"tools": {"builtin": ["calculator"]}}, "sampling": {"max_new_tokens": 60}}
    done = run_cli("validate", write(online, tools))
    assert done.code == 0, done.err
    assert "results are messages of the role tool" in " ".join((done.out + done.err).split())
    said = " ".join(done.out.split())
    assert "⟦<call calculator>(12 - 5) * 3</call><|im_end|>⟧" in said
    assert "<|im_start|>tool 21<|im_end|>" in said
