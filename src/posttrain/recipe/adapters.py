"""The rules of adapters and of the frozen weights under them, for the table in rules.py."""

from dataclasses import fields

from posttrain.learner.lora import Lora
from posttrain.recipe.rule import Rule

ADAPTER_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            f"lora.{field.name}",
            "lora.rank is 0",
            lambda c: not c.recipe.lora.rank,
            "is never read: lora.rank is 0",
            "leave it out",
            unread=True,
        )
        for field in fields(Lora)
        if field.name != "rank"
    ),
    Rule(
        "model.quantize",
        "lora.rank is 0",
        lambda c: c.recipe.model.is_quantized and not c.recipe.lora.rank,
        "weights of 4 bits cannot be trained, and there is no adapter",
        "set lora.rank, as to 16",
    ),
    Rule(
        "model.quantize",
        "train.shard is true",
        lambda c: c.recipe.model.is_quantized and c.recipe.train.shard,
        "weights of 4 bits are not cut among ranks",
        "leave train.shard out: each rank has all of them",
    ),
)
