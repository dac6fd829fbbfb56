"""Records of a data set as rows that an offline method learns from, in groups.

answers    a conversation is a row; what assistants say is trained
rankings   a question is a group, each of its answers a row whose reward is what it was worth
labels     an answer is a row, and its label the reward
steps      an answer is a row with a mark, and a label, behind each of its steps

A method that reads a head needs no token trained but places marked: its row ends in one token more, which is
never fed, so that the state "before" it is that of the last real one (learner/pack.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, overload

from posttrain.base.chat import Chat
from posttrain.data import Ranking, SteppedSolution
from posttrain.data.corpus import Corpus, Text, load_corpus
from posttrain.data.gather import summary
from posttrain.data.messages import turns_of
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.training_conversations import Telling, telling
from posttrain.plan.model_info import ModelInfo, Say
from posttrain.plan.resolve import Resolved
from posttrain.types import PROBE, Message, Trajectory, UserError

Group = tuple[Trajectory, ...]
NOBODY = 0
"""The token behind the end of a row that a head reads. It is never fed, so any will do."""


@dataclass(frozen=True)
class Shaper:
    """Turns records into groups of rows of at most `bound` tokens, and counts what it cut or left out."""

    chat: Chat
    bound: int
    marks: bool
    """Whether a head is read at the end of each answer, in place of the answer's tokens being trained."""
    separator: str = "\n\n"
    tool_format: FormatName = "auto"
    """How the calls of a conversation are written."""

    @cached_property
    def telling(self) -> Telling:
        """How calls and tools are shown."""
        return telling(self.chat, self.tool_format)

    def groups(
        self, records: Sequence[Any], learns: str, say: Say, bad: Literal["error", "skip"] = "error"
    ) -> list[Group]:
        """The groups of all records; see each."""
        return [group for _, group in self.each(records, learns, say, bad)]

    def each(
        self, records: Sequence[Any], learns: str, say: Say, bad: Literal["error", "skip"] = "error"
    ) -> list[tuple[Any, Group]]:
        """The records that are of use, and the group of each.

        What is longer than the bound is cut there, or left out if a head reads its end, or if nothing
        trained remains of it. A record that the chat template refuses is an error, or is left out and counted
        if bad is "skip". Raises UserError if nothing is left.
        """
        make: dict[str, Callable[[Any, Counter[str]], Group]] = {
            "answers": self._conversation,
            "rankings": self._ranking,
            "labels": self._ranking,
            "steps": self._steps,
        }
        if learns == "steps":
            try:
                self.chat.between(self.separator)
            except UserError as error:
                raise UserError("batch.separator", error.problem, "give another one") from None
        counts: Counter[str] = Counter()
        made: list[tuple[Any, Group]] = []
        faults: list[UserError] = []
        for record in records:
            try:
                made.append((record, make[learns](record, counts)))
            except UserError as error:
                faults.append(error.at(record.source))
                if bad == "error":
                    raise faults[0] from None
        if faults and not made:
            problem = f"none of {len(records)} {_NAMES[learns]} can be used; the first: {faults[0].problem}"
            raise UserError(faults[0].key, problem, faults[0].fix)
        if faults:
            say(f"{len(faults)} of {len(records)} {_NAMES[learns]} skipped: {summary(faults)}")
        kept = [(record, group) for record, group in made if group]
        for problem, number in counts.items():
            say(f"{number} of {len(records)} {_NAMES[learns]} {problem.format(bound=self.bound)}")
        if made and not kept:
            raise UserError(
                "batch.max_length",
                f"all {len(made)} {_NAMES[learns]} were filtered out: none has a trained token within "
                f"{self.bound} tokens",
                "raise it",
            )
        return kept

    def _conversation(self, record: Any, counts: Counter[str]) -> Group:
        messages, tools = record.messages, getattr(record, "tools", ())
        if tools or _calls(record):
            messages, tools = self.telling.told(messages, tools)
        tokens, trained = self.chat.render_supervised(messages, tools)
        if any(trained[self.bound :]):
            counts["are longer than {bound} tokens and were cut there"] += 1
        tokens, trained = tokens[: self.bound], trained[: self.bound]
        if not any(trained):
            counts["had nothing left to train on and are left out"] += 1
            return ()
        reward: Any = getattr(record, "reward", None)
        # Methods that read it have refused what is no number; to the others it is nothing.
        if not isinstance(reward, (int, float)) or isinstance(reward, bool):
            reward = 0.0
        return (row(tokens, trained, reward),)

    def _ranking(self, record: Ranking, counts: Counter[str]) -> Group:
        if self.marks:
            return self._judged(record, counts)
        sides = self.chat.render_answers(*self._told(record))
        if any(any(trained[self.bound :]) for _, trained in sides):
            counts["are longer than {bound} tokens and were cut there"] += 1
        cut = [(tokens[: self.bound], trained[: self.bound]) for tokens, trained in sides]
        if not all(any(trained) for _, trained in cut):
            counts["had an answer with nothing left to train on and are left out"] += 1
            return ()
        if len({tuple(tokens) for tokens, _ in cut}) < len(cut):
            counts["have answers that no longer differ once they are cut and are left out"] += 1
            return ()
        return tuple(row(*side, score) for side, score in zip(cut, record.scores, strict=True))

    def _judged(self, record: Ranking, counts: Counter[str]) -> Group:
        """The answers as a verifier sees them."""
        prompt, answers, tools = self._told(record)
        sides = []
        for *earlier, last in answers:
            if beside := [key for key in ("tool_calls", "reasoning_content") if key in last]:
                problem = (
                    f"the last message of an answer has {beside[0]}, and a reward model reads text alone"
                )
                raise UserError("", problem, "write it into content, or leave such records out")
            sides += self.chat.render_for_judge([*prompt, *earlier], [last["content"]], tools)
        if any(len(tokens) > self.bound for tokens in sides):
            counts["have an answer that ends beyond {bound} tokens and are left out"] += 1
            return ()
        return tuple(marked(t, {len(t): s}) for t, s in zip(sides, record.scores, strict=True))

    def _told(
        self, record: Ranking
    ) -> tuple[tuple[Message, ...], list[tuple[Message, ...]], tuple[Mapping[str, Any], ...]]:
        """Return the prompt, the messages of each answer and the tools, as the template is given them."""
        answers = [turns_of(answer) for answer in record.answers]
        if not (record.tools or _calls(record)):
            return record.messages, answers, ()
        told = [self.telling.told((*record.messages, *answer), record.tools) for answer in answers]
        # Messages are added and merged, but each of the assistant's stays one.
        before = sum(message["role"] == "assistant" for message in record.messages)
        starts = [[n for n, m in enumerate(found) if m["role"] == "assistant"][before] for found, _ in told]
        (first, tools), start = told[0], starts[0]
        return first[:start], [found[at:] for (found, _), at in zip(told, starts, strict=True)], tools

    def _steps(self, record: SteppedSolution, counts: Counter[str]) -> Group:
        # A separator within a step parts it for a verifier too: what is judged is its end.
        parts = [[part for part in step.split(self.separator) if part.strip()] for step in record.steps]
        tokens, ends = self.chat.render_steps(
            record.messages, [part for step in parts for part in step], self.separator
        )
        behind = [0, *ends]
        counted = accumulate(len(step) for step in parts)
        found = zip(counted, record.labels, strict=True)
        labels = {behind[at]: label for at, label in found if label is not None}
        if len(tokens) > self.bound:
            counts["are longer than {bound} tokens and lose the steps beyond"] += 1
        labels = {at: label for at, label in labels.items() if 0 < at <= self.bound}
        if not labels:
            counts["have no labelled step within {bound} tokens and are left out"] += 1
            return ()
        return (marked(tokens[: max(labels)], labels),)


