"""Pairs of a policy's own answers, for a reward model that is to be right about what the policy says now."""

import json
from pathlib import Path

from posttrain.data import Data, load_tasks
from posttrain.runtime.writers import NativeWriter
from posttrain.verifiers.model.verifier import RewardModel

LEAST = 10
"""Pairs without which a reward model is not worth training again."""


def pairs(
    directory: Path,
    model: str,
    prompts: str,
    judge: str,
    earlier: str = "",
    count: int = 256,
    skip: int = 0,
    samples: int = 2,
    max_tokens: int = 48,
    seed: int = 0,
) -> None:
    """Writes train.jsonl: the earlier pairs, and of the model's answers to each prompt the best and worst.

    `judge` is a reward model that stands in for people, and `samples` answers are drawn at temperature 1.
    A tenth of the new pairs goes to held_out.jsonl instead. `skip` prompts are left to other rounds.
    Raises ValueError if hardly any two answers differ.
    """
    tasks = load_tasks(Data(path=prompts, bad="skip"))[skip : skip + count]
    writer, says = NativeWriter(path=model, rows=32), RewardModel(paths=(judge,), dtype="bfloat16")
    talks = [task.messages for task in tasks]
    drawn = [
        writer.write(talks, max_tokens=max_tokens, temperature=1.0, seed=samples * seed + k)
        for k in range(samples)
    ]
    made = []
    for task, answers in zip(tasks, zip(*drawn, strict=True), strict=True):
        texts = list(dict.fromkeys(a.text for a in answers if a.text.strip()))
        verdicts = says.judge_all([(task, text) for text in texts])
        scored = ((verdict.score, text) for verdict, text in zip(verdicts, texts, strict=True))
        order = sorted((score, text) for score, text in scored if score is not None)
        if len(order) > 1 and order[-1][0] > order[0][0]:
            made.append({"prompt": list(task.messages), "chosen": order[-1][1], "rejected": order[0][1]})
    if len(made) < LEAST:
        raise ValueError(
            f"{len(made)} of {len(tasks)} prompts have two answers that differ, and {LEAST} are the least"
        )
    cut = len(made) // 10
    fresh = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in made]
    before = Path(earlier).read_text(encoding="utf-8") if earlier else ""
    (directory / "held_out.jsonl").write_text("".join(fresh[:cut]), encoding="utf-8")
    (directory / "train.jsonl").write_text(before + "".join(fresh[cut:]), encoding="utf-8")
