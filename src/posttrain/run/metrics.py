"""Metrics of episodes: rewards, lengths, verdicts, coverage and age, named as in docs/metrics.md."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from posttrain.envs.tools.call import COUNTED
from posttrain.math.coverage import coverage
from posttrain.run.hacking_metrics import part_means
from posttrain.types import TRUNCATED, AnyEpisode, worth
from posttrain.verifiers.protocol import UNJUDGED


def rollout_metrics(groups: Sequence[Sequence[AnyEpisode]], version: int, right: float) -> dict[str, float]:
    """Return the metrics of an update's groups; episodes that failed are only counted."""
    episodes = [e for group in groups for e in group]
    judged = [e for e in episodes if not e.verdict.failed]
    out = verdict_shares(episodes) | search_metrics(episodes, right) | tool_metrics(episodes)
    if not judged:
        return out
    lengths = [e.length for e in judged]
    lags = Counter[int]()
    for e in judged:
        lags.update({version - drew: tokens for drew, tokens in e.versions.items()})
    by_group = [g for group in groups if (g := [e for e in group if not e.verdict.failed])]
    return (
        out
        | ({} if _unjudged(judged) else _reward_metrics(judged, by_group, right))
        | {
            "distinct": statistics.fmean(
                len({e.response_hash for e in group}) / len(group) for group in by_group
            ),
            "length/mean": statistics.fmean(lengths),
            "length/max": float(max(lengths)),
            "length/clipped": sum(e.stop in TRUNCATED for e in judged) / len(judged),
            "length/total": float(sum(lengths)),
        }
        | lag_metrics(lags)
    )


def _unjudged(episodes: Sequence[AnyEpisode]) -> bool:
    return all(e.verdict.label == UNJUDGED for e in episodes)


def _reward_metrics(
    judged: Sequence[AnyEpisode], by_group: Sequence[Sequence[AnyEpisode]], right: float
) -> dict[str, float]:
    rewards = [e.reward for e in judged]
    spreads = [statistics.pstdev(e.reward for e in group) for group in by_group if len(group) > 1]
    return (
        {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "accuracy": statistics.fmean(is_right(e, right) for e in judged),
        }
        | ({"reward/group_std": statistics.fmean(spreads)} if spreads else {})
        | seat_rewards(judged)
        | pass_at_powers(by_group, right)
    )


