# %% [markdown]
# # Stepping by hand, and an advantage of your own
#
# A session is one run that you step: sample, look, change something, update, publish. The command line's loop is the same session.
# The model is a small one with random weights, so that every cell takes a second; write the name of a real one in its place.

# %%
from pathlib import Path

import torch

import posttrain
from posttrain.models.scratch import Size, learn_tokenizer, write_new

write_new(
    Path("model"),
    Size(layers=2, hidden=64, heads=4, context=64),
    learn_tokenizer(["0 1 2 3 4 5 6 7 8 9 + ="], 264),
    seed=0,
)
prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def digits(response):
    """The share of characters that are digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


asked = {
    "data": prompts,
    "reward": digits,
    "rollout": {"groups": 4, "group_size": 8},
    "sampling": {"max_new_tokens": 4},
    "lr": 2e-2,
}

# %% [markdown]
# ## One update, step by step
#
# `sample` gives the episodes of the next prompts with their verdicts; those of one prompt are a group.

# %%
session = posttrain.Session("model", method="grpo", updates=8, **asked)
groups = session.sample()
print(len(groups), "groups of", len(groups[0]))
print([round(reward, 2) for reward in groups.rewards[0]])

# %% [markdown]
# What the method is about to see are columns, a row an episode and an entry a token.

# %%
batch = session.batch(groups)
print("mask", tuple(batch.mask.shape), "with", int(batch.mask.sum()), "trained tokens")
print("tokens of the first row", batch.tokens[0].tolist())

# %% [markdown]
# `update` prepares the batch (this is where advantages are computed), and makes the optimiser steps. It returns the prepared batch.

# %%
update = session.update(groups)
seen = update.batch
advantages = [row[mask][0].item() for row, mask in zip(seen.advantage, seen.mask, strict=True)]
print("advantages of the first group", [round(a, 2) for a in advantages[:8]])
session.publish()  # the weights to the sampler, which proves that it has them

# %% [markdown]
# The rest in a loop. Rewards can be changed between sampling and updating: here a response that says one character only
# gets half.

# %%
while not session.done:
    groups = session.sample()
    groups = groups.reward(lambda episode: episode.reward * (0.5 if len(set(episode.response)) < 2 else 1.0))
    session.update(groups)
    session.publish()
mean = session.metrics["reward/mean"]
print("GRPO: reward", [round(r, 2) for r in mean])
session.close()

# %% [markdown]
# ## An advantage of your own
#
# A function of the returns and of the group that each row belongs to. `compares="group"` says that responses to one prompt are held
# against one another, so a group of one is refused before anything is trained. This one goes by rank and not by size.


# %%
@posttrain.choice(compares="group")
def by_rank(returns, group):
    """The rank of a return within its group, from -1 to 1; equal returns share their mean rank."""
    out = torch.zeros_like(returns)
    for g in group.unique():
        mine = returns[group == g]
        above = (mine[:, None] > mine[None, :]).sum(1) - (mine[:, None] < mine[None, :]).sum(1)
        out[group == g] = above.to(out) / max(1, len(mine) - 1)
    return out


ranked = posttrain.method("grpo", credit=by_rank)
print(by_rank(torch.tensor([0.0, 0.2, 0.2, 1.0]), torch.tensor([0, 0, 0, 0])))

# %% [markdown]
# It is checked as every method of the table is: no split into microbatches changes its gradient, a masked token has none, and so on.

# %%
print(posttrain.testing.check_method(ranked))

# %%
with posttrain.Session("model", method=ranked, updates=8, **asked) as session:
    run = session.run()
mean = run.metrics["reward/mean"]
print("by rank: reward", [round(r, 2) for r in mean])

# %% [markdown]
# ## A loss of your own
#
# `forward_backward` and `optim_step` are the two halves of an update. A loss is one number a token; weights stay the method's, and
# so do advantages that the batch does not bring.

# %%
with posttrain.Session("model", method=ranked, updates=2, **asked) as session:
    batch = session.batch(session.sample())
    found = session.forward_backward(batch, lambda out, b: -out.logp * b.advantage - 0.01 * out.entropy)
    print("loss", round(found.metrics["loss"], 3), "largest gradient", max(found.norms, key=found.norms.get))
    session.optim_step()
    session.publish()

# %% [markdown]
# To use the advantage from a recipe, put the function into a file: [adding a method](../add-a-method.md).
