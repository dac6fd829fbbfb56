# %% [markdown]
# # A first run: your data, your reward, and a look into the samples
#
# GRPO on a task of our own, with a reward that is a Python function. So that every cell takes seconds on a laptop, the model is made
# here: two layers, random weights. For a real one write its name, `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and leave the next cell and
# the fine-tuning out.

# %%
from pathlib import Path

import posttrain
from posttrain.models.scratch import Size, learn_tokenizer, write_new

tokenizer = learn_tokenizer(["0 1 2 3 4 5 6 7 8 9 + ="], 264)
print(
    write_new(Path("model"), Size(layers=2, hidden=64, heads=4, context=64), tokenizer, seed=0), "parameters"
)

# %% [markdown]
# ## Data
#
# A list of dictionaries will do; so will a `datasets.Dataset`, a file or a Hub id. `prompt` goes through the chat template, and what else
# a record has is there for the reward.

# %%
sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
chats = [
    {"messages": [{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["answer"]}]}
    for s in sums
]

# %% [markdown]
# A model of random weights first learns what an answer looks like. SFT stops early here: it answers some of the sums.

# %%
sft = posttrain.train(
    "model", method="sft", data=chats, updates=50, lr=3e-3, batch={"batch_size": 16}, show="none"
)
print("loss", [round(x, 2) for x in sft.metrics["loss"][::8]])

# %% [markdown]
# ## Reward
#
# A function of what it names: the response, and any field of the record. It may return a number or named parts, whose sum is the reward.


# %%
def reward(response, answer):
    return {"right": float(response == answer), "short": 0.1 * (len(response) <= 2)}


# %% [markdown]
# ## GRPO
#
# Five sums an update, eight responses to each.

# %%
run = posttrain.train(
    sft,
    method="grpo",
    data=sums,
    reward=reward,
    updates=25,
    lr=2e-3,
    rollout={"groups": 5, "group_size": 8},
    sampling={"max_new_tokens": 4},
    show="none",
)
mean = run.metrics["reward/mean"]
print(f"reward of the first five updates {sum(mean[:5]) / 5:.2f}, of the last five {sum(mean[-5:]) / 5:.2f}")
print(f"share of right answers at the end {run.metrics['part/right'][-1]:.2f}")

# %% [markdown]
# ## Samples
#
# What was sampled is kept, token by token. Which responses of the last update were wrong?

# %%
for row in run.episodes():
    if row["parts"]["right"] == 0:
        print(
            row["answer"],
            "expected:",
            "".join(row["pieces"]),
            "with advantage",
            round(row["advantage"][0], 2),
        )

# %% [markdown]
# And what does the model say to a sum that it has not seen?

# %%
print(run.sample("5+3=", n=4, max_new_tokens=4))

# %% [markdown]
# `run.report()` writes all of it as one HTML file; as the last line of a cell, `run` shows it. `run.model` is a directory that
# transformers' `from_pretrained` loads. Next: [stepping a session by hand](stepping.py).