def _calls(record: Any) -> bool:
    answers = [turns_of(answer) for answer in getattr(record, "answers", ())]
    return any("tool_calls" in message for turns in (record.messages, *answers) for message in turns)


_NAMES = {"answers": "conversations", "rankings": "rankings", "labels": "answers", "steps": "answers"}


def row(tokens: list[int], trained: list[bool], reward: float) -> Trajectory:
    """A row that was given and not sampled, its reward at the last trained token."""
    earned = [0.0] * len(tokens)
    earned[len(trained) - 1 - trained[::-1].index(True)] = float(reward)
    return Trajectory.given(tokens, trained=trained, reward=earned)


def marked(tokens: list[int], labels: dict[int, float]) -> Trajectory:
    """A row whose head is read before each of these positions, which carry what it should say.

    >>> r = marked([7, 8, 9], {3: 1.0})
    >>> r.tokens, r.sampled, r.reward
    ([7, 8, 9, 0], [False, False, False, True], [0.0, 0.0, 0.0, 1.0])
    """
    places = range(len(tokens) + 1)
    trained, reward = [t in labels for t in places], [labels.get(t, 0.0) for t in places]
    return Trajectory.given([*tokens, NOBODY], trained=trained, reward=reward)


def with_probes(groups: Sequence[Group], bound: int) -> list[Group]:
    """The groups, and behind them each row's prompt with an answer to another prompt, which is not learnt.

    An answer to the same prompt would be no mismatch. Rows are ordered by prompt and answers shifted by the
    most rows of a prompt, so each answer is used once, unless more than half of the rows share a prompt. A
    probe ends with its answer, or at `bound` tokens. A batch of one prompt has none.
    """
    prompts: dict[tuple[int, ...], list[Trajectory]] = {}
    for each in (row for group in groups for row in group):
        prompts.setdefault(_prompt(each), []).append(each)
    rows = [(prompt, each) for prompt, found in prompts.items() for each in found]
    shift = max(map(len, prompts.values()), default=0)
    probes: list[Group] = []
    for place, (prompt, _) in enumerate(rows):
        later = (rows[(place + shift + n) % len(rows)] for n in range(len(rows)))
        answer = next((each for other, each in later if other != prompt), None)
        if answer is None:
            continue
        start = answer.prompt_length
        tokens = [*prompt, *answer.tokens[start:]][:bound]
        trained = [*(False for _ in prompt), *answer.sampled[start:]][:bound]
        probes.append((Trajectory.given(tokens, trained=trained, version=[PROBE] * len(tokens)),))
    return [*groups, *probes]


