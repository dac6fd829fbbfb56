"""The rules of vLLM's servers, and of an engine that sleeps, for the table in rules.py."""

from posttrain.recipe.rule import Context, Rule


def _lacks_servers(c: Context) -> bool:
    return c.servers not in (0, c.samplers)


def _replays_vllm(c: Context) -> bool:
    return c.recipe.engine.name == "vllm" and c.recipe.rollout.router_replay


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
        "several ranks train, and it names neither async.samplers servers nor ranks × async.samplers",
        lambda c: _lacks_servers(c) and c.samplers != c.recipe.async_.samplers,
        "each sampler replaces the weights of a server of its own, and {samplers} samplers have {servers}",
        "name {async_.samplers}, from which rank 0 draws for all, or {samplers}, one for each sampler of all "
        "ranks; or set async.samplers to {servers}",
    ),
    Rule(
        "rollout.router_replay",
        "engine.name is 'vllm', and engine.url is empty",
        lambda c: _replays_vllm(c) and not c.recipe.engine.url,
        "the experts that vLLM chooses are read from servers alone",
        "name one in engine.url, take engine.name = 'native', or leave it out",
    ),
    Rule(
        "sampling.stop",
        "engine.name is 'vllm', and rollout.router_replay is set",
        lambda c: _replays_vllm(c) and c.recipe.sampling.stop,
        "vLLM says which experts it chose once it has ended an answer, and texts end answers here",
        "leave it out, take engine.name = 'native', or leave rollout.router_replay out",
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
