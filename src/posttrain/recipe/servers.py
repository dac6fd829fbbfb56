"""The rules of vLLM's servers, and of an engine that sleeps, for the table in rules.py."""

from posttrain.recipe.rule import Context, Rule


def _lacks_servers(c: Context) -> bool:
    return c.servers not in (0, c.samplers)


SERVER_RULES: tuple[Rule, ...] = (
    Rule(
        "async.samplers",
        "engine.url names fewer or more servers, and one rank has all samplers",
        lambda c: _lacks_servers(c) and c.samplers == c.recipe.async_.samplers,
        "each sampler replaces the weights of a server of its own, and engine.url names {servers}",
        "set it to {servers}, or name {samplers} there",
    ),
    Rule(
        "engine.url",
        "several ranks train, async.place is not 'ray', and it names fewer or more servers than ranks × "
        "async.samplers",
        lambda c: _lacks_servers(c) and c.samplers != c.recipe.async_.samplers,
        "each sampler of each rank replaces the weights of a server of its own, and {samplers} samplers "
        "have {servers}",
        "name {samplers}; or set async.place to 'ray', where the samplers of one rank draw for all",
    ),
    Rule(
        "rollout.router_replay",
        "engine.name is 'vllm'",
        lambda c: c.recipe.engine.name == "vllm" and c.recipe.rollout.router_replay,
        "the experts that vLLM chooses are not read",
        "take engine.name = 'native', or leave it out",
    ),
    Rule(
        "engine.sleep",
        "engine.name is 'native'",
        lambda c: c.recipe.engine.name == "native",
        "is never read: engine.name is 'native', which frees nothing between updates",
        "leave it out",
        unread=True,
    ),
    Rule(
        "engine.sleep",
        "async.max_lag is above 0",
        lambda c: c.online and c.recipe.engine.sleep and c.recipe.async_.max_lag,
        "samplers draw while the learner trains, and an engine that sleeps cannot",
        "leave it out, or set async.max_lag to 0",
    ),
    Rule(
        "engine.sleep",
        "async.place is 'ray'",
        lambda c: c.recipe.engine.sleep and c.recipe.async_.where == "ray",
        "Ray reserves GPUs for samplers, which share none with the learner",
        "leave it out",
    ),
)
