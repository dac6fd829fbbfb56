"""Bad input to the command line: one line with place, problem and fix; exit code 2; no files left or lost.

Most cases go through `posttrain train`. A refused recipe leaves no run directory.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Tables = dict[str, Any]
Fragments = tuple[str, ...]

# ---------------------------------------------------------------- keys and values: (tables, fragments)

UNKNOWN_KEYS: dict[str, tuple[Tables, Fragments]] = {
    f"unknown key {table}.{key}": (
        {table: {key: 1}},
        ("recipe.toml:", table, f"unknown key '{key}'", f"'{near}'"),
    )
    for table, key, near in (
        ("model", "pathh", "path"),
        ("model", "dtpye", "dtype"),
        ("run", "update", "updates"),
        ("run", "sead", "seed"),
        ("sampling", "temprature", "temperature"),
        ("sampling", "max_tokens", "max_new_tokens"),
        ("engine", "row", "rows"),
        ("rollout", "group", "groups"),
        ("rollout", "groupsize", "group_size"),
        ("steps", "epoch", "epochs"),
        ("optim", "lrr", "lr"),
        ("optim", "weight_deacy", "weight_decay"),
        ("eval", "evry", "every"),
        ("checkpoint", "kep", "keep"),
        ("track", "sink", "sinks"),
        ("lora", "rnk", "rank"),
        ("critic", "knd", "kind"),
        ("reference", "refresh_evry", "refresh_every"),
        ("trust", "max_lk", "max_kl"),
        ("rollout", "repaly", "replay"),
    )
} | {
    "unknown table": ({"optimizer": {"lr": 1.0}}, ("unknown key 'optimizer'", "'optim'")),
    "unknown table far off": ({"zzz": {"a": 1}}, ("unknown key 'zzz'", "known here: model")),
    "unknown key task": ({"task": {"arithmetik": {}}}, ("unknown key 'arithmetik'", "'arithmetic'")),
    "unknown key arithmetic": ({"task": {"arithmetic": {"hihg": 9}}}, ("unknown key 'hihg'", "'high'")),
    "unknown key verifier": ({"verifier": {"nummber": {}}}, ("unknown key 'nummber'", "'number'")),
    "unknown key number": ({"verifier": {"number": {"were": "last"}}}, ("unknown key 'were'", "'where'")),
}

WRONG_TYPES: dict[str, tuple[Tables, Fragments]] = {
    f"type of {table}.{key}: {value!r}": ({table: {key: value}}, (f"{table}.{key}", ", got ", fragment))
    for table, key, value, fragment in (
        ("run", "updates", "ten", "valid integer"),
        ("run", "updates", 2.5, "integer"),
        ("run", "updates", True, "integer"),
        ("run", "updates", [3], "integer"),
        ("run", "seed", "0", "integer"),
        ("optim", "lr", "1e-5", "number"),
        ("optim", "lr", True, "number"),
        ("optim", "betas", [0.9, "x"], "number"),
        ("optim", "betas", [0.9, 0.99, 0.999], "item"),
        ("optim", "betas", 0.9, "array"),
        ("optim", "schedule", "cosinus", "'cosine'"),
        ("model", "dtype", "fp16", "'float32' or 'float64'"),
        ("model", "path", 7, "string"),
        ("model", "random_init", "yes", "boolean"),
        ("model", "random_init", 1, "boolean"),
        ("sampling", "stop", "\n", "array"),
        ("sampling", "stop", [1], "string"),
        ("sampling", "temperature", "hot", "number"),
        ("rollout", "groups", 2.5, "integer"),
        ("rollout", "select", 1, "string"),
        ("lora", "targets", "q_proj", "array"),
        ("lora", "rank", 4.5, "integer"),
        ("track", "sinks", "wandb", "array"),
        ("steps", "gradient_checkpointing", "full", "boolean"),
        ("verifier", "weights", {"number": "2"}, "number"),
        ("critic", "kind", "separate", "'shared' or 'own'"),
        ("critic", "path", 3, "string"),
        ("reference", "refresh_every", 1.5, "integer"),
        ("trust", "max_kl", "small", "number"),
        ("rollout", "replay", True, "integer"),
    )
} | {
    "betas of one number": ({"optim": {"betas": [0.9]}}, ("optim.betas.1", "is missing")),
    "a value as a table": ({"run": {"updates": {"a": 1}}}, ("run.updates",)),
    "method name a number": ({"method": {"name": 3}}, ("method",)),
    "method without a name": ({"method": {"name": None, "clip_high": 0.3}}, ("method", "name")),
}

OUT_OF_RANGE: dict[str, tuple[Tables, Fragments]] = {
    f"range of {table}.{key}: {value!r}": ({table: {key: value}}, (f": {table}", fragment))
    for table, key, value, fragment in (
        ("run", "updates", 0, "updates must be 1 or more, not 0"),
        ("run", "updates", -3, "updates must be 1 or more, not -3"),
        ("run", "threads", -1, "threads must be 0"),
        ("optim", "lr", -1e-5, "lr must be 0 or more"),
        ("optim", "eps", 0, "eps must be above 0"),
        ("optim", "betas", [0.9, 1.0], "betas must lie in [0, 1)"),
        ("optim", "weight_decay", -0.1, "weight_decay must be 0 or more"),
        ("optim", "max_grad_norm", -1, "max_grad_norm must be 0 or more"),
        ("optim", "warmup_steps", -1, "warmup_steps must be 0 or more"),
        ("optim", "min_lr_ratio", 1.5, "min_lr_ratio must lie in [0, 1]"),
        ("sampling", "temperature", -1, "temperature must be 0 or more"),
        ("sampling", "top_k", -1, "top_k must be 0"),
        ("sampling", "top_p", 0, "top_p must lie in (0, 1]"),
        ("sampling", "top_p", 1.1, "top_p must lie in (0, 1]"),
        ("sampling", "min_p", 1.5, "min_p must lie in [0, 1]"),
        ("sampling", "max_new_tokens", 0, "max_new_tokens must be 1 or more"),
        ("sampling", "stop", [""], "stop is a list of texts, none of them empty"),
        ("rollout", "groups", 0, "groups must be 1 or more"),
        ("rollout", "group_size", 0, "group_size must be 1 or more"),
        ("rollout", "max_rounds", 0, "max_rounds must be 1 or more"),
        ("rollout", "workers", 0, "workers must be 1 or more"),
        ("rollout", "deadline_s", 0, "deadline_s must be above 0"),
        ("rollout", "max_error_rate", 1.5, "max_error_rate must lie in [0, 1]"),
        ("rollout", "select", "some", "select must be one of all, varied"),
        ("engine", "rows", 0, "rows and cache_tokens must be 1 or more"),
        ("engine", "cache_tokens", 0, "rows and cache_tokens must be 1 or more"),
        ("steps", "epochs", 0, "epochs must be 1 or more"),
        ("steps", "minibatches", 0, "minibatches must be 1 or more"),
        ("steps", "microbatch_tokens", -1, "microbatch_tokens must be 0"),
        ("lora", "rank", -1, "rank must be 0"),
        ("lora", "alpha", 0, "alpha must be above 0"),
        ("eval", "every", -1, "must be 0 or more"),
        ("eval", "limit", -1, "must be 0 or more"),
        ("checkpoint", "keep", -1, "must be 0 or more"),
        ("checkpoint", "every", -1, "must be 0 or more"),
        ("steps", "target_kl", -0.1, "target_kl must be 0 (off) or more"),
        ("critic", "lr", -1.0, "lr must be 0 or more, not -1.0"),
        ("critic", "warmup", -1, "warmup must be 0 or more, not -1"),
        ("critic", "heads", 3, "a reward model has one head"),
        ("critic", "path", "x", "a shared critic has the policy's backbone, and reads no path"),
        ("reference", "refresh_every", -1, "refresh_every must be 0 (never) or more"),
        ("reference", "keep", 1.0, "keep must lie in [0, 1)"),
        ("trust", "max_kl", 0.0, "max_kl must be above 0"),
        ("trust", "damping", -1.0, "damping must be 0 or more"),
        ("trust", "shrink", 1.0, "shrink must lie between 0 and 1"),
        ("trust", "iterations", 0, "iterations must be 1 or more, not 0"),
        ("rollout", "replay", -1, "replay must be 0 (none) or more"),
        ("rollout", "replay_lag", 0, "replay_lag must be 1 or more"),
    )
} | {
    "operands": ({"task": {"arithmetic": {"operands": 1}}}, ("operands must be 2 to 26",)),
    "low above high": ({"task": {"arithmetic": {"low": 9, "high": 2}}}, ("low 9 is more than high 2",)),
    "operator": ({"task": {"arithmetic": {"operators": ["/"]}}}, ("operators must be some of + - *",)),
    "template of sums": ({"task": {"arithmetic": {"template": "{x}"}}}, ("task.arithmetic", "the template")),
    "held-out below 0": ({"task": {"arithmetic": {"held_out": -1}}}, ("held_out must be 0 or more",)),
    "regex": ({"verifier": {"number": None, "regex": {"pattern": "("}}}, ("is not a regular expression",)),
    "games": ({"task": {"arithmetic": None, "guess": {"high": 1}}, "verifier": None}, ("high must be 2",)),
    **{
        f"maze layout {layout!r}": (
            {"task": {"arithmetic": None, "maze": {"layout": layout}}, "verifier": None},
            ("recipe.toml:", "task", fragment),
        )
        for layout, fragment in (
            ("S../.X", "rows"),
            ("...", "S"),
            ("S..", "G"),
            ("S?G", "S, G, X and '.'"),
            ("SXG", "no way to G avoids every X"),
        )
    },
}

CLOCKS_AND_INFINITIES: dict[str, tuple[Tables, Fragments]] = {
    "nan": ({"optim": {"lr": float("nan")}}, ("optim.lr", "is nan", "recipe.toml:")),
    "inf": ({"optim": {"max_grad_norm": float("inf")}}, ("optim.max_grad_norm", "is inf")),
    "nan in a list": ({"optim": {"betas": [0.9, float("nan")]}}, ("optim.betas", "is nan")),
    "nan in method": ({"method": {"clip_high": float("nan")}}, ("method.clip_high", "is nan")),
    "a million digits": ({"run": {"seed": 10**400}}, ("run.seed",)),
    "seed beyond 64 bits": ({"run": {"seed": 2**70}}, ("run.seed",)),
    "updates beyond reason": ({"optim": {"lr": 10**400}}, ("optim.lr",)),
}

COMBINATIONS: dict[str, tuple[Tables, Fragments]] = {
    "group of one": (
        {"rollout": {"group_size": 1}},
        ("rollout.group_size", "a group of 1 has none to compare", "give 2 or more", "recipe.toml:"),
    ),
    "no verifier": (
        {"verifier": None},
        ("verifier", "no verifier or environment is configured", "[verifier.number]"),
    ),
    "two tasks": ({"task": {"guess": {}}}, ("exactly one of", "arithmetic and guess")),
    "no task": ({"task": {"arithmetic": None, "games": {}}}, ("exactly one of", "none")),
    "held-out without data": (
        {"task": {"held_out": {"path": "x.jsonl"}}},
        ("held_out is read beside data",),
    ),
    "env without data": ({"task": {"env": {"factory": "a:b"}}}, ("env plays the tasks of data",)),
    "weight of no verifier": ({"verifier": {"weights": {"regx": 1.0}}}, ("verifier.weights", "'regx'")),
    "batch of an online method": ({"batch": {"batch_size": 8}}, ("[batch] is never read", "online loop")),
    "maze size of arithmetic": ({"task": {"maze": {"size": 3}}}, ("exactly one of", "arithmetic and maze")),
    "adapter options without a rank": ({"lora": {"alpha": 8.0}}, ("lora.alpha", "never read", "lora.rank")),
    "too few problems": (
        {"task": {"arithmetic": {"low": 2, "high": 2, "held_out": 1}}},
        ("arithmetic problems",),
    ),
    "held out more than there are": ({"task": {"arithmetic": {"high": 4, "held_out": 90}}}, ("held out",)),
    "unknown method": ({"method": {"name": "grop"}}, ("method.name", "unknown method 'grop'", "grpo")),
    "unknown device": ({"model": {"device": "tpu9"}}, ("model.device", "unknown device 'tpu9'")),
    "absurd device": ({"model": {"device": "cuda:x"}}, ("model.device", "cuda:x")),
    "empty device": ({"model": {"device": ""}}, ("model.device",)),
    "a device that computes nothing": ({"model": {"device": "meta"}}, ("model.device", "meta")),
    "unknown sink": ({"track": {"sinks": ["wandbb"]}}, ("track.sinks", "there is no 'wandbb'", "'wandb'")),
    "unknown adapter target": ({"lora": {"rank": 4, "targets": ["nope"]}}, ("lora", "nope")),
    "no room for an answer": ({"sampling": {"max_new_tokens": 510}}, ("context of 512", "max_new_tokens")),
    "a cache too small": ({"engine": {"cache_tokens": 8}}, ("engine.cache_tokens",)),
}

PARTS: dict[str, tuple[Tables, Fragments]] = {
    "a critic that is not there": (
        {"method": {"name": "ppo"}, "critic": {"kind": "own", "path": "no/such/model"}},
        ("recipe.toml:", "critic.path: no model at 'no/such/model'"),
    ),
    "a critic that has nothing in it": (
        {"method": {"name": "ppo"}, "critic": {"kind": "own", "path": "/"}},
        ("critic.path", "has no config.json and no .gguf, so it is not a model", "check the path"),
    ),
    "a layout beside a size": (
        {"task": {"arithmetic": None, "maze": {"layout": "S.G", "size": 3}}, "verifier": None},
        ("task.maze", "size has no effect", "layout determines the size"),
    ),
    "a layout of arithmetic": (
        {"task": {"maze": {"layout": "S.G"}}},
        ("exactly one of", "arithmetic and maze"),
    ),
}

METHOD_OPTIONS: dict[str, tuple[Tables, Fragments]] = {
    f"option of {name}: {key}": (
        {"method": {"name": name, key: value}},
        (f"method.{key}", fragment),
    )
    for name, key, value, fragment in (
        ("reinforce", "clip_high", 0.3, "reinforce does not read 'clip_high'"),
        ("rloo", "cap", 2.0, "rloo does not read 'cap'"),
        ("grpo", "cap", 5.0, "grpo does not read 'cap'"),
        ("grpo", "gamma", 0.9, "grpo does not read 'gamma'"),
        ("dr_grpo", "eps", 1e-4, "dr_grpo does not read 'eps'"),
        ("cispo", "clip_low", 0.2, "cispo does not read 'clip_low'"),
        ("grpo", "credit", "centerd", "one of"),
        ("grpo", "surrogate", "clip", "unknown surrogate 'clip'"),
        ("grpo", "reduction", 3, "unknown reduction 3"),
        ("grpo", "clip_high", "0.3", "expected a valid number"),
        ("grpo", "clip_high", -0.1, "greater than or equal to 0"),
        ("grpo", "clip_low", True, "expected a valid number"),
        ("grpo", "kl", "k1", "nothing reads kl while kl_in_loss is 0"),
        ("grpo", "kl_in_loss", -1.0, "greater than or equal to 0"),
        ("grpo", "horizon", 10, "does not read 'horizon'"),
        ("grpo", "estimator", "gae", "grpo does not read 'estimator'"),
        ("grpo", "kl_target", 0.1, "no penalty follows the target"),
        ("grpo", "control", "doubling", "nothing reads control while kl_target is 0"),
        ("ppo", "credit", "leave_one_out", "compares whole answers, and here each token is credited"),
        ("ppo", "gamma", 1.5, "expected a number less than or equal to 1, got 1.5"),
        ("ppo", "returns", "to_go", "ppo does not read 'returns'"),
        ("ppo_penalty", "kl_in_reward", 0.1, "two penalties could follow the target"),
        ("a2c", "n", 2.5, "expected a "),
        ("pass_at_k", "k", 0, "expected a "),
        ("sapo", "tau_up", 0, "greater than or equal to 0.001"),
        ("klq", "credit", "raw", "klq does not read 'credit'"),
    )
} | {"option of sft": ({"method": {"clip_high": 0.1}}, ("method.clip_high", "sft does not read"))}

SFT: dict[str, tuple[Tables, Fragments]] = {
    "batch of nothing": ({"batch": {"batch_size": 0}}, ("batch_size must be 1 or more",)),
    "length below 0": ({"batch": {"max_length": -1}}, ("max_length must be 0",)),
    "everything filtered out": (
        {"batch": {"max_length": 5}},
        ("batch.max_length", "were filtered out", "within 5 tokens", "raise it"),
    ),
    "option": METHOD_OPTIONS.pop("option of sft"),
}

VLLM = {"engine": {"name": "vllm"}}
LATE = {"method": {"correction": "token_truncated"}}
AHEAD = {"max_lag": 1, "swap": "within"}
ENGINES: dict[str, tuple[Tables, Fragments]] = {
    "no such engine": (
        {"engine": {"name": "sglang"}},
        ("engine.name", "there is no 'sglang'", "native, vllm"),
    ),
    "vLLM and top-k": (VLLM | {"sampling": {"top_k": 5}}, ("sampling.top_k", "'native'")),
    "vLLM and top-p": (VLLM | {"sampling": {"top_p": 0.9}}, ("sampling.top_p", "'native'")),
    "vLLM and min-p": (VLLM | {"sampling": {"min_p": 0.1}}, ("sampling.min_p", "'native'")),
    "vLLM almost greedy": (VLLM | {"sampling": {"temperature": 0.001}}, ("sampling.temperature", "0.01")),
    "vLLM examined almost greedily": (VLLM | {"eval": {"temperature": 0.001}}, ("eval.temperature", "0.01")),
    "vLLM over old keys": (VLLM | LATE | {"async": AHEAD | {"cache": "keep"}}, ("async.cache", "recompute")),
    "vLLM in a thread": (VLLM | LATE | {"async": AHEAD | {"place": "thread"}}, ("async.place", "process")),
}

ONLINE = UNKNOWN_KEYS | WRONG_TYPES | OUT_OF_RANGE | CLOCKS_AND_INFINITIES | COMBINATIONS
ONLINE |= METHOD_OPTIONS | PARTS | ENGINES

# ---------------------------------------------------------------- data: (content of a file, fragments)

GOOD = '{"prompt": "2+2=", "answer": "4"}\n'
DATA: dict[str, tuple[bytes | str, Fragments]] = {
    "empty": ("", ("data.jsonl", "has no records")),
    "blank": ("\n  \n", ("data.jsonl", "has no records")),
    "truncated": (GOOD + '{"prompt": "3+3=", "ans', ("data.jsonl:2", "cut off")),
    "truncated string": (GOOD + '{"prompt": "3+', ("data.jsonl:2", "cut off")),
    "not JSON": (GOOD + "prompt: 2+2\n" + GOOD, ("data.jsonl:2", "not JSON", "column 1")),
    "single quotes": ("{'prompt': '2+2='}\n" + GOOD, ("data.jsonl:1", "not JSON")),
    "trailing comma": ('{"prompt": "2+2=",}\n' + GOOD, ("data.jsonl:1", "not JSON")),
    "NaN literal": ('{"prompt": "2+2=", "answer": NaN}\n', ("data.jsonl:1", "NaN is not JSON")),
    "Infinity literal": ('{"prompt": "2+2=", "answer": -Infinity}\n', ("data.jsonl:1", "is not JSON")),
    "number too large": ('{"prompt": "2+2=", "answer": 1e999}\n', ("data.jsonl:1", "too large")),
    "duplicate key": ('{"prompt": "a", "prompt": "b"}\n', ("data.jsonl:1", "'prompt' is given twice")),
    "lone surrogate": ('{"prompt": "\\ud83d"}\n', ("data.jsonl:1", "half of a surrogate pair")),
    "a list": ("[1, 2]\n", ("data.jsonl:1", "not an object")),
    "a string": ('"2+2="\n', ("data.jsonl:1", "a string, not an object")),
    "null": ("null\n", ("data.jsonl:1", "null, not an object")),
    "array cut off": ("[" + GOOD + ",", ("data.jsonl:2",)),
    "array without a comma": ("[" + GOOD + GOOD + "]", ("data.jsonl:2", "comma")),
    "not UTF-8": (GOOD.encode() + b'{"prompt": "\xff"}\n', ("data.jsonl:2", "not UTF-8", "0xff")),
    "UTF-16": (GOOD.encode("utf-16"), ("data.jsonl:1", "UTF-16")),
    "damaged gzip": (b"\x1f\x8b\x08\x00broken", ("data.jsonl", "damaged or cut off")),
    "damaged parquet": (b"PAR1" + b"\0" * 40, ("data.jsonl", "Parquet file cannot be read")),
    "too deep": ('{"prompt": ' + "[" * 100_000, ("data.jsonl:1",)),
    "missing field": ('{"answer": "4"}\n', ("data.jsonl:1", "there is none of", "'answer'")),
    "misspelt field": ('{"promt": "2+2=", "answer": "4"}\n', ("data.jsonl:1", "'prompt'")),
    "misspelt answer": ('{"prompt": "2+2=", "anwser": "4"}\n', ("data.jsonl:1", "has no answer", "'anwser'")),
    "empty prompt": (GOOD + '{"prompt": " ", "answer": "4"}\n', ("data.jsonl:2", "prompt is empty")),
    "prompt a number": ('{"prompt": 4}\n', ("data.jsonl:1", "prompt is a number, not text")),
    "prompt null": ('{"prompt": null}\n', ("data.jsonl:1", "prompt is null, not text")),
    "no messages": ('{"messages": [], "answer": "4"}\n', ("data.jsonl:1", "messages is empty")),
    "messages as text": ('{"messages": "hi"}\n', ("data.jsonl:1", "not a list of messages")),
    "unknown role": (
        '{"messages": [{"role": "usr", "content": "a"}]}\n',
        ("data.jsonl:1", "role of message 1", "'usr'", "'user'"),
    ),
    "message without content": ('{"messages": [{"role": "user"}]}\n', ("data.jsonl:1", "has no 'content'")),
    "empty message": (
        '{"messages": [{"role": "user", "content": ""}]}\n',
        ("data.jsonl:1", "message 1 of messages is empty"),
    ),
    "assistant last": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        ("data.jsonl:1", "'b', is not a number"),
    ),
    "system late": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}\n',
        ("data.jsonl:1", "must come first"),
    ),
    "no answer": ('{"prompt": "2+2="}\n', ("data.jsonl:1", "has no answer")),
    "blank answer": ('{"prompt": "2+2=", "answer": " "}\n', ("data.jsonl:1", "answer", "is empty")),
    "unparsable gold": ('{"prompt": "2+2=", "answer": "four"}\n', ("data.jsonl:1", "'four'")),
    "gold of two numbers": (GOOD + '{"prompt": "2+2=", "answer": "3 or 4"}\n', ("data.jsonl:2", "3 or 4")),
    "answer an object": ('{"prompt": "2+2=", "answer": {}}\n', ("data.jsonl:1", "is not text or a number")),
    "id twice": ('{"id": 1, "prompt": "a", "answer": "1"}\n' * 2, ("data.jsonl:2", "id '1'")),
    "id a list": ('{"id": [1], "prompt": "a", "answer": "1"}\n', ("data.jsonl:1", "id is a list")),
    "long prompt": (
        GOOD + json.dumps({"prompt": "2+2=" * 200, "answer": "4"}) + "\n",
        ("data.jsonl:2", "that is more than the model's context of 512", "leave it out"),
    ),
    "long prompts far behind": (
        GOOD * 5000 + "".join(json.dumps({"prompt": "2+2=" * n, "answer": "4"}) + "\n" for n in (200, 300)),
        ("data.jsonl:5001", "that is more than the model's context of 512"),
    ),
}

DATA_OPTIONS: dict[str, tuple[Tables, Fragments]] = {
    "missing file": ({"path": "{tmp}/dada.jsonl"}, ("dada.jsonl", "no such file", "'data.jsonl'")),
    "a directory": ({"path": "{tmp}"}, ("it is a directory", "data.jsonl")),
    "no path": ({"path": " "}, ("task.data", "path must not be empty")),
    "path missing": ({"path": None}, ("task.data", "'task.data.path' is missing")),
    "a zero byte in the path": ({"path": "a\0b"}, ("a",)),
    "limit": ({"limit": 0}, ("limit must be 1 or more",)),
    "split of a file": ({"split": "train"}, ("a file has no split",)),
    "column that is not there": ({"columns": {"prompt": "problem"}}, ("data.jsonl:1", "no field 'problem'")),
    "column of nothing": ({"columns": {"promt": "prompt"}}, ("columns has no place for 'promt'", "'prompt'")),
    "template without a field": ({"template": "2+2="}, ("has no {field}",)),
    "template of another field": ({"template": "{promt}"}, ("data.jsonl:1", "no field 'promt'", "'prompt'")),
    "template cut off": ({"template": "{prompt"}, ("cannot be filled in",)),
    "blank system": ({"system": " "}, ("system must not be blank",)),
    "misspelt option": ({"collumns": {}}, ("unknown key 'collumns'", "'columns'")),
}

# ---------------------------------------------------------------- TOML: (text, fragments)

TOML: dict[str, tuple[bytes, Fragments]] = {
    "empty file": (b"", ("recipe.toml", "'model' is missing")),
    "no equals sign": (b"[run]\nupdates 3\n", ("recipe.toml:2", "is not TOML")),
    "open string": (b'[model]\npath = "abc\n', ("recipe.toml:2", "is not TOML")),
    "open table": (b"[model\n", ("recipe.toml:1", "is not TOML")),
    "open list": (b"[optim]\nbetas = [0.9,\n", ("recipe.toml:", "is not TOML")),
    "key twice": (b"[run]\nseed = 1\nseed = 2\n", ("recipe.toml:3", "is not TOML")),
    "table twice": (b"[run]\nseed = 1\n[run]\n", ("recipe.toml:3", "is not TOML")),
    "YAML": (b"model:\n  path: x\n", ("recipe.toml:1", "is not TOML")),
    "JSON": (b'{"model": 1}', ("recipe.toml:1", "is not TOML")),
    "not UTF-8": (b'[model]\npath = "\xff\xfe"\n', ("recipe.toml", "UTF-8")),
    "a lone surrogate": (b'[model]\npath = "\\ud800"\n', ("recipe.toml:2", "is not TOML")),
    "a date": (b"[run]\nseed = 2024-01-01\n", ("recipe.toml:2", "run.seed", "date")),
    "a time": (b"[run]\nupdates = 07:32:00\n", ("recipe.toml:2", "run.updates", "date or time")),
    "a date in a list": (b"[optim]\nbetas = [2024-01-01, 0.9]\n", ("recipe.toml:2", "optim.betas", "date")),
    "a list of tables": (b"[[run]]\nseed = 1\n", ("recipe.toml:1", "run")),
    "binary": (b"\x00\x01\x02", ("recipe.toml:1", "is not TOML")),
    "byte order mark": (b"\xef\xbb\xbf[run]\nsed = 1\n", ("recipe.toml:2", "unknown key 'sed'")),
    "nested too deeply": (b"a = " + b"[" * 5000, ("recipe.toml", "nested too deeply")),
    "tables too deep": (b"[" + b".".join([b"a"] * 3000) + b"]\n", ("recipe.toml", "nested too deeply")),
    "a value at the top": (b"seed = 3\n", ("recipe.toml:1", "unknown key 'seed'")),
    "a value for a table": (b"run = 3\n", ("recipe.toml:1: run", ", got 3")),
    "a method without a table": (b'method = "grpo"\n', ("recipe.toml:1: method", ', got "grpo"')),
    "a misspelt table": (b'[modle]\npath = "x"\n', ("recipe.toml:1", "unknown key 'modle'", "'model'")),
}

SETS: dict[str, tuple[tuple[str, ...], Fragments]] = {
    "nothing set": (("run.updates",), ("--set run.updates", "sets nothing", "section.key=value")),
    "no key": (("=3",), ("--set", "sets nothing")),
    "unknown key": (("optim.lrr=1",), ("--set optim.lrr=1", "unknown key 'lrr'", "'lr'")),
    "wrong type": (("optim.lr=fast",), ("--set optim.lr=fast: optim.lr", "number")),
    "out of range": (("run.updates=0",), ("--set run.updates=0: run", "1 or more")),
    "into a value": (("run.updates.x=1",), ("--set run.updates.x=1", "a value, not a table")),
    "a table over": (("run=3",), ("--set run=3: run",)),
    "method": (("method.name=grop",), ("--set method.name=grop", "unknown method")),
    "nan": (("optim.lr=nan",), ("--set optim.lr=nan", "is nan")),
    "an empty part": (("run..updates=1",), ("--set run..updates=1",)),
    "a dot at the end": (("run.=1",), ("--set run.=1",)),
    "a date": (("run.seed=2024-01-01",), ("--set run.seed=2024-01-01", "date")),
    "group size": (("rollout.group_size=1",), ("--set rollout.group_size=1", "none to compare")),
    "taking out what must be there": (("model.path=",), ("--set model.path=", "is missing")),
    "taking out what is not there": (
        ("run.nothing=",),
        ("--set run.nothing=", "cannot remove 'run.nothing'"),
    ),
    "a surrogate": (("track.name=\udcff",), ("--set", "track.name")),
}


def check_refusal(result, run: Path, fragments: Fragments) -> str:
    """Check that a command was refused in one line with these fragments, without a run; return the line."""
    lines = result.err.splitlines()
    assert result.code == 2, (result.code, result.err)
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert result.out == ""
    assert "Traceback" not in result.err
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
    assert not run.exists(), "a refused recipe leaves no run directory"
    assert len(lines[0]) < 900
    return lines[0]


@pytest.fixture
def refuse(run_cli, write, online, tmp_path) -> Callable[..., str]:
    """Return refuse(tables, fragments): train the online recipe with these tables, and check the refusal."""

    def refuse(tables: Tables, fragments: Fragments, base: Tables | None = None) -> str:
        run = tmp_path / "run"
        result = run_cli("train", write(base or online, tables), "--run-dir", run, "--quiet")
        return check_refusal(result, run, fragments)

    return refuse


@pytest.mark.parametrize("case", ONLINE)
def test_bad_key_or_value_is_refused(refuse, case):
    refuse(*ONLINE[case])


def test_missing_engine_is_refused(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    refuse(VLLM, ("engine.name", "recipe.toml:", "vllm is not installed", "pip install 'posttrain[vllm]'"))


def test_eval_does_not_need_the_engine_of_the_recipe(run_cli, write, online, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = run_cli("eval", write(online, VLLM), "--json")
    assert result.code == 0, result.err
    assert "eval/accuracy" in result.json


@pytest.mark.parametrize("case", SFT)
def test_bad_table_of_an_offline_method_is_refused(refuse, offline, case):
    refuse(*SFT[case], base=offline)


@pytest.mark.parametrize("case", DATA)
def test_bad_data_file_is_refused(refuse, tmp_path, case):
    content, fragments = DATA[case]
    file = tmp_path / "data.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    refuse({"task": {"arithmetic": None, "data": {"path": str(file)}}}, fragments)


@pytest.mark.parametrize("case", DATA_OPTIONS)
def test_bad_data_option_is_refused(refuse, tmp_path, case):
    options, fragments = DATA_OPTIONS[case]
    (tmp_path / "data.jsonl").write_text(GOOD)
    options = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in options.items()}
    data = {"path": str(tmp_path / "data.jsonl")} | options
    data = {k: v for k, v in data.items() if v is not None}
    refuse({"task": {"arithmetic": None, "data": data}}, fragments)


@pytest.mark.parametrize("case", TOML)
def test_bad_toml_is_refused(run_cli, tmp_path, case):
    text, fragments = TOML[case]
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(text)
    check_refusal(run_cli("train", recipe, "--run-dir", tmp_path / "run"), tmp_path / "run", fragments)


@pytest.mark.parametrize("case", SETS)
def test_bad_override_is_refused(run_cli, write, online, tmp_path, case):
    sets, fragments = SETS[case]
    words = [word for s in sets for word in ("--set", s)]
    result = run_cli("train", write(online), "--run-dir", tmp_path / "run", *words)
    check_refusal(result, tmp_path / "run", fragments)


# ---------------------------------------------------------------- models


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def remove_eos(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", lambda c: c.pop("eos_token"))


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return edit


def set_weight(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors["model.norm.weight"].__setitem__(3, value)


def pickle_weights(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def set_template(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "chat_template.jinja").write_text(text)


MODELS: dict[str, tuple[Callable[[Path], object], Fragments]] = {
    "no chat template": (
        lambda m: (m / "chat_template.jinja").unlink(),
        ("without chat template", "model.chat_template"),
    ),
    "a template that fails": (set_template("{{ messages[7].content }}"), ("chat template",)),
    "a template that is no Jinja": (set_template("{% for m in messages %}"), ("chat template that fails",)),
    "a template that hides the user": (set_template("hello"), ("leaves the user's message out",)),
    "no eos": (remove_eos, ("without eos_token", "tokenizer_config.json")),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ("has no tokenizer",)),
    "a damaged tokenizer": (
        lambda m: (m / "tokenizer.json").write_text("{"),
        ("tokenizer that cannot be read",),
    ),
    "vocabulary above the embedding": (
        lambda m: edit_json(m / "config.json", lambda c: c.update(vocab_size=50)),
        ("a tokenizer of 100 tokens and an embedding of 50",),
    ),
    "no config": (lambda m: (m / "config.json").unlink(), ("config.json", "is missing")),
    "a damaged config": (lambda m: (m / "config.json").write_text("{"), ("config.json", "is not JSON")),
    "a config of nothing": (
        lambda m: (m / "config.json").write_text("{}"),
        ("config.json", "has no model_type"),
    ),
    "an unknown architecture": (
        lambda m: edit_json(
            m / "config.json", lambda c: c.update(model_type="lama", architectures=["LamaForCausalLM"])
        ),
        ("config.json", "lama"),
    ),
    "an encoder": (
        lambda m: edit_json(m / "config.json", lambda c: c.update(architectures=["BertModel"])),
        ("not a decoder-only language model",),
    ),
    "another attention": (
        lambda m: edit_json(
            m / "config.json",
            lambda c: c.update(model_type="nemotron", architectures=["NemotronForCausalLM"]),
        ),
        (
            "config.json",
            "NemotronAttention does not pass the keywords of its forward to its attention",
            "docs/models.md",
        ),
    ),
    "no layers": (
        lambda m: edit_json(m / "config.json", lambda c: c.update(num_hidden_layers=-1)),
        ("config.json", "num_hidden_layers = -1 is not the size"),
    ),
    "fewer layers than the weights": (
        lambda m: edit_json(m / "config.json", lambda c: c.update(num_hidden_layers=2)),
        ("has no place for", "model.layers.2."),
    ),
    "a pickle": (pickle_weights, ("pickle", "pytorch_model.bin")),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ("has no model.safetensors",)),
    "truncated weights": (
        lambda m: os.truncate(m / "model.safetensors", 9000),
        ("model.safetensors", "is damaged"),
    ),
    "a pointer in place of weights": (
        lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ("git-lfs pointer",),
    ),
    "NaN weights": (
        edit_weights(set_weight(float("nan"))),
        ("NaN or infinite weights in model.norm.weight",),
    ),
    "infinite weights": (
        edit_weights(set_weight(float("inf"))),
        ("NaN or infinite weights in model.norm.weight",),
    ),
    "a tensor missing": (
        edit_weights(lambda t: t.pop("model.norm.weight")),
        ("lacks the weights", "model.norm.weight"),
    ),
    "a tensor of another shape": (
        edit_weights(lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        ("model.norm.weight as [7]",),
    ),
    "an empty directory": (lambda m: [f.unlink() for f in m.iterdir()], ("no config.json",)),
}
PATHS: dict[str, tuple[str, Fragments]] = {
    "nothing there": ("{tmp}/nope", ("model.path", "no model at")),
    "nearly there": ("{tmp}/modl", ("no model at", "/model'")),
    "a file": ("{tmp}/recipe.toml", ("only a .gguf file is a model",)),
    "a broken GGUF": ("{tmp}/broken.gguf", ("is not a GGUF file",)),
    "no package": ("pypi:../x", ("model.path", "is not a package")),
    "empty": ("", ("model.path", "no model at ''")),
}


@pytest.mark.parametrize("case", MODELS)
def test_unusable_model_is_refused(refuse, tiny, tmp_path, case):
    spoil, fragments = MODELS[case]
    shutil.copytree(tiny, tmp_path / "model")
    spoil(tmp_path / "model")
    line = refuse({"model": {"path": str(tmp_path / "model")}}, fragments)
    assert str(tmp_path / "model") in line or "chat template" in line


@pytest.mark.parametrize("case", PATHS)
def test_path_without_a_model_is_refused(refuse, tmp_path, case):
    path, fragments = PATHS[case]
    (tmp_path / "model").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGML" * 100)
    refuse({"model": {"path": path.replace("{tmp}", str(tmp_path))}}, fragments)


def test_critic_of_another_vocabulary_is_refused(refuse, make_model):
    other = {"kind": "own", "path": str(make_model(vocab_size=60))}
    refuse({"method": {"name": "ppo"}, "critic": other}, ("critic.path", "smaller vocabulary"))


def test_unusable_reference_is_refused(refuse, make_model, tmp_path):
    held = {"name": "grpo", "kl_in_loss": 0.1}
    other = {"path": str(make_model(vocab_size=60))}
    refuse({"method": held, "reference": other}, ("reference.path", "smaller vocabulary"))
    shallow = {"path": str(make_model(num_hidden_layers=1)), "refresh_every": 1}
    refuse({"method": held, "reference": shallow}, ("reference.path", "other names or shapes", "follow"))
    (tmp_path / "empty").mkdir()
    refuse(
        {"method": held, "reference": {"path": str(tmp_path / "empty")}}, ("reference.path", "config.json")
    )
    refuse({"method": {"name": "grpo"}, "reference": other}, ("reference", "never read by grpo"))
    narrow = {"path": str(make_model(max_position_embeddings=20))}
    refuse(
        {"method": held, "reference": narrow},
        ("the prompt of task", "more than the reference's context of 20"),
    )
    refuse(
        {"method": {"name": "ppo"}, "critic": narrow | {"kind": "own"}},
        ("the prompt of task", "more than the critic's context of 20"),
    )


# ---------------------------------------------------------------- code of the user's

CODE: dict[str, tuple[str, str, Fragments]] = {
    "no such file": ("", "{tmp}/reward.py:reward", ("reward.py", "there is no file", "'rewards.py'")),
    "no such module": ("", "no_such_module_x:reward", ("there is no module 'no_such_module_x'",)),
    "names nothing": ("", "reward", ("reward: names nothing", "module:name")),
    "no such function": (
        "def reward(response): return 0.0",
        "{file}:rewrad",
        ("has no 'rewrad'", "'reward'"),
    ),
    "fails at import": ("x = 1\nraise OSError('disk')", "{file}:reward", ("rewards.py:2", "OSError: disk")),
    "syntax": ("x = 1\ndef reward(:\n", "{file}:reward", ("rewards.py:2", "SyntaxError")),
    "imports what is not there": (
        "import nothing_like_it",
        "{file}:reward",
        ("rewards.py:1", "nothing_like_it"),
    ),
    "not a function": ("reward = 3", "{file}:reward", ("not a function but int",)),
    "no place for a response": (
        "def reward(answer): return 0.0",
        "{file}:reward",
        ("no place for a response",),
    ),
    "positional only": ("def reward(response, /): return 0.0", "{file}:reward", ("no place for a response",)),
    "no parameters": ("def reward(): return 0.0", "{file}:reward", ("takes (nothing)",)),
    "exits at import": ("import sys; sys.exit(3)", "{file}:reward", ("rewards.py:1", "SystemExit")),
    "wants a field": (
        "def reward(response, unit): return 0.0",
        "{file}:reward",
        ("wants 'unit', which task", "does not have"),
    ),
}


@pytest.mark.parametrize("case", CODE)
def test_unusable_reward_function_is_refused(refuse, tmp_path, case):
    code, name, fragments = CODE[case]
    file = tmp_path / "rewards.py"
    file.write_text(code)
    name = name.replace("{tmp}", str(tmp_path)).replace("{file}", str(file))
    place = () if case == "wants a field" else ("recipe.toml:", f"verifier.function.function: {name}: ")
    refuse({"verifier": {"number": None, "function": {"function": name}}}, fragments + place)


def test_reward_function_must_accept_an_empty_answer(refuse, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def reward(response):\n    return float(response[0])\n")
    function = {"number": None, "function": {"function": f"{file}:reward"}}
    refuse({"verifier": function}, ("fails on the response ''", "raised", "IndexError"))


@pytest.mark.parametrize(
    ("factory", "fragments"),
    [
        ("no_such_module_x:make", ("there is no module",)),
        ("{file}:not_there", ("has no 'not_there'",)),
        ("{file}:wants", ("cannot be called with nothing",)),
        ("{file}:half", ("has no reply(state, response)",)),
        ("{file}:raises", ("it fails: ValueError: no",)),
    ],
)
def test_unusable_environment_is_refused(refuse, tmp_path, factory, fragments):
    file, data = tmp_path / "envs.py", tmp_path / "data.jsonl"
    data.write_text(GOOD)
    file.write_text(
        "class Half:\n    def start(self, task): pass\n"
        "def half(): return Half()\n"
        "def wants(size): return Half()\n"
        "def raises(): raise ValueError('no')\n"
    )
    env = {"factory": factory.replace("{file}", str(file))}
    refuse(
        {"task": {"arithmetic": None, "data": {"path": str(data)}, "env": env}, "verifier": None}, fragments
    )


# ---------------------------------------------------------------- run directories


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory) -> Path:
    """Return a directory with a finished run, run/, and its recipe, recipe.toml."""
    folder = tmp_path_factory.mktemp("finished")
    text = (
        f'[model]\npath = "{tiny}"\ndtype = "float32"\n[method]\nname = "sft"\n'
        "[task.arithmetic]\nhigh = 9\nheld_out = 5\n[run]\nupdates = 2\nthreads = 1\n"
    )
    (folder / "recipe.toml").write_text(text)
    words = ["train", str(folder / "recipe.toml"), "--run-dir", str(folder / "run"), "--quiet"]
    assert main(words) == 0
    return folder


def main(words: list[str]) -> int:
    from posttrain import cli

    return cli.run(words)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def check_run_is_unchanged(result, run: Path, before: dict[str, bytes], *fragments: str) -> None:
    """Check that a command was refused in one line with these fragments, and that the run kept its files."""
    assert result.code == 2, result.err
    [line] = result.err.splitlines()
    assert line.startswith("error: ")
    for fragment in fragments:
        assert fragment in line, line
    assert read_files(run) == before


def test_train_does_not_overwrite_a_run(run_cli, finished):
    run = finished / "run"
    before = read_files(run)
    result = run_cli("train", finished / "recipe.toml", "--run-dir", run)
    check_run_is_unchanged(result, run, before, str(run), "already holds a run", "--resume")


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_train_refuses_a_directory_in_use(run_cli, finished, resume):
    import fcntl

    run = finished / "run"
    (run / ".lock").write_text("1")  # the process that holds it
    before = read_files(run)
    with (run / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        result = run_cli("train", finished / "recipe.toml", "--run-dir", run, *resume)
        check_run_is_unchanged(result, run, before, "another run is using this directory, process 1")


@pytest.mark.parametrize(
    ("change", "table"),
    [
        ("optim.lr=0.5", "[optim]"),
        ("run.seed=3", "[run]"),
        ("method.name=grpo", "[method]"),
        ("batch.batch_size=3", "[batch]"),
        ("lora.rank=4", "[lora]"),
        ("task.arithmetic.high=8", "[task]"),
        ("model.dtype=bfloat16", "[model]"),
    ],
)
def test_resume_refuses_a_changed_recipe(run_cli, finished, change, table):
    run = finished / "run"
    before = read_files(run)
    words = ["--set", "verifier.number.where=last"] if "grpo" in change else []
    result = run_cli("train", finished / "recipe.toml", "--run-dir", run, "--resume", "--set", change, *words)
    fragments = (f"{table} is not what the run was started with", "config.toml")
    if words:  # either table may be named
        fragments = ("is not what the run was started with",)
    check_run_is_unchanged(result, run, before, *fragments)


def test_resume_without_a_run_is_refused(run_cli, finished, tmp_path):
    result = run_cli("train", finished / "recipe.toml", "--run-dir", tmp_path / "none", "--resume")
    check_refusal(result, tmp_path / "none", ("there is no run to resume here", "--resume"))
    result = run_cli("train", finished / "recipe.toml", "--resume")
    check_refusal(result, tmp_path / "none", ("--resume", "which run?", "--run-dir"))


def test_impossible_run_directory_is_refused(run_cli, finished, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run_cli("train", finished / "recipe.toml", "--run-dir", tmp_path / "file")
    assert (result.code, (tmp_path / "file").read_text()) == (2, "mine")
    assert "is a file" in result.err
    result = run_cli("train", finished / "recipe.toml", "--run-dir", tmp_path / "file" / "deeper")
    check_refusal(result, tmp_path / "file" / "deeper", ("cannot be written to",))


def test_refusal_keeps_other_files_of_the_run_directory(run_cli, write, online, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    result = run_cli("train", write(online), "--run-dir", run)
    assert result.code == 2
    assert [p.name for p in run.iterdir() if not p.name.startswith(".")] == ["notes.txt"]
    (run / "notes.txt").rename(run / ".notes")
    result = run_cli("train", write(online, {"method": {"name": "grop"}}), "--run-dir", run)
    assert result.code == 2
    assert (run / ".notes").read_text() == "mine"


def test_refused_recipe_leaves_no_numbered_directory(run_cli, write, online, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = {"rollout": {"group_size": 1}}
    assert run_cli("train", write(online, bad)).code == 2
    assert not list(tmp_path.glob("runs/*"))
    assert run_cli("train", write(online, {"run": {"updates": 1}}), "--quiet").code == 0
    assert [p.name for p in tmp_path.glob("runs/*")] == ["recipe-001"]


def test_resume_with_a_damaged_checkpoint_is_refused(run_cli, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    [model] = run.glob("checkpoints/*/model/model.safetensors")
    os.truncate(model, 100)
    metrics = (run / "metrics.jsonl").read_bytes()
    result = run_cli("train", finished / "recipe.toml", "--run-dir", run, "--resume")
    assert result.code == 2
    assert "was passed over: model/model.safetensors has 100 bytes" in " ".join(result.err.split())
    assert (run / "metrics.jsonl").read_bytes() == metrics, "metrics of a new run would be mixed with them"


# ---------------------------------------------------------------- other commands

OTHERS: dict[str, tuple[tuple[str, ...], Fragments]] = {
    "recipe not there": (("train", "{tmp}/recip.toml"), ("there is no such recipe", "'recipe.toml'")),
    "recipe a directory": (("train", "{tmp}"), ("is a directory",)),
    "validate": (("validate", "{tmp}/recipe.toml", "--set", "optim.lrr=1"), ("unknown key 'lrr'",)),
    "eval of an offline recipe": (("eval", "{finished}/recipe.toml"), ("an offline recipe has no answers",)),
    "eval of nothing": (("eval", "{tmp}/nope"), ("there is no such recipe",)),
    "sample of nothing": (("sample", "{tmp}/nope", "hi"), ("no model at",)),
    "sample an empty prompt": (("sample", "{model}", " "), ("the prompt is empty",)),
    "sample too long a prompt": (("sample", "{model}", "x" * 600), ("exceed the 512",)),
    "sample with a bad filter": (("sample", "{model}", "hi", "--top-p", "0"), ("top_p must lie in (0, 1]",)),
    "sample in another type": (
        ("sample", "{model}", "hi", "--dtype", "fp16"),
        ("--dtype", "unknown dtype 'fp16'"),
    ),
    "sample with a bad seed": (("sample", "{model}", "hi", "--min-p", "2"), ("min_p must lie in [0, 1]",)),
    "report of nothing": (("report", "{tmp}/nope"), ("nope",)),
    "report of no run": (("report", "{tmp}"), ("{tmp}",)),
    "pull nothing": (("model", "pull", "{tmp}/nope"), ("no model at",)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_bad_input_to_other_commands_is_refused(run_cli, write, online, finished, tiny, tmp_path, case):
    words, fragments = OTHERS[case]
    write(online)
    places = {"{tmp}": str(tmp_path), "{model}": str(tiny), "{finished}": str(finished)}
    for mark, place in places.items():
        words = tuple(word.replace(mark, place) for word in words)
        fragments = tuple(f.replace(mark, place) for f in fragments)
    check_refusal(run_cli(*words), tmp_path / "run", fragments)


@pytest.mark.parametrize(
    "words",
    [["trian"], ["train"], ["sample", "x", "y", "-n", "0"], ["train", "a", "b"], ["report", "--fast"]],
)
def test_unknown_words_are_refused_with_a_hint_to_help(run_cli, words):
    result = run_cli(*words)
    assert result.code == 2
    [line] = result.err.strip().splitlines()
    assert line.startswith("error: ")
    assert line.endswith("--help")


def test_no_command_prints_help_without_an_error(run_cli):
    result = run_cli()
    assert (result.code, result.err.strip()) == (2, "")


@pytest.mark.full
def test_bad_input_is_refused_in_a_subprocess(write, online, tmp_path):
    bad = write(online, {"optim": {"lrr": 1.0}})
    words = [sys.executable, "-m", "posttrain", "train", str(bad), "--run-dir", str(tmp_path / "run")]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    [line] = process.stderr.splitlines()
    assert line.startswith(f"error: {bad}:")
    assert line.endswith("optim.lrr: unknown key 'lrr'; did you mean 'lr'?")
    assert not (tmp_path / "run").exists()


def test_there_are_at_least_250_cases():
    tables = (ONLINE, SFT, DATA, DATA_OPTIONS, TOML, SETS, MODELS, PATHS, CODE, OTHERS)
    assert sum(map(len, tables)) >= 250


# ---------------------------------------------------------------- as other trainers call it


@pytest.mark.parametrize(
    ("tables", "fragments"),
    [
        (
            {"rollout": {"num_generations": 8}},
            ("rollout", "'num_generations'", "did you mean 'group_size'?"),
        ),
        (
            {"method": {"name": "grpo", "epsilon": 0.2}},
            ("method.epsilon", "method.clip_low and method.clip_high"),
        ),
        ({"method": {"name": "grpo", "clip_hihg": 0.2}}, ("method", "did you mean 'clip_high'?")),
        ({"critic": {"learning_rate": 1e-5}}, ("'learning_rate'", "did you mean 'lr'?")),
        ({"method": {"name": "grpoo"}}, ("unknown method 'grpoo'", "did you mean 'grpo'?")),
    ],
    ids=["generations", "epsilon", "misspelt", "rate", "method"],
)
def test_name_of_another_trainer_gets_a_hint(refuse, tables, fragments):
    refuse(tables, fragments)


def test_override_without_its_table_gets_the_whole_key(run_cli, write, online, tmp_path):
    result = run_cli("train", write(online), "--run-dir", tmp_path / "run", "--set", "lr=1e-5")
    check_refusal(result, tmp_path / "run", ("unknown key 'lr'", "it is optim.lr here"))


def test_recipe_and_pipeline_are_not_confused(run_cli, write, online, tmp_path):
    recipe, pipeline = write(online), tmp_path / "pipeline.toml"
    pipeline.write_text('[[stage]]\nname = "a"\nrecipe = "a.toml"\n')
    for words, fragment in (
        (["validate", pipeline], "pipeline.toml:3: "),
        (["train", recipe, "--from", "sft"], "has no stages; leave it out"),
        (["eval", tmp_path / "nowhere"], "there is no such recipe and no such run"),
        (["eval", tmp_path], "is no run: it has no config.toml"),
    ):
        result = run_cli(*words)
        assert result.code == 2
        assert fragment in result.err


def test_train_refuses_a_directory_with_other_files(run_cli, write, online, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    result = run_cli("train", write(online), "--run-dir", tmp_path / "full")
    assert (result.code, "what it holds is no run" in result.err) == (2, True)
    assert [p.name for p in (tmp_path / "full").iterdir() if not p.name.startswith(".")] == ["x"]


def test_ray_samplers_without_ray_are_refused(run_cli, write, online, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run_cli("validate", write(online, {"async": {"place": "ray"}}))
    assert (result.code, "ray is not installed; pip install 'posttrain[ray]'" in result.err) == (2, True)
