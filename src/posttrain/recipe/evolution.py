"""The rules of methods that perturb the weights (`step = "evolution"`), for the table in rules.py."""

from posttrain.math.choice import function_of
from posttrain.math.evolution import mirrored
from posttrain.recipe.rule import Context, Predicate, Rule


def evolves(c: Context) -> bool:
    """Return whether the method takes a step along the noise of perturbed weights, without a gradient."""
    return c.line.step == "evolution"


def _refused(key: str, condition: str, when: Predicate, problem: str, fix: str) -> Rule:
    condition = f"{condition}, and the method perturbs the weights"
    return Rule(key, condition, lambda c: evolves(c) and when(c), problem, fix)


def _unread(key: str, problem: str) -> Rule:
    return Rule(key, "the method perturbs the weights", evolves, problem, "leave it out", unread=True)


def _lacks_mirror_image(c: Context) -> bool:
    return function_of(getattr(c.method, "noise", None)) is mirrored and c.recipe.rollout.group_size % 2 == 1


EVOLUTION_RULES: tuple[Rule, ...] = (
    _unread("steps", "{table} is never read by {name}, which makes one step an update, without a gradient"),
    *(
        _unread(f"optim.{key}", "is never read: {name} makes a plain step, without AdamW or Muon")
        for key in ("name", "betas", "eps", "weight_decay", "max_grad_norm")
    ),
    _unread("rollout.router_replay", "is never read: {name} passes no rows through the model"),
    _refused(
        "method.name",
        "several ranks train",
        lambda c: c.ranks > 1,
        "one rank plays the whole population of {name}",
        "train with one rank",
    ),
    _refused(
        "verifier",
        "the verifier judges several answers at once",
        lambda c: c.verifier and c.verifier.grouped,
        "the members of {name}'s population answer one after another, and each answer is judged alone",
        "take a verifier that judges one answer",
    ),
    _refused(
        "search",
        "there is a [search]",
        lambda c: c.recipe.search is not None,
        "{name} trains on answers of perturbed weights, and a search draws moves",
        "leave [search] out",
    ),
    _refused(
        "rollout.group_size",
        "it is odd, with method.noise 'mirrored'",
        _lacks_mirror_image,
        "members come in pairs, and one of a population of {rollout.group_size} has none",
        "give an even number, or set method.noise = 'independent'",
    ),
    _refused(
        "rollout.replay",
        "it is above 0",
        lambda c: c.recipe.rollout.replay,
        "a step of {name} is along the noise of its own update",
        "leave it out",
    ),
    _refused(
        "async.max_lag",
        "it is above 0",
        lambda c: c.recipe.async_.max_lag,
        "the answers of an update of {name} are drawn by the population of this update",
        "leave it out; async.samplers = N deals the tasks of each member among N samplers",
    ),
)
