"""What is said of episodes: rewards, lengths, verdicts, coverage and age, in the names of docs/metrics.md."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from posttrain.envs.tools.call import COUNTED
from posttrain.math.coverage import coverage
from posttrain.run.hacking_metrics import part_means
from posttrain.types import AnyEpisode, worth
from posttrain.verifiers.protocol import UNJUDGED


def rollout_metrics(groups: Sequence[Sequence[AnyEpisode]], version: int, right: float) -> dict[str, float]:
    """Rewards, lengths, lags and verdicts of an update's groups. Episodes that failed are only counted."""
    episodes = [e for group in groups for e in group]
    judged = [e for e in episodes if not e.verdict.failed]
    out = verdict_shares(episodes) | search_metrics(episodes, right) | tool_metrics(episodes)
    if not judged:
        return out
    lengths = [e.length for e in judged]
    lags = Counter[int]()
    for e in judged:
        lags.update({version - drew: tokens for drew, tokens in e.versions.items()})
    by_group = [kept for group in groups if (kept := [e for e in group if not e.verdict.failed])]
    return (
        out
        | ({} if _unjudged(judged) else _reward_metrics(judged, by_group, right))
        | {
            "distinct": statistics.fmean(
                len({e.response_hash for e in group}) / len(group) for group in by_group
            ),
            "length/mean": statistics.fmean(lengths),
            "length/max": float(max(lengths)),
            "length/clipped": sum(e.stop in ("length", "context") for e in judged) / len(judged),
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
    """What each seat earned, of games that the policy plays against itself: in other games nothing."""
    seats = sorted({e.seat for e in episodes})
    each = {n: [e.reward for e in episodes if e.seat == n] for n in seats if seats[-1]}
    return {f"seat/{n}/reward": statistics.fmean(rewards) for n, rewards in each.items()}


def pass_at_powers(groups: Sequence[Sequence[AnyEpisode]], right: float) -> dict[str, float]:
    """pass@1, pass@2, pass@4 ... up to the largest group, each the mean over groups that are large enough.

    Failed episodes must be left out: a group is then smaller, and its estimate as unbiased as the others'.
    """
    counts = [(sum(is_right(e, right) for e in group), len(group)) for group in groups]
    out, k = {}, 1
    while found := [coverage(c, n, k) for c, n in counts if n >= k]:
        out[f"pass@{k}"] = statistics.fmean(found)
        k *= 2
    return out


def evaluation_metrics(
    episodes: Sequence[AnyEpisode], right: float, auditors: Collection[str] = ()
) -> dict[str, float]:
    """Accuracy, reward, its parts and length on held-out tasks; NaN where nothing could be judged."""
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


def search_metrics(episodes: Sequence[AnyEpisode], right: float) -> dict[str, float]:
    """What searches came to and spent, each counted once; empty where nothing was searched."""
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
    """tools/* and agent/*: what episodes counted, a mean over those that did; empty where none did."""
    parts = [e.verdict.parts for e in episodes]
    counts = [each for each in parts if any(name.startswith(COUNTED) for name in each)]
    names = sorted({name for parts in counts for name in parts if name.startswith(COUNTED)})
    return {name: statistics.fmean(parts.get(name, 0.0) for parts in counts) for name in names}


def lag_metrics(lags: Mapping[int, int]) -> dict[str, float]:
    """How many updates old tokens are, so many of each age: mean, maximum and, if any is old, the share of
    each age (16: or more).

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
    """The share of right answers among those that could be judged; None if none could."""
    judged = [is_right(e, right) for e in group if not e.verdict.failed]
    return statistics.fmean(judged) if judged else None


def is_right(episode: AnyEpisode, least: float) -> bool:
    """Whether the verdict's label says so; where it says neither, whether the reward is at least `least`."""
    return told_right(episode.verdict.label, episode.reward, least)


def told_right(label: str, reward: float | None, least: float) -> bool:
    """The same of a verdict's label and a reward; None is nobody's."""
    if label in ("right", "wrong", "no_answer"):
        return label == "right"
    return reward is not None and reward >= worth([least])


def verdict_shares(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """verdict/<label>: the share of episodes of each class."""
    counts = Counter(e.verdict.label for e in episodes)
    return {f"verdict/{label}": n / len(episodes) for label, n in sorted(counts.items())}
