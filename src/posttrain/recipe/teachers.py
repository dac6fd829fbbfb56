"""Rules of teachers: what the learning from another model's distributions cannot be combined with."""

from posttrain.recipe.rule import Context, Predicate, Rule


def _compares_with_teacher(c: Context) -> bool:
    return "teacher" in c.method.asks and c.method.compare is not None


def _lacks_url(c: Context) -> bool:
    return not c.recipe.reference.url


def _has_teacher(c: Context) -> bool:
    reference = c.recipe.reference
    return bool(reference.path or reference.hint or reference.url)


def _each_source_names_one(c: Context) -> bool:
    return bool(c.sources) and all(source.reference_path for source in c.sources if source.weight)


def _unread(key: str, problem: str, condition: str, when: Predicate) -> Rule:
    return Rule(key, condition, when, f"is never read: {problem}", "leave it out", unread=True)


TEACHER_RULES: tuple[Rule, ...] = (
    Rule(
        "task.reference_path",
        "the method reads no reference policy",
        lambda c: c.task.reference_path and not c.reads_reference,
        "{name} compares with no reference",
        "leave it out",
    ),
    Rule(
        "task.reference_path",
        "the method is offline, and does not compare whole distributions",
        lambda c: c.task.reference_path and not c.online and c.method.compare is None,
        "the reference of {name} is asked once, before training, and is one model",
        "set reference.path instead",
    ),
    *(
        Rule("reference.url", f"it is set, and {condition}", when, problem, fix)
        for condition, when, problem, fix in (
            (
                "the method does not learn from a teacher's whole distributions",
                lambda c: c.recipe.reference.url and not _compares_with_teacher(c),
                "{name} needs the reference itself, and a server gives its likeliest tokens",
                "take method.name = 'gkd' or 'kd', or leave it out",
            ),
            (
                "reference.top_k is 0",
                lambda c: c.recipe.reference.url and not c.recipe.reference.top_k,
                "a server gives some likeliest tokens, and not the whole vocabulary",
                "set reference.top_k, as to 20",
            ),
            (
                "reference.hint or refresh_every is set, or a task has a reference_path",
                lambda c: (
                    c.recipe.reference.url
                    and (
                        c.recipe.reference.hint
                        or c.recipe.reference.refresh_every
                        or any(source.reference_path for source in c.sources)
                    )
                ),
                "its model is one that stays as it is, and reads the policy's own rows",
                "leave reference.hint, refresh_every and task.reference_path out",
            ),
            (
                "train.shard is set, and several ranks train",
                lambda c: c.recipe.reference.url and c.recipe.train.shard and c.ranks > 1,
                "ranks that share weights make passes without rows, for which a server has no answer",
                "leave train.shard out, or give reference.path alone",
            ),
            (
                "sampling.temperature is not 1, and the method is online",
                lambda c: c.recipe.reference.url and c.online and c.recipe.sampling.temperature != 1,
                "it gives probabilities at temperature 1, and the policy draws at {sampling.temperature:g}",
                "set sampling.temperature to 1, or give reference.path alone",
            ),
        )
    ),
    _unread(
        "reference.top_k",
        "the method compares no whole distributions",
        "the method compares no whole distributions",
        lambda c: not c.compares_tables,
    ),
    *(
        _unread(f"reference.{key}", "reference.url is empty", "reference.url is empty", _lacks_url)
        for key in ("api_key_env", "deadline_s")
    ),
    _unread(
        "reference.path",
        "every source has a reference_path",
        "every source with a weight has a reference_path",
        _each_source_names_one,
    ),
    Rule(
        "reference.refresh_every",
        "it is above 0, and a task has a reference_path",
        lambda c: c.recipe.reference.refresh_every and any(source.reference_path for source in c.sources),
        "references of single tasks stay as they are",
        "leave it out, or set reference.path alone",
    ),
    Rule(
        "reference.path",
        "it is empty, as are reference.hint and url, and the method learns from a teacher alone",
        lambda c: "teacher" in c.method.asks and not _has_teacher(c),
        "{name} learns from a teacher alone, and no model is named",
        "set it to the teacher; or give gkd a reference.hint or reference.url, or distill a "
        "method.reward_weight above 0",
    ),
    *(
        Rule("reference.hint", condition, when, problem, fix)
        for condition, when, problem, fix in (
            (
                "it is set, and the method does not learn from a teacher's whole distributions",
                lambda c: c.recipe.reference.hint and not _compares_with_teacher(c),
                "{name} compares with the reference at the policy's own prompts",
                "set method.name to 'gkd', or leave it out",
            ),
            (
                "it is set, and the method is offline",
                lambda c: c.recipe.reference.hint and not c.online,
                "{name} learns from given answers, and nothing judges them",
                "set method.name to 'gkd', or leave it out",
            ),
            (
                "it is set, and a task is a conversation with tools, an environment or an agent, or a search",
                lambda c: c.recipe.reference.hint and (c.env or c.task.agent or c.recipe.search),
                "it is a part of the last message of a prompt, and these tasks have conversations",
                "leave one of them out",
            ),
            (
                "it is set, and rollout.replay is above 0",
                lambda c: c.recipe.reference.hint and c.recipe.rollout.replay,
                "the teacher's prompts for answers of earlier updates are not stored",
                "set rollout.replay to 0",
            ),
        )
    ),
    *(
        Rule("rollout.given_answers", f"it is above 0, and {condition}", when, problem, fix)
        for condition, when, problem, fix in (
            (
                "the method does not learn from a teacher's whole distributions",
                lambda c: c.recipe.rollout.given_answers and not _compares_with_teacher(c),
                "{name} takes every answer for one of the policy's",
                "set method.name to 'gkd', or leave it out",
            ),
            (
                "reference.hint is set",
                lambda c: c.recipe.rollout.given_answers and c.recipe.reference.hint,
                "a hint is for answers of the policy, and given ones have none",
                "leave one of them out",
            ),
            (
                "a game, env, tools or agent is given",
                lambda c: c.recipe.rollout.given_answers and (c.task.played or c.task.tools or c.task.agent),
                "episodes that are played are in no data",
                "leave it out",
            ),
        )
    ),
)
"""Rules of methods that learn from a teacher, and of their given answers."""