def seat_rewards(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return the mean reward of each seat, for games that the policy plays against itself; else nothing."""
    seats = sorted({e.seat for e in episodes})
    rewards = {n: [e.reward for e in episodes if e.seat == n] for n in seats if seats[-1]}
    return {f"seat/{n}/reward": statistics.fmean(values) for n, values in rewards.items()}


def pass_at_powers(groups: Sequence[Sequence[AnyEpisode]], right: float) -> dict[str, float]:
    """Return pass@1, pass@2, pass@4 ..., each the mean over the groups that are large enough.

    Failed episodes must be left out: a group is then smaller, and its estimate as unbiased as the others.
    """
    counts = [(sum(is_right(e, right) for e in group), len(group)) for group in groups]
    out, k = {}, 1
    while estimates := [coverage(c, n, k) for c, n in counts if n >= k]:
        out[f"pass@{k}"] = statistics.fmean(estimates)
        k *= 2
    return out


def evaluation_metrics(
    episodes: Sequence[AnyEpisode], right: float, auditors: Collection[str] = ()
) -> dict[str, float]:
    """Return accuracy, reward, its parts and length on held-out tasks; NaN if no episode could be judged."""
    judged = [e for e in episodes if not e.verdict.failed]
    mean = statistics.fmean if judged else lambda values: math.nan
    scores = {
        "eval/accuracy": mean([float(is_right(e, right)) for e in judged]),
        "eval/reward": mean([e.reward for e in judged]),
        "eval/scored": mean([float(e.verdict.label == "scored") for e in judged]),
    }
    return {
        **({} if judged and _unjudged(judged) else scores),
        "eval/length": mean([float(e.length) for e in judged]),
        "eval/errors": (len(episodes) - len(judged)) / max(len(episodes), 1),
        **{f"eval/{k}": v for k, v in search_metrics(episodes, right).items() if k.startswith("search/")},
        **{f"eval/{k}": v for k, v in tool_metrics(episodes).items()},
        **{f"eval/{k}": v for k, v in part_means(judged, auditors).items()},
    }


def named_evaluation_metrics(
    groups: Sequence[Sequence[AnyEpisode]],
    right: float,
    auditors: Mapping[str, Collection[str]],
    separate: Collection[str] = (),
) -> dict[str, float]:
    """Return the metrics of an evaluation; those of a source with a name are also under eval/NAME/.

    groups: the answers to each task; of several to a task, pass@k is measured too. auditors: by the name of
    a source, the parts of its verifier that only record. separate: sources that are measured by name alone.
    """

    def measure(groups: Sequence[Sequence[AnyEpisode]], parts: Collection[str]) -> dict[str, float]:
        metrics = evaluation_metrics([e for group in groups for e in group], right, parts)
        judged = [[e for e in group if not e.verdict.failed] for group in groups]
        several = {"eval/accuracy"} <= metrics.keys() and max(map(len, judged), default=0) > 1
        passes = pass_at_powers(judged, right) if several else {}
        return metrics | {f"eval/{key}": value for key, value in passes.items()}

    names = {name: [g for g in groups if g and g[0].task.dataset == name] for name in auditors}
    joint = [group for group in groups if group and group[0].task.dataset not in separate]
    own_parts = frozenset[str]().union(*(parts for name, parts in auditors.items() if name not in separate))
    metrics = measure(joint, own_parts) if joint else {}
    for name, parts in auditors.items():
        if name and names[name]:
            own_metrics = measure(names[name], parts)
            metrics |= {key.replace("eval/", f"eval/{name}/", 1): v for key, v in own_metrics.items()}
    return metrics


def search_metrics(episodes: Sequence[AnyEpisode], right: float) -> dict[str, float]:
    """Return the results and costs of searches, each search once; empty without searches."""
    searched = [e for e in episodes if e.spent]
    if not searched:
        return {}
    total = Counter[str]()
    for e in searched:
        total.update(e.spent)
    seconds = total["model_s"] + total["prover_s"]
    out = {
        "search/solved": statistics.fmean(is_right(e, right) for e in searched),
        "search/moves": total["moves"] / len(searched),
    }
    if total["followed"]:
        out["search/merged"] = total["merged"] / total["followed"]
    if total["moves"]:
        out["search/refused"] = total["refusals"] / total["moves"]
    return out | ({"speed/prover_share": total["prover_s"] / seconds} if seconds else {})


def tool_metrics(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return tools/*, agent/* and greedy/*: means over the episodes that have such; empty if none has."""
    parts = [e.verdict.parts for e in episodes]
    out: dict[str, float] = {}
    for prefix in COUNTED:
        counts = [part for part in parts if any(name.startswith(prefix) for name in part)]
        names = sorted({name for part in counts for name in part if name.startswith(prefix)})
        out |= {name: statistics.fmean(part.get(name, 0.0) for part in counts) for name in names}
    return out


def lag_metrics(lags: Mapping[int, int]) -> dict[str, float]:
    """Return the mean and maximum age of tokens, in updates, and the share of each age if any is above 0.

    lags: number of tokens by age. Ages of 16 or more share one metric.

    >>> lag_metrics({0: 1, 1: 2, 2: 1})
    {'lag/mean': 1.0, 'lag/max': 2.0, 'lag/0': 0.25, 'lag/1': 0.5, 'lag/2': 0.25}
    """
    total = sum(lags.values())
    ages = Counter[int]()
    for lag, tokens in lags.items():
        ages[min(lag, 16)] += tokens
    shares = {f"lag/{age}": ages[age] / total for age in range(max(ages) + 1)} if max(ages) else {}
    mean = sum(lag * tokens for lag, tokens in lags.items()) / total
    return {"lag/mean": mean, "lag/max": float(max(lags))} | shares


def success_rate(group: Sequence[AnyEpisode], right: float) -> float | None:
    """Return the share of right answers among those that could be judged; None if none could."""
    judged = [is_right(e, right) for e in group if not e.verdict.failed]
    return statistics.fmean(judged) if judged else None


def is_right(episode: AnyEpisode, least: float) -> bool:
    """Return True if the label is right, or, if it says neither right nor wrong, if the reward is enough."""
    return is_right_verdict(episode.verdict.label, episode.reward, least)


def is_right_verdict(label: str, reward: float | None, least: float) -> bool:
    """Return the same for a label and a reward; a reward of None is never right."""
    if label in ("right", "wrong", "no_answer"):
        return label == "right"
    return reward is not None and reward >= worth([least])


def verdict_shares(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return verdict/<label>: the share of episodes of each label."""
    counts = Counter(e.verdict.label for e in episodes)
    return {f"verdict/{label}": n / len(episodes) for label, n in sorted(counts.items())}