def _prompt(row: Trajectory) -> tuple[int, ...]:
    return tuple(row.tokens[: row.prompt_length])


def _longest_probe(groups: Sequence[Group], bound: int) -> int:
    """Tokens of the longest probe that a batch of these may have; UserError if no batch can have any."""
    rows = [row for group in groups for row in group]
    if len(set(map(_prompt, rows))) < 2:
        raise UserError(
            "task.data",
            "the KL is measured on answers to other prompts, and all records have the same prompt",
            "give records of two prompts or more",
        )
    prompts = (row.prompt_length for row in rows)
    answers = (len(row.tokens) - row.prompt_length for row in rows)
    return min(bound, max(prompts) + max(answers))


def row_bound(resolved: Resolved, policy: ModelInfo) -> int:
    """The most tokens of a row."""
    return min(resolved.recipe.batch.max_length or policy.context, policy.context)


class Singles(Sequence[Group]):
    """Each row of a sequence as a group of its own, made when it is taken."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Group: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Group]: ...
    def __getitem__(self, i: int | slice) -> Group | Sequence[Group]:
        return Singles(self.rows[i]) if isinstance(i, slice) else (self.rows[i],)


def numbered(groups: Iterable[Group]) -> tuple[list[Trajectory], list[int]]:
    """The rows of the groups, and for each the number of its group."""
    pairs = [(each, number) for number, group in enumerate(groups) for each in group]
    return [each for each, _ in pairs], [number for _, number in pairs]


def build_groups(
    resolved: Resolved, policy: ModelInfo, say: Say
) -> tuple[Sequence[Group], Sequence[Group], int]:
    """What an offline method trains and is evaluated on, and the tokens of the longest group."""
    batch, learns, bound = resolved.recipe.batch, resolved.line.learns, row_bound(resolved, policy)
    if learns == "text":
        found = [_corpus(text, policy, bound, say) for text in (*resolved.train, *resolved.held_out)]
        return Singles(found[0]), Singles(found[1]) if len(found) > 1 else [], found[0].longest
    shaper = Shaper(policy.chat, bound, "head" in resolved.method.needs, batch.separator, batch.tool_format)
    if any(getattr(each, "tools", ()) or _calls(each) for each in resolved.train):
        say(f"conversations call tools: {shaper.telling}")
    task = resolved.recipe.task
    groups = shaper.groups(resolved.train, learns, say, task.data.bad if task.data else "error")
    longest = max(sum(len(row.tokens) for row in group) for group in groups)
    if resolved.method.probes:
        longest = max(longest, _longest_probe(groups, bound))
    bad = task.held_out.bad if task.held_out else "error"
    return groups, shaper.groups(resolved.held_out, learns, say, bad), longest


def _corpus(text: Text, policy: ModelInfo, bound: int, say: Say) -> Corpus:
    eos = policy.tokenizer.eos_token_id
    if eos is None:
        raise UserError("model.path", "the tokenizer has no end token, which parts documents")
    return load_corpus(text, encode=policy.chat.spell, eos=eos, max_length=bound, say=say)


def bytes_of(groups: Sequence[Group], limit: int) -> float:
    """Bytes of the text that the first rows predict; 0 where they are no text."""
    corpus = groups.rows if isinstance(groups, Singles) else None
    return corpus.utf8_bytes(range(min(limit, len(corpus)))) if isinstance(corpus, Corpus) else 0.0
