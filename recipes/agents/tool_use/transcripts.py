"""Writes conversations with a calculator, for a model that is to learn their form from nothing.

    text.txt     the same as text       (to learn a tokenizer from)
    sft.jsonl    conversations          (to fine-tune on)

A share of them asks the calculator and says what it returned; the others say the product at once, as one who
knew it by heart. None asks what `[task.arithmetic]` with the same low, high and held_out sets aside.
"""

import json
import random
from pathlib import Path

from posttrain.data.arithmetic import Arithmetic, arithmetic
from posttrain.envs.tools.settings import Tools
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.types import Task, Verdict

TEMPLATE = "What is {a} * {b}?"


def transcripts(
    directory: Path,
    *,
    low: int = 10,
    high: int = 99,
    held_out: int = 200,
    count: int = 6000,
    calling: float = 0.25,
    seed: int = 0,
) -> None:
    """Writes the two files; `calling` is the share of conversations that ask the calculator."""
    spec = Arithmetic(low=low, high=high, operators=("*",), held_out=held_out, template=TEMPLATE)
    tools = Tools(builtin=("calculator",))
    play = ToolUse(judge=lambda task, answer: Verdict(score=0.0), runners=tools.runners(), settings=tools)
    dice = random.Random(seed)
    tasks = arithmetic("train", spec)
    told = [conversation(play, dice.choice(tasks), dice.random() < calling) for _ in range(count)]
    lines = (json.dumps({"messages": messages}) + "\n" for messages in told)
    (directory / "sft.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = ("\n".join(f"{m['role']}\n{m['content']}" for m in messages) for messages in told)
    (directory / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def conversation(play: ToolUse, task: Task, calls: bool) -> list[dict[str, str]]:
    """A question with its answer, and between the two a call if it is to ask."""
    messages = [{"role": m["role"], "content": m["content"]} for m in play.start(task).messages]
    a, b = task.fields["operands"]
    if calls:
        called = play.shown.called.write(play.runners[0].tool, {"expression": f"{a} * {b}"})
        messages += [{"role": "assistant", "content": called}, {"role": "tool", "content": str(task.answer)}]
    return [*messages, {"role": "assistant", "content": f"It is {task.answer}"}]
