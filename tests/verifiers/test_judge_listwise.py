"""A judge of whole groups: rewards by rank, in an order that is drawn, and groups that it does not rank."""

import itertools
import random
import re
from pathlib import Path

import pytest

from posttrain.base.usercode import load_named
from posttrain.recipe.verifier import read_verifier
from posttrain.types import Task, UserError
from posttrain.verifiers.judge.endpoint import Endpoint
from posttrain.verifiers.judge.listwise import Listwise, rank_score
from posttrain.verifiers.judge.rubric import read_rubric
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group

SERVER = Path(__file__).parent / "openai_server.py"
serving, Status = (load_named(f"{SERVER}:{name}") for name in ("serving", "Status"))
TASK = Task(id="t1", messages=({"role": "user", "content": "Say a long word."},), source="d.jsonl:1")


def over(server, **options):
    writer = Endpoint(base_url=server.url, model="m", timeout_s=10.0, retries=0, deadline_s=20.0)
    return Listwise(writer=writer, rubric=read_rubric("listwise"), **options)


def shown(asked):
    """The responses in the order in which the judge reads them."""
    found = re.findall(r"<<<RESPONSE_(\d+) \w{16}\n(.*?)\nRESPONSE_\1 \w{16}>>>", asked.text, re.DOTALL)
    assert [int(n) for n, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def longest_first(asked):
    """An order-blind judge: equal lengths are equally good."""
    texts = shown(asked)
    lengths = sorted({len(text) for text in texts}, reverse=True)
    tiers = [[str(n) for n, text in enumerate(texts, start=1) if len(text) == k] for k in lengths]
    return "Read.\nRanking: " + " > ".join(" = ".join(tier) for tier in tiers)


def scores(judge, responses, key=""):
    verdicts = judge.judge_group(Group(task=TASK, responses=tuple(responses), key=key))
    return [verdict.score for verdict in verdicts]


def test_rank_score_is_the_mean_of_all_comparisons():
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    for _ in range(200):
        ranks = [dice.randrange(4) for _ in range(dice.randint(2, 7))]
        slow = [
            sum((a < b) + (a == b) / 2 for j, b in enumerate(ranks) if j != i) / (len(ranks) - 1)
            for i, a in enumerate(ranks)
        ]
        fast = [rank_score(rank, ranks) for rank in ranks]
        assert fast == pytest.approx(slow), seed
        assert sum(fast) / len(fast) == pytest.approx(0.5), seed


def test_an_order_blind_judge_gives_rewards_that_permute_with_the_group():
    group = ["aaaa", "bb", "cc", "d", ""]
    reward = {"aaaa": 1.0, "bb": 0.625, "cc": 0.625, "d": 0.25, "": 0.0}
    with serving(longest_first) as server:
        judge = over(server)
        for n, order in enumerate(itertools.islice(itertools.permutations(group), 0, 120, 17)):
            assert scores(judge, order, f"{n}:t1") == [reward[text] for text in order]
    assert len({tuple(shown(asked)) for asked in server.asked}) > 3


def test_a_judge_that_likes_what_it_reads_first_is_not_told_the_order_of_the_group():
    with serving(lambda asked: "Ranking: 1 > 2 > 3") as server:
        judge = over(server)
        rewards = [dict(zip(o, scores(judge, o), strict=True)) for o in itertools.permutations("abc")]
        first = [scores(judge, "abc", f"{epoch}:t1")[0] for epoch in range(60)]
    assert all(reward == rewards[0] for reward in rewards)
    assert 10 <= first.count(1.0) <= 32  # a third of 60 with a standard deviation of 3.7


def test_equal_responses_are_shown_once_and_tie():
    with serving(longest_first) as server:
        assert scores(over(server), ["aa", "b", "aa"]) == [0.75, 0.0, 0.75]
        assert sorted(shown(server.asked[0])) == ["aa", "b"]
        assert scores(over(server), ["aa", "aa"]) == [0.5, 0.5]
        assert scores(over(server), ["aa"]) == [0.5]
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "ranking",
    ["Ranking: 1 > 2", "Ranking: 1 > 2 > 2", "Ranking: 1 > 2 > 4", "1 > 2 > 3", "Ranking: all equal"],
)
def test_a_ranking_that_leaves_out_an_answer_fails_the_group(ranking):
    with serving(lambda asked: ranking) as server:
        group = Group(task=TASK, responses=("a", "bb", "ccc", ""))
        verdicts = over(server, attempts=2).judge_group(group)
    assert [(v.score, v.label) for v in verdicts] == [(None, "unparsable")] * 4
    assert len(server.asked) == 2


def test_a_judge_that_is_down_fails_the_group_in_a_worker():
    with serving(lambda asked: Status(500)) as server, Pool(workers=1, deadline_s=30.0) as pool:
        verdicts = pool.judge(over(server), [(TASK, "a"), (TASK, "b")])
    assert [(v.score, v.label) for v in verdicts] == [(None, "unanswered")] * 2


def test_a_group_that_is_too_large_is_an_error_that_names_the_key():
    with serving(longest_first) as server, pytest.raises(UserError) as caught:
        scores(over(server, most_responses=2), ["a", "b", "c"])
    assert caught.value.key == "verifier.judge.most_responses"


def test_the_table_of_a_judge_builds_it():
    sets = ["rubric=listwise", "endpoint.base_url=http://x/v1", "endpoint.model=m"]
    judge = read_verifier("judge", sets)
    assert isinstance(judge, Listwise)
    assert (judge.grouped, judge.largest_group) == (True, 16)
    with pytest.raises(UserError):
        read_verifier("judge", [*sets, "verdict=logprobs"])
